"""Fork vLLM engines from one process that has imported vLLM: `python starter.py DESCRIPTOR` (host environment).

Imports are most of an engine's start: some 25 CPU seconds for each of its processes. Here they are paid once. An engine is then
a fork, whose schedulers and workers are forks again; all else is as `python -m vllm.entrypoints.openai.api_server` has it.

The descriptor is an end of a `multiprocessing.Pipe`. The first message is the list of modules that this vLLM does not have. Each
order, `{"arguments": [...], "environment": {...}, "log": "..."}`, is answered by the number of the process. This stays an ended
engine's own as long as the starter lives: only at its end does it reap any.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

PRELOADED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.completion.api_router",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that engines use. Those that a release of vLLM does not have are left out: each engine then imports them itself."""
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.1
_ENDS_WITHIN_S = 15.0


def preload() -> list[str]:
    """Import what engines use; return the names that this release does not have."""
    missing: list[str] = []
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
    return missing


def _fork_all() -> None:
    """Let an engine's own processes be forks as well, as vLLM has it on a GPU; on CPU it always spawns new Pythons."""
    for name in ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        vars(importlib.import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")


def _become(order: Mapping[str, Any]) -> None:
    """Turn this process, which was just forked, into an API server; never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        sink = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        source = os.open(os.devnull, os.O_RDONLY)
        for target, file in ((0, source), (1, sink), (2, sink)):
            os.dup2(file, target)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["api_server", *order["arguments"]]
        _fork_all()
        importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - its traceback goes to the log
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _obey(orders: Connection) -> None:
    """Fork an engine for each order until the other end is closed or a SIGTERM comes, then end all engines.

    There is no thread: a fork must not copy a lock that another thread holds.
    """
    engines: set[int] = set()
    signal.signal(signal.SIGTERM, _end)
    try:
        while True:
            order: Mapping[str, Any] = orders.recv()
            pid = os.fork()
            if pid == 0:
                orders.close()
                _become(order)
            engines.add(pid)
            orders.send(pid)
    except EOFError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all(engines)


def _end_all(engines: set[int]) -> None:
    for number, within_s in ((signal.SIGTERM, _ENDS_WITHIN_S), (signal.SIGKILL, 5.0)):
        for pid in engines:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
                os.killpg(pid, signal.SIGCONT)  # a stopped process obeys no SIGTERM
        until = time.monotonic() + within_s
        while engines and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            engines -= {pid for pid in engines if os.waitpid(pid, os.WNOHANG)[0]}


def main() -> None:
    """Import, say so, and obey."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # Ctrl-C reaches the whole terminal group: whoever started this one ends it by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders: Connection = Connection(int(sys.argv[1]))
    orders.send(preload())
    _obey(orders)


if __name__ == "__main__":
    main()
