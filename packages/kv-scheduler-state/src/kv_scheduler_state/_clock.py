"""Time that only passes while somebody looks.

A process can be stopped (swap, a debugger, a suspended machine) and a clock can be set. Neither may end a lease that
a reader renewed in time: the renewals are waiting in the queue, unread. So lease time is *observed* time: between two
observations it advances by the clock's difference, but never backwards and never by more than `max_step_s`.
"""

from __future__ import annotations

import math
from typing import final

from kv_scheduler_state._errors import InvalidConfig, InvalidEvent, quote

__all__ = ["ObservedClock"]


@final
class ObservedClock:
    """Turns a caller's clock readings into observed seconds, which never run backwards.

    Args:
        max_step_s: Most that observed time advances between two observations.
    """

    __slots__ = ("_last_s", "_max_step_s", "observed_s")

    def __init__(self, max_step_s: float = math.inf) -> None:
        if not max_step_s > 0:
            raise InvalidConfig(f"max_step_s is {max_step_s}, must be positive")
        self._max_step_s = max_step_s
        self._last_s: float | None = None
        self.observed_s = 0.0

    def observe(self, now_s: float) -> float:
        """Advance to the reading `now_s` and return the observed seconds.

        Raises:
            InvalidEvent: `invalid-event`, for a reading that is no finite number of at least zero.
        """
        if (type(now_s) is not float and type(now_s) is not int) or not 0 <= now_s < math.inf:
            raise InvalidEvent(f"now_s is {quote(now_s)}, must be a finite number of seconds, zero or more")
        last_s = self._last_s
        if now_s == last_s:
            return self.observed_s
        self._last_s = now_s
        if last_s is None:
            # Starting at the first reading keeps observed and real time equal while nothing unusual happens.
            self.observed_s = float(now_s)
        elif now_s > last_s:
            step_s = now_s - last_s
            self.observed_s += min(step_s, self._max_step_s)
        return self.observed_s

    def to_reading(self, observed_s: float) -> float:
        """Return the clock reading at which observed time reaches `observed_s`, if it is watched until then."""
        last_s = self._last_s if self._last_s is not None else 0.0
        return last_s + (observed_s - self.observed_s)
