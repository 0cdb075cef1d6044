"""Run long commands as named steps: a progress line with the elapsed time, a log on disk, a plain report of a failure."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvdev.paths import ROOT, STATE

_PROGRESS_EVERY_S = 15.0
_NO_NETWORK = re.compile(
    "dns error|error resolving DNS|Temporary failure in name resolution|Name or service not known|Network is unreachable|"
    "Connection refused|Failed to establish a new connection|error sending request"
)
_ABOUT_NETWORK = (
    "\n  No package index could be reached. Check the network, or name a reachable index with UV_DEFAULT_INDEX (uv) and "
    "PIP_INDEX_URL (pip); then run the same command again."
)
CRASH_SIGNS = ("Fatal Python error", "Assertion `", "terminate called", "Segmentation fault", "MemoryError")


class DevError(Exception):
    """A verb cannot go on; the text says what to do."""


def fail(message: str) -> NoReturn:
    """Stop the verb with one clear message."""
    raise DevError(message)


def note(text: str) -> None:
    """Print a line of progress on standard error, where it cannot disturb `--json`."""
    print(text, file=sys.stderr, flush=True)


def run_step(
    name: str,
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout_s: float = 1800.0,
    allowed: Sequence[int] = (0,),
) -> tuple[int, Path]:
    """Run `command`, showing progress, and return (exit code, log file).

    Raises `DevError` when the exit code is not in `allowed` or the time is up. The log stays on disk either way.
    """
    words = shlex.join(str(word) for word in command)
    log = STATE / "logs" / (re.sub(r"[^\w.-]", "-", name) + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as sink:
        sink.write(f"$ {words}\n".encode())
        sink.flush()
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            fail(f"step '{name}' could not start: {error}\n  command: {words}")
        try:
            code = _wait(name, process, log, started + timeout_s)
        finally:
            _end_group(process)
    elapsed = f"{time.monotonic() - started:.1f} s"
    if code is not None and code in allowed:
        note(f"  ok  {name} ({elapsed})" if code == 0 else f"  --  {name}: exit code {code} ({elapsed})")
        return code, log
    if code is None:
        fail(f"step '{name}' did not end within {timeout_s:.0f} s\n  log: {log}\n{last_lines(log)}")
    ended = f"{code}: {signal.Signals(-code).name}" if code < 0 else str(code)
    hint = _ABOUT_NETWORK if _NO_NETWORK.search(last_lines(log)) else ""
    fail(
        f"step '{name}' failed (exit code {ended}, after {elapsed})\n"
        f"  command: {words}\n  log: {log}\n{_crash(log)}  its last lines:\n{last_lines(log)}{hint}"
    )


def _wait(name: str, process: subprocess.Popen[bytes], log: Path, until: float) -> int | None:
    """Wait, showing progress; return the exit code, None when the time is up."""
    started = time.monotonic()
    while (now := time.monotonic()) < until:
        try:
            return process.wait(timeout=min(_PROGRESS_EVERY_S, until - now))
        except subprocess.TimeoutExpired:
            note(f"  ... {name}, {time.monotonic() - started:.0f} s: {last_lines(log, 1).strip()[:100]}")
    return None


def end_process(process: subprocess.Popen[Any], patience_s: float = 10.0) -> None:
    """End a child with SIGTERM, or with SIGKILL once it has taken longer than `patience_s`."""
    process.terminate()
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what the step left running: its own process group, which we created."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _crash(log: Path) -> str:
    """Return the lines around the first sign of a crash: a dump of all threads may push them out of the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if any(sign in line for sign in CRASH_SIGNS):
            return "  where it crashed:\n" + "".join(f"    {one}\n" for one in lines[max(0, number - 3) : number + 4])
    return ""


def last_lines(log: Path, count: int = 30) -> str:
    """Return the end of a log, indented."""
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join("    " + line for line in lines[-count:])
