"""Engines that start in seconds: forks of one process that has imported vLLM (`starter.py`)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from kvdev.engines import die_with_parent
from kvdev.paths import ROOT, STATE

_PROGRAM = Path(__file__).with_name("starter.py")
_SITE = Path(__file__).with_name("engine_site")
_READY_WITHIN_S = 300.0
_ANSWERS_WITHIN_S = 30.0


class ForkedProcess:
    """A process that the starter forked: `subprocess.Popen` as far as engines need it; any thread may use it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)

    def poll(self) -> int | None:
        """Return None while it lives, else 0: its exit code is the starter's alone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        ended = select.poll()
        ended.register(self._descriptor, select.POLLIN)
        if not ended.poll(None if timeout is None else 1e3 * timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def terminate(self) -> None:
        """Send SIGTERM to this process alone."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)


@final
@dataclass
class Starter:
    """The process that imports vLLM. Its `launch` is what `kvdev.engines.Engine` starts a process with."""

    orders: Connection
    _is_ready: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedProcess:
        """Fork an engine: `command` is what would start it in a new Python, `-m MODULE` and then its arguments.

        Its worker lives in the scheduler's process unless `environment` says otherwise.
        """
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
        order = {"arguments": list(command[3:]), "environment": variables, "log": str(log)}
        with self._lock:
            if not self._is_ready:
                if missing := self.answer(_READY_WITHIN_S):
                    print(f"this vLLM does not have {', '.join(missing)}: not imported beforehand", file=sys.stderr)
                self._is_ready = True
            self.orders.send(order)
            return ForkedProcess(self.answer(_ANSWERS_WITHIN_S))

    def answer(self, within_s: float) -> Any:
        """Return the next message; raises `EOFError` if the process has ended."""
        if not self.orders.poll(within_s):
            raise TimeoutError(f"the starter does not answer within {within_s:g} s")
        return self.orders.recv()


def _preloaded_libraries(python: Path) -> str:
    """Return LD_PRELOAD as vLLM on CPU sets it for the processes that it spawns: a fork cannot load them any more."""
    site = next(python.parents[1].glob("lib/python3*/site-packages"))
    patterns = ("torch.libs/libgomp*.so*", "torch/lib/libgomp*.so*", "vllm/libs/libtcmalloc*.so*")
    return ":".join(str(found[0]) for pattern in patterns if (found := sorted(site.glob(pattern))))


@contextlib.contextmanager
def started_starter(python: Path) -> Iterator[Starter]:
    """Start the importing process, which the first launch waits for; at the end it ends all engines that it has forked."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "UCX_", "NIXL_"))},
        "PYTHONPATH": os.pathsep.join([str(_SITE), str(ROOT / "tools")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LD_PRELOAD": _preloaded_libraries(python),
    }
    (STATE / "logs").mkdir(parents=True, exist_ok=True)
    orders, theirs = multiprocessing.Pipe()
    with (STATE / "logs" / "starter.log").open("wb") as sink, theirs:
        # -P: the program's folder has modules that must hide no others. die_with_parent: one system call, no lock, no import.
        process = subprocess.Popen(
            [python, "-P", _PROGRAM, str(theirs.fileno())], env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            pass_fds=[theirs.fileno()], start_new_session=True, preexec_fn=die_with_parent,  # noqa: PLW1509
        )  # fmt: skip
    try:
        yield Starter(orders)
    finally:
        orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()
