"""Rate limits, back-off, the memory of failures, and a gate for log lines.

The arithmetic takes its times from the caller; only `GatedLog` reads a clock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_handshake.errors import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["MOST_FAILURES", "FailureMemory", "GatedLog", "RememberedFailure", "TokenBuckets", "backoff_s"]

MOST_FAILURES = 1024
"""Failed peers that are remembered; the one that failed longest ago is forgotten first."""

_LOG_PERIOD_S = 10.0
_LOG_CHARS = 1000
_MESSAGE_CHARS = 500
"""Characters that are kept of a failure's text, which a peer may have written."""


@final
class TokenBuckets:
    """Allows each key `rate_per_s` events a second on average, and `burst` at once.

    Args:
        rate_per_s: Events per second and key; 0 allows everything.
        burst: Events that may come at once.
        capacity: Keys that are remembered; the one not seen for longest is forgotten first.
    """

    def __init__(self, *, rate_per_s: float, burst: float, capacity: int = 4096) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._capacity = capacity
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: Hashable, now_s: float, cost: float = 1.0) -> float:
        """Count one event of this cost; return 0 if it is allowed, else the seconds until the next one would be."""
        if self._rate_per_s <= 0:
            return 0.0
        level, since_s = self._levels.get(key, (self._burst, now_s))
        level = min(self._burst, level + (now_s - since_s) * self._rate_per_s)
        is_allowed = level >= 1
        self._levels[key] = (level - cost if is_allowed else level, now_s)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return 0.0 if is_allowed else (1 - level) / self._rate_per_s


def backoff_s(first_s: float, most_s: float, *, failures: int, chance: float) -> float:
    """Return the wait after so many failures, 1 or more: it doubles from `first_s` to `most_s`.

    Half of it is fixed and half scaled by `chance`, a random number in [0, 1), so that many waiters do not return together.
    """
    whole_s = min(most_s, first_s * 2.0 ** min(failures - 1, 60))
    return whole_s * (0.5 + 0.5 * chance)


@final
@dataclass(slots=True)
class RememberedFailure:
    """A failure of a peer that has not answered since.

    Attributes:
        failures: Consecutive failed handshakes.
        until_s: Time before which the peer is not asked again.
        code: Code of the last failure.
        message: Text of the last failure, cut to 500 characters.
        wanted_s: Time of the last request for the peer.
    """

    failures: int
    until_s: float
    code: str
    message: str
    wanted_s: float


@final
class FailureMemory:
    """Remembers which peers failed, so that a dead one is asked ever more rarely instead of by every request.

    Args:
        first_s: Time for which the first failure blocks a peer, on average three quarters of it.
        most_s: Longest such time.
        capacity: Peers that are remembered.

    Attributes:
        retried: Peers with a background attempt planned or running, whose failure blocks until that has ended.
    """

    def __init__(self, first_s: float, most_s: float, *, capacity: int = MOST_FAILURES) -> None:
        self._hold_s = first_s, most_s
        self._capacity = capacity
        self._failures: OrderedDict[Hashable, RememberedFailure] = OrderedDict()
        self.retried: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._failures)

    def blocking(self, peer: Hashable, now_s: float) -> RememberedFailure | None:
        """Return the recent failure that still blocks this peer, or None; note that the peer is wanted."""
        if not self._failures:
            return None  # the hash of a question takes as long as a query
        remembered = self._failures.get(peer)
        if remembered is None:
            return None
        remembered.wanted_s = now_s
        return remembered if peer in self.retried or now_s < remembered.until_s else None

    def record(
        self, peer: Hashable, *, code: str, message: str, now_s: float, chance: float, least_s: float = 0.0
    ) -> RememberedFailure:
        """Remember a failure, which blocks for `least_s` at the least, and return what is remembered."""
        earlier = self._failures.pop(peer, None)
        failures = 1 + (earlier.failures if earlier is not None else 0)
        until_s = now_s + max(backoff_s(*self._hold_s, failures=failures, chance=chance), least_s)
        wanted_s = earlier.wanted_s if earlier is not None else now_s
        failure = self._failures[peer] = RememberedFailure(failures, until_s, code, message[:_MESSAGE_CHARS], wanted_s)
        if len(self._failures) > self._capacity:
            self._failures.popitem(last=False)
        return failure

    def forget(self, peer: Hashable) -> None:
        """Forget a peer's failures: it has just answered, or is wanted no more."""
        if self._failures:
            self._failures.pop(peer, None)


_logger = logging.getLogger("kv_handshake")


@final
class GatedLog:
    """Logs one line per topic and ten seconds, and counts those held back.

    Topics are constants, never a peer's text, so their number is small.
    """

    def __init__(self) -> None:
        self.held_back = 0
        self._next_s: dict[str, float] = {}
        self._held: Counter[str] = Counter()

    def warning(self, topic: str, text: str, *, stacklevel: int = 2) -> None:
        """Log a warning at the caller's line, unless one of this topic was logged a moment ago."""
        now_s = time.monotonic()
        if now_s < self._next_s.get(topic, float("-inf")):
            self._held[topic] += 1
            self.held_back += 1
            return
        self._next_s[topic] = now_s + _LOG_PERIOD_S
        held = self._held.pop(topic, 0)
        more = f" ({held} more like this not logged)" if held else ""
        _logger.warning("%s%s", shortened(text, _LOG_CHARS), more, stacklevel=stacklevel)

    def call(self, counts: Counter[str], name: str, callback: Callable[..., None], *values: object) -> None:
        """Run a caller's function; an exception from it is logged and counted as ``callback_errors``."""
        try:
            callback(*values)
        except Exception as error:  # noqa: BLE001 - a caller's mistake must end nothing else
            counts["callback_errors"] += 1
            self.warning("callback", f"{name} raised {error!r}", stacklevel=3)
