"""Timers of the owner thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._settling import Settling

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timers"]

_HORIZON_S: Final = 1.0
_PAUSE_S: Final = 0.5


@final
class _Timer:
    __slots__ = ("due_s", "function", "period_s")

    def __init__(self, period_s: float, function: Callable[[], object], now_s: float) -> None:
        self.period_s = period_s
        self.function = function
        self.due_s = now_s + period_s


@final
class Timers:
    """Functions that run about once per period.

    Timers that fall due wait for the calls and notifications that arrived before them (see `_mailbox.py`). After more than half a
    second without a turn, when the process was probably stopped, they also wait until NIXL's threads have caught up (see
    `_settling.py`), because notifications sent meanwhile are still in the transport. This delays the ends of leases, usually by
    0.2 s, and by up to 10 s on a machine short of cores; calls, notifications, reads and their deadlines are not delayed.

    Args:
        now_s: Current time.
        have_run: Returns whether the threads that bring notifications have slept or run since the previous call.
    """

    def __init__(self, now_s: float, have_run: Callable[[], bool] = lambda: True) -> None:
        self._timers: list[_Timer] = []
        self._seen_s = now_s
        self._settling = Settling(have_run)
        self._round: tuple[int, float] | None = None
        """(number of calls that must run first, time of the round's start) for the due timers that are waiting."""

    def watch(self, have_run: Callable[[], bool]) -> None:
        """Replace `have_run`, once the threads are known."""
        self._settling = Settling(have_run)

    def add(self, period_s: float, function: Callable[[], object], now_s: float) -> None:
        """Run `function` about every `period_s`."""
        self._timers.append(_Timer(period_s, function, now_s))

    def begin_turn(self, now_s: float) -> bool:
        """Record the time at which a turn begins, before it takes notifications; return True if the process paused before it."""
        paused = self.note(now_s)
        self._settling.look(now_s)
        return paused

    def note(self, now_s: float) -> bool:
        """Record the time within a turn; return True if the process paused since the last recorded time."""
        paused = now_s - self._seen_s > _PAUSE_S
        if paused:
            self._settling.begin(now_s)
        self._seen_s = now_s
        return paused

    def take_due(self, now_s: float, *, given_count: int, taken_count: int) -> list[Callable[[], object]]:
        """Return the functions to run now, given the numbers of calls handed over and of calls that have run."""
        if not self._settling.is_over or all(timer.due_s > now_s for timer in self._timers):
            return []
        if self._round is None:
            self._round = (given_count, now_s)
        due_after, opened_s = self._round
        if taken_count < due_after:
            return []
        self._round = None
        self._settling.timers_ran()
        due = [timer for timer in self._timers if timer.due_s <= opened_s]
        for timer in due:
            timer.due_s = now_s + timer.period_s
        return [timer.function for timer in due]

    def next_s(self, now_s: float) -> float:
        """Return the time at which a timer falls due next, at most a second ahead."""
        earliest_s = now_s if self._settling.is_over else self._settling.next_look_s
        return min([now_s + _HORIZON_S, *[max(timer.due_s, earliest_s) for timer in self._timers]])
