"""Run long commands as named steps: a progress line with the elapsed time, a log on disk, a plain report of a failure."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvdev.paths import ROOT, STATE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CRASH_SIGNS", "DevError", "end_process", "fail", "note", "run_step"]

_PROGRESS_EVERY_S = 15.0
_TAIL_LINES = 30
_NO_NETWORK = (
    "dns error",
    "error resolving DNS",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "Failed to establish a new connection",
    "error sending request",
)
CRASH_SIGNS = ("Fatal Python error", "Assertion `", "terminate called", "Segmentation fault", "MemoryError")
_LINES_AROUND_A_CRASH = 3


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
    words = [str(word) for word in command]
    log = _log_path(name)
    started = time.monotonic()
    with log.open("wb") as sink:
        sink.write(f"$ {shlex.join(words)}\n".encode())
        sink.flush()
        try:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=dict(os.environ if env is None else env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            fail(f"step '{name}' could not start: {error}\n  command: {shlex.join(words)}")
        try:
            code = _wait(name, process, log, started, timeout_s)
        finally:
            _end_group(process)
    elapsed_s = time.monotonic() - started
    if code not in allowed:
        fail(
            f"step '{name}' failed (exit code {_code_in_words(code)}, after {elapsed_s:.0f} s)\n"
            f"  command: {shlex.join(words)}\n  log: {log}\n{_crash(log)}  its last lines:\n{_tail(log)}{_hint(_tail(log))}"
        )
    note(f"  ok  {name} ({elapsed_s:.1f} s)" if code == 0 else f"  --  {name}: exit code {code} ({elapsed_s:.1f} s)")
    return code, log


def _hint(text: str) -> str:
    """Say what to do where the log shows that no package index could be reached."""
    if not any(sign in text for sign in _NO_NETWORK):
        return ""
    return (
        "\n  No package index could be reached. Check the network, or name a reachable index with UV_DEFAULT_INDEX (uv) and "
        "PIP_INDEX_URL (pip); then run the same command again."
    )


def _wait(name: str, process: subprocess.Popen[bytes], log: Path, started: float, timeout_s: float) -> int:
    next_line = started + _PROGRESS_EVERY_S
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.5)
        now = time.monotonic()
        if now - started > timeout_s:
            fail(f"step '{name}' did not end within {timeout_s:.0f} s\n  log: {log}\n  its last lines:\n{_tail(log)}")
        if now >= next_line:
            next_line = now + _PROGRESS_EVERY_S
            last = _tail(log, 1).strip()[:100]
            note(f"  ... {name}, {now - started:.0f} s: {last}")


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
    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _log_path(name: str) -> Path:
    folder = STATE / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return folder / f"{safe}.log"


def _code_in_words(code: int) -> str:
    return f"{code}: {signal.Signals(-code).name}" if -code in set(signal.Signals) else str(code)


def _crash(log: Path) -> str:
    """Return the lines around the first sign of a crash: a dump of all threads may push them out of the last lines."""
    lines = log.read_text(errors="replace").splitlines()
    for number, line in enumerate(lines):
        if any(sign in line for sign in CRASH_SIGNS):
            around = lines[max(0, number - _LINES_AROUND_A_CRASH) : number + _LINES_AROUND_A_CRASH + 1]
            return "  where it crashed:\n" + "".join(f"    {one}\n" for one in around)
    return ""


def _tail(log: Path, lines: int = _TAIL_LINES) -> str:
    with log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        source.seek(max(0, source.tell() - 20_000))
        text = source.read().decode(errors="replace").replace("\r", "\n")
    return "\n".join("    " + line for line in text.splitlines()[-lines:])
