"""Turns of engines on one machine: the processes of one group go on, those of all others are stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Member", "Turns", "cpu_seconds", "processes_of", "states_of"]

_WITHIN_S = 10.0
_LOOK_EVERY_S = 0.01
_ENDED = "ZX"
_STOPPED = "T"


class Member(Protocol):
    """A process that leads a group, as engines do."""

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        ...

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the group."""
        ...


@final
class Turns:
    """Groups of engines of which one runs at a time.

    A connector that polls while it is idle takes a core away from whatever is measured beside it.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Sequence[Member]] = {}

    def add(self, name: str, members: Sequence[Member]) -> None:
        """Add a group, which runs until it is told otherwise."""
        self._groups[name] = members

    def only(self, name: str) -> None:
        """Let one group go on once all others stand still.

        Raises:
            TimeoutError: A process does not stop, or does not go on.
        """
        if name not in self._groups:
            raise KeyError(name)
        others = [member for other, members in self._groups.items() if other != name for member in members]
        _signal(others, signal.SIGSTOP, are_stopped=True)
        _signal(self._groups[name], signal.SIGCONT, are_stopped=False)

    def none(self) -> None:
        """Stop every group."""
        _signal([each for members in self._groups.values() for each in members], signal.SIGSTOP, are_stopped=True)

    def all(self) -> None:
        """Let every group go on: a stopped process does not obey a SIGTERM."""
        for members in self._groups.values():
            for member in members:
                member.signal_all(signal.SIGCONT)


def processes_of(group: int) -> list[int]:
    """Return the processes of a process group, in the order of their numbers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
        except ProcessLookupError:
            continue
    return sorted(found)


def states_of(group: int) -> dict[int, str]:
    """Return the state letter of each process of a group that has not ended. Source: proc(5)."""
    states = {pid: _fields(pid)[0] for pid in processes_of(group)}
    return {pid: state for pid, state in states.items() if state not in _ENDED}


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has run, all of its threads: to the nanosecond where the kernel tells it."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
    except (OSError, IndexError):
        fields = _fields(pid)
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 13 else 0.0


def _fields(pid: int) -> list[str]:
    """Return the fields of a process's `stat` from its state on; a process that has gone is a zombie's remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [_ENDED[0]]


def _signal(members: Sequence[Member], number: int, *, are_stopped: bool) -> None:
    for member in members:
        member.signal_all(number)
    until = time.monotonic() + _WITHIN_S
    for member in members:
        while any((state == _STOPPED) is not are_stopped for state in states_of(member.pid).values()):
            if time.monotonic() > until:
                raise TimeoutError(f"group {member.pid} after signal {number}: {states_of(member.pid)}")
            time.sleep(_LOOK_EVERY_S)
