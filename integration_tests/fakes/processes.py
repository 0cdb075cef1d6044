"""Processes of an engine by their entries in `/proc`."""

from __future__ import annotations

import contextlib
from pathlib import Path


def family_of(pid: int) -> list[int]:
    """Return a process and all its descendants that live."""
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return found


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    return state_of(pid) not in {"", "Z", "X"}
