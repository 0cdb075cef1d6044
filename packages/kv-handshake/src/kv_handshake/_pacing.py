"""Who may go on now and who must wait: rate limits, back-off, the memory of failures, and a gate for log lines.

All of it is arithmetic on times that the caller passes in; nothing here reads a clock or draws a random number of its
own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Backoff", "FailureMemory", "LogGate", "RememberedFailure", "TokenBuckets"]


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

    def wait_s(self, key: Hashable, now_s: float) -> float:
        """Count one event; return 0 if it is allowed, else the seconds until the next one would be."""
        if self._rate_per_s <= 0:
            return 0.0
        level, since_s = self._levels.get(key, (self._burst, now_s))
        level = min(self._burst, level + (now_s - since_s) * self._rate_per_s)
        is_allowed = level >= 1
        self._levels[key] = (level - 1 if is_allowed else level, now_s)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return 0.0 if is_allowed else (1 - level) / self._rate_per_s


@final
@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting times that double from `first_s` to `most_s`, scattered so that many waiters do not return together."""

    first_s: float
    most_s: float

    def delay_s(self, failures: int, chance: float) -> float:
        """Return the wait after the given number of failures (1 or more): half of it fixed, half scaled by `chance`.

        Args:
            failures: Failures so far.
            chance: A random number in [0, 1).
        """
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        return whole_s * (0.5 + 0.5 * chance)


@final
@dataclass(frozen=True, slots=True)
class RememberedFailure:
    """A peer that failed lately.

    Attributes:
        failures: Consecutive failed handshakes.
        until_s: Time before which the peer is not asked again.
        code: Code of the last failure.
        message: Text of the last failure.
    """

    failures: int
    until_s: float
    code: str
    message: str


@final
class FailureMemory:
    """Remembers which peers failed, so that a dead one is asked ever more rarely instead of by every request."""

    def __init__(self, backoff: Backoff, *, capacity: int = 1024) -> None:
        self._backoff = backoff
        self._capacity = capacity
        self._failures: OrderedDict[Hashable, RememberedFailure] = OrderedDict()

    def __len__(self) -> int:
        return len(self._failures)

    def blocking(self, peer: Hashable, now_s: float) -> RememberedFailure | None:
        """Return the failure because of which the peer must not be asked now, if there is one."""
        remembered = self._failures.get(peer)
        return remembered if remembered is not None and now_s < remembered.until_s else None

    def record(self, peer: Hashable, *, code: str, message: str, now_s: float, chance: float) -> None:
        """Remember a failed handshake."""
        earlier = self._failures.pop(peer, None)
        failures = 1 + (earlier.failures if earlier is not None else 0)
        until_s = now_s + self._backoff.delay_s(failures, chance)
        self._failures[peer] = RememberedFailure(failures, until_s, code, message)
        if len(self._failures) > self._capacity:
            self._failures.popitem(last=False)

    def forget(self, peer: Hashable) -> None:
        """Forget a peer's failures: it has just answered."""
        self._failures.pop(peer, None)


@final
class LogGate:
    """Lets through one line per topic and period, and counts those it holds back.

    Topics come from this package's code, never from a peer, so their number is small.
    """

    def __init__(self, *, period_s: float = 10.0) -> None:
        self._period_s = period_s
        self._next_s: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self.held_total = 0

    def admit(self, topic: str, now_s: float) -> int | None:
        """Return the lines held back since the last one of this topic, or None if this one must be held back too."""
        if now_s < self._next_s.get(topic, float("-inf")):
            self._held[topic] = self._held.get(topic, 0) + 1
            self.held_total += 1
            return None
        self._next_s[topic] = now_s + self._period_s
        return self._held.pop(topic, 0)
