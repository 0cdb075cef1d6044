"""A clock that advances only when it is observed, by a bounded step.

A process can be stopped (swap, a debugger, a suspended machine) and a clock can be set. Neither may end a lease that
a reader renewed in time: the renewals wait in the queue, unread. So lease time is *observed* time: between two
observations it advances by the clock's difference, but never backwards and never by more than `max_step_s`.
"""

from __future__ import annotations

import math
import sys
from typing import Final, final

from kv_scheduler_state._errors import InvalidConfig, InvalidEvent, quote

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

    __slots__ = ("_from_reading_s", "_from_s", "_is_real", "_last_s", "_max_step_s", "_usual_until_s", "observed_s")

    def __init__(self, max_step_s: float = math.inf) -> None:
        if not max_step_s > 0:
            raise InvalidConfig(f"max_step_s is {max_step_s}, must be positive")
        # Finite, so that no infinite reading is within a step.
        self._max_step_s = min(max_step_s, _LARGEST)
        # Whether observed time is the reading itself: from the first one until a pause or a step back.
        self._is_real = False
        # While it is real: a step after some reading, so that every reading up to here is within a step of the last one.
        self._usual_until_s = -math.inf
        # The last reading after that; infinite before the first.
        self._last_s = math.inf
        # Observed time then runs with the readings since this one; each pause or step back begins anew.
        self._from_reading_s = 0.0
        self._from_s = 0.0
        self.observed_s = 0.0

    @property
    def max_step_s(self) -> float:
        """Most that observed time advances between two observations."""
        return self._max_step_s

    @max_step_s.setter
    def max_step_s(self, max_step_s: float) -> None:
        self._max_step_s = min(max_step_s, _LARGEST)
        self._usual_until_s = -math.inf

    def observe(self, now_s: float) -> float:
        """Advance to the reading `now_s` and return the observed seconds.

        Raises:
            InvalidEvent: `invalid-event`, for a reading that is not a finite number of at least zero.
        """
        # Nearly every reading takes this path: a value at or shortly after a good reading is good itself.
        if type(now_s) is float and self.observed_s <= now_s <= self._usual_until_s:
            self.observed_s = now_s
            return now_s
        return self._observe_unusual(now_s)

    def peek(self, now_s: float) -> float:
        """Return what `observe` would return, and advance nothing; any thread.

        Raises:
            InvalidEvent: As `observe`.
        """
        now_s, last_s = _checked(now_s), self._last_reading()
        if last_s == math.inf or (self._is_real and last_s <= now_s <= last_s + self._max_step_s):
            return now_s
        return self.observed_s + max(0.0, min(now_s - last_s, self._max_step_s))

    def _observe_unusual(self, now_s: float) -> float:
        now_s, last_s = _checked(now_s), self._last_reading()
        if last_s == math.inf:
            self._is_real, last_s = True, now_s  # the first reading is taken as it is
        is_usual = last_s <= now_s <= last_s + self._max_step_s
        if is_usual and self._is_real:
            self.observed_s = now_s
            # Finite, so that no infinite reading is usual.
            self._usual_until_s = min(now_s + self._max_step_s, _LARGEST)
            return now_s
        if is_usual:
            self.observed_s = self._from_s + (now_s - self._from_reading_s)
        else:
            self._is_real, self._usual_until_s = False, -math.inf
            self.observed_s += max(0.0, min(now_s - last_s, self._max_step_s))
            self._from_s, self._from_reading_s = self.observed_s, now_s
        self._last_s = now_s
        return self.observed_s

    def _last_reading(self) -> float:
        return self.observed_s if self._is_real else self._last_s

    def to_reading(self, observed_s: float) -> float:
        """Return the clock reading at which observed time reaches `observed_s`, if it is watched until then."""
        return self._from_reading_s + (observed_s - self._from_s)


def _checked(now_s: float) -> float:
    if (type(now_s) is not float and type(now_s) is not int) or not 0 <= now_s <= _LARGEST:
        raise InvalidEvent(f"now_s is {quote(now_s)}, must be a finite number of seconds, zero or more")
    return float(now_s)
