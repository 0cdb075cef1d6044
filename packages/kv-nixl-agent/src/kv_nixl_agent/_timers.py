"""Timers of the owner thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Timers"]

_HORIZON_S: Final = 1.0
_PAUSE_S: Final = 0.5
_SETTLE_S: Final = 0.05


@final
class _Timer:
    __slots__ = ("due_s", "function", "period_s")

    def __init__(self, period_s: float, function: Callable[[], None], now_s: float) -> None:
        self.period_s = period_s
        self.function = function
        self.due_s = now_s + period_s


@final
class Timers:
    """Functions to run about every period.

    Timers that fall due wait for the calls and notifications that were there before them (see `_mailbox.py`). After a turn of
    more than half a second, when the process was probably stopped, they also wait 50 ms: notifications that were sent
    meanwhile lie in the transport, and NIXL needs some polls to find them.
    """

    def __init__(self, now_s: float) -> None:
        self._timers: list[_Timer] = []
        self._seen_s = now_s
        self._hold_until_s = now_s
        self._round: tuple[int, float] | None = None
        """(calls that come first, time at which it was opened) of the timers that have fallen due and wait."""

    def add(self, period_s: float, function: Callable[[], None], now_s: float) -> None:
        """Run `function` about every `period_s`."""
        self._timers.append(_Timer(period_s, function, now_s))

    def begin_turn(self, now_s: float) -> None:
        """Note the time at which a turn begins."""
        if now_s - self._seen_s > _PAUSE_S:
            self._hold_until_s = now_s + _SETTLE_S
        self._seen_s = now_s

    def take_due(self, now_s: float, *, given_count: int, taken_count: int) -> list[Callable[[], None]]:
        """Return the functions to run now, given how many calls were handed over and how many of them have run."""
        if now_s < self._hold_until_s or all(timer.due_s > now_s for timer in self._timers):
            return []
        if self._round is None:
            self._round = (given_count, now_s)
        due_after, opened_s = self._round
        if taken_count < due_after:
            return []
        self._round = None
        due = [timer for timer in self._timers if timer.due_s <= opened_s]
        for timer in due:
            timer.due_s = now_s + timer.period_s
        return [timer.function for timer in due]

    def next_s(self, now_s: float) -> float:
        """Return the time at which a timer falls due next, at most a second ahead."""
        return min([now_s + _HORIZON_S, *[max(timer.due_s, self._hold_until_s) for timer in self._timers]])
