"""Waiting, after a pause of the process, until NIXL's threads have caught up.

A notification that was sent to a stopped process lies in a socket until NIXL's progress thread runs; as long as it does not, the
owner's polls find nothing, however many they are. Measured with three busy processes on two cores: 240 ms after a pause the
owner thread had done 17 turns, and no thread of NIXL had been given a core yet. So neither a time nor a number of polls tells
that everything has come in; the kernel's account of those threads does.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Settling", "ThreadWatch", "thread_ids"]

_TASKS: Final = Path("/proc/self/task")
_LOOK_EVERY_S: Final = 0.02
_GOOD_LOOKS: Final = 10
_MOST_LOOKS: Final = 100
_LONGEST_S: Final = 10.0


def thread_ids() -> frozenset[str]:
    """Return the kernel's ids of the threads of this process; none where there is no Linux `/proc`."""
    try:
        return frozenset(entry.name for entry in _TASKS.iterdir())
    except OSError:
        return frozenset()


@final
class ThreadWatch:
    """Look at threads that run no Python.

    Args:
        ids: Threads as named in `tasks`; those that have ended are left out.
        tasks: Directory of the kernel's accounts.
    """

    def __init__(self, ids: Iterable[str] = (), tasks: Path = _TASKS) -> None:
        self._accounts = [tasks / name for name in ids]
        self._run_before: dict[Path, str] = {}

    def have_run(self) -> bool:
        """Return whether each thread sleeps, or has run since the look before.

        A thread that was stopped is runnable when the process goes on. Seen asleep, it has run since then and found nothing more
        to do; runnable with a run time that has not grown, it still waits for a core.
        """
        found = [self._has_run(account) for account in self._accounts]  # each is looked at, whatever the others say
        return all(found)

    def _has_run(self, account: Path) -> bool:
        with suppress(OSError, IndexError):  # the thread has ended, or this kernel keeps no such account
            run_ns = (account / "schedstat").read_text().split()[0]
            has_run = self._run_before.get(account, run_ns) != run_ns
            self._run_before[account] = run_ns
            return has_run or (account / "stat").read_text().rpartition(") ")[2][0] != "R"
        return True


@final
class Settling:
    """Hold of the timers after a pause.

    It ends after ten looks in a row, at least 20 ms apart and one a turn at most, that found no thread of NIXL waiting for a
    core: after 0.2 s on a machine with time for everybody, later where the owner has few turns or NIXL's threads none. The looks
    go on for so long since connections that were begun meanwhile take some messages each way. It ends anyway after a hundred
    looks, 2 s at least, and after 10 s: threads that are always ready to run, and pauses one after the other, must not hold the
    timers for ever. A new hundred and new 10 s begin with the first pause after the timers have run.

    Example: turns come 0.3 s apart: the hold takes ten of them, 2.7 s. Another pause at the sixth begins the ten anew, and 94 of
    the hundred are left.
    """

    def __init__(self, have_run: Callable[[], bool]) -> None:
        self._have_run = have_run
        self._looks_left = 0
        self._good_left = 0
        self._end_s = 0.0
        self._have_timers_run = True
        self.next_look_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether timers may run."""
        return self._good_left == 0 or self._looks_left == 0

    def begin(self, now_s: float) -> None:
        """Note a pause: hold the timers from now on."""
        if self._have_timers_run:
            self._have_timers_run = False
            self._looks_left, self._end_s = _MOST_LOOKS, now_s + _LONGEST_S
        self._good_left = _GOOD_LOOKS

    def timers_ran(self) -> None:
        """Note that timers have run: the next pause may hold them as long as the last one."""
        self._have_timers_run = True

    def look(self, now_s: float) -> None:
        """Look at the threads, if that is due. The owner polls for notifications after it, before timers run."""
        if self.is_over or now_s < self.next_look_s:
            return
        if now_s >= self._end_s:
            self._looks_left = 0
            return
        self.next_look_s = now_s + _LOOK_EVERY_S
        self._looks_left -= 1
        self._good_left = self._good_left - 1 if self._have_run() else _GOOD_LOOKS
