"""Delay of timers after a pause of the process, until NIXL's threads have caught up.

A notification sent to a stopped process stays in a socket until NIXL's progress thread runs; until then the owner's polls find
nothing, however many there are. Measured with three busy processes on two cores: 240 ms after a pause the owner thread had done
17 turns, and no thread of NIXL had been given a core yet. So neither a time nor a number of polls shows that all notifications
have arrived; the kernel's account of those threads does.
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
    """Return the kernel's ids of this process's threads; empty without a Linux `/proc`."""
    try:
        return frozenset(entry.name for entry in _TASKS.iterdir())
    except OSError:
        return frozenset()


@final
class ThreadWatch:
    """Observe threads that run no Python.

    Args:
        ids: Threads as named in `tasks`; those that have ended are ignored.
        tasks: Directory of the kernel's per-thread accounts.
    """

    def __init__(self, ids: Iterable[str] = (), tasks: Path = _TASKS) -> None:
        self._accounts = [tasks / name for name in ids]
        self._run_before: dict[Path, str] = {}

    def have_run(self) -> bool:
        """Return whether each thread sleeps, or has run since the previous call.

        A stopped thread is runnable when the process continues. If it is asleep, it has run since then and found nothing more to
        do; if it is runnable and its run time has not grown, it still waits for a core.
        """
        found = [self._has_run(account) for account in self._accounts]  # a list, so that every thread is checked
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
    """Delay of the timers after a pause.

    It ends after ten checks in a row, at least 20 ms apart and at most one per turn, that found no thread of NIXL waiting for a
    core: after 0.2 s on a machine with spare time, later where the owner has few turns or NIXL's threads get no core. So many
    checks are needed because connections that were begun meanwhile exchange some messages. The delay ends anyway after a hundred
    checks (at least 2 s), or after 10 s: threads that are always ready to run, and repeated pauses, must not delay the timers for
    ever. Both limits start anew with the first pause after the timers have run.

    Example: turns come 0.3 s apart: the delay takes ten of them, 2.7 s. Another pause at the sixth starts the ten anew, and 94 of
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
        """Record a pause: delay the timers from now on."""
        if self._have_timers_run:
            self._have_timers_run = False
            self._looks_left, self._end_s = _MOST_LOOKS, now_s + _LONGEST_S
        self._good_left = _GOOD_LOOKS

    def timers_ran(self) -> None:
        """Record that timers have run: the next pause may delay them for the full limits again."""
        self._have_timers_run = True

    def look(self, now_s: float) -> None:
        """Check the threads, if a check is due. The owner polls for notifications afterwards, before timers run."""
        if self.is_over or now_s < self.next_look_s:
            return
        if now_s >= self._end_s:
            self._looks_left = 0
            return
        self.next_look_s = now_s + _LOOK_EVERY_S
        self._looks_left -= 1
        self._good_left = self._good_left - 1 if self._have_run() else _GOOD_LOOKS
