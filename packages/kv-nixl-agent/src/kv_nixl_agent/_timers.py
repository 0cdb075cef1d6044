"""Timers of the owner thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timers"]

_HORIZON_S: Final = 1.0
_PAUSE_S: Final = 0.5
_CATCH_UP_S: Final = 0.5
"""After a pause, NIXL's threads took up to 0.24 s to bring in what had been sent meanwhile (three busy processes, two cores)."""


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
    second without a turn, when the process was probably stopped, they also wait for another half second, because notifications
    sent meanwhile are still in the transport. Repeated pauses do not extend this. Nothing else is delayed. It makes unnecessary
    ends of leases rare; that a pause ends none is up to the caller's clock, which must not count it.
    """

    def __init__(self, now_s: float) -> None:
        self._timers: list[_Timer] = []
        self._seen_s = now_s
        self._held_until_s: float | None = None
        self._round: tuple[int, float] | None = None
        """(number of calls that must run first, time of the round's start) for the due timers that are waiting."""

    def add(self, period_s: float, function: Callable[[], object], now_s: float) -> None:
        """Run `function` about every `period_s`."""
        self._timers.append(_Timer(period_s, function, now_s))

    def note(self, now_s: float) -> bool:
        """Record the time, at the beginning of a turn and within it; return True if the process paused since the last call."""
        paused = now_s - self._seen_s > _PAUSE_S
        if paused and self._held_until_s is None:
            self._held_until_s = now_s + _CATCH_UP_S
        self._seen_s = now_s
        return paused

    def take_due(self, now_s: float, *, given_count: int, taken_count: int) -> list[Callable[[], object]]:
        """Return the functions to run now, given the numbers of calls handed over and of calls that have run."""
        is_held = self._held_until_s is not None and now_s < self._held_until_s
        if is_held or all(timer.due_s > now_s for timer in self._timers):
            return []
        if self._round is None:
            self._round = (given_count, now_s)
        due_after, opened_s = self._round
        if taken_count < due_after:
            return []
        self._round = self._held_until_s = None
        due = [timer for timer in self._timers if timer.due_s <= opened_s]
        for timer in due:
            timer.due_s = now_s + timer.period_s
        return [timer.function for timer in due]

    def next_s(self, now_s: float) -> float:
        """Return the time at which a timer falls due next, at most a second ahead."""
        earliest_s = now_s if self._held_until_s is None else self._held_until_s
        return min([now_s + _HORIZON_S, *[max(timer.due_s, earliest_s) for timer in self._timers]])
