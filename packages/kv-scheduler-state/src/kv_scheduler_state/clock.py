"""A clock that advances only when it is observed, by a bounded step.

A process can be stopped (swap, a debugger, a suspended machine) and a clock can be set. Neither may end a lease that
a reader renewed in time: the renewals wait in the queue, unread. So lease time is *observed* time: between two
observations it advances by the clock's difference, but never backwards and never by more than `max_step_s`.
"""

from __future__ import annotations

import math
import sys
from typing import Final, final

from kv_scheduler_state.errors import InvalidConfig, InvalidEvent, quote

__all__ = ["ObservedClock"]

_LARGEST: Final = sys.float_info.max


@final
class ObservedClock:
    """Turns a caller's clock readings into observed seconds, which never run backwards.

    Args:
        max_step_s: Most that observed time advances between two observations.

    Attributes:
        observed_s: Observed seconds at the last reading; 0 before the first.
    """

    __slots__ = ("_has_begun", "_lag_s", "max_step_s", "observed_s")

    def __init__(self, max_step_s: float = math.inf) -> None:
        if not max_step_s > 0:
            raise InvalidConfig(f"max_step_s is {max_step_s}, must be positive")
        self.max_step_s = max_step_s
        self.observed_s = 0.0
        # Seconds by which observed time is behind the readings; changes only at a pause or a step back.
        self._lag_s = 0.0
        self._has_begun = False

    def observe(self, now_s: float) -> float:
        """Advance to the reading `now_s` and return the observed seconds.

        Raises:
            InvalidEvent: `invalid-event`, for a reading that is not a finite number of at least zero.
        """
        at_s = self.peek(now_s)
        if at_s != now_s - self._lag_s:
            self._lag_s = now_s - at_s
        self._has_begun = True
        self.observed_s = at_s
        return at_s

    def peek(self, now_s: float) -> float:
        """Return what `observe` would return, and advance nothing; any thread.

        Raises:
            InvalidEvent: As `observe`.
        """
        if (type(now_s) is not float and type(now_s) is not int) or not 0 <= now_s <= _LARGEST:
            raise InvalidEvent(f"now_s is {quote(now_s)}, must be a finite number of seconds, zero or more")
        at_s, before_s = float(now_s) - self._lag_s, self.observed_s
        if before_s <= at_s <= before_s + self.max_step_s or not self._has_begun:
            return at_s
        return before_s if at_s < before_s else before_s + self.max_step_s
