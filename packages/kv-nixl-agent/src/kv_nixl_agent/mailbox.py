"""Calls, notifications, timers and errors of an owner thread, and the order in which they are served.

Calls, notifications and timers may wait for the owner thread at the same time, and their order matters to a producer. The engine
thread hands over "expect readers of request 7" before a reader can hold a ticket of it, so a reader's completion must not be
delivered before that call has run. And a reader's renewal that waits, since the process was stopped for a minute, must count
before the timer that ends leases. So each notification, and each round of timers, carries the number of calls that were handed
over before it, and is due only when so many have run. The number is fixed, so a steady stream of calls does not delay them
further.

Example: calls 1 to 3 wait, a notification comes in (due after call 3), call 4 is handed over. Served: 1, 2, 3, notification, 4.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Arrivals", "ErrorLog", "Mailbox", "Timers"]


@final
class Mailbox:
    """Calls, first in, first out. `put` and `len` are for any thread, the rest for the owner."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._refusal: AgentError | None = None
        self.taken_count = 0
        """Items that were taken out so far."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def given_count(self) -> int:
        """Items that were handed over so far."""
        return self.taken_count + len(self._items)

    def put(self, item: Callable[[], object]) -> None:
        """Hand an item over. Once this returns, the item is served, also when the thread dies.

        Raises:
            AgentError: the refusal given to `shut`.
        """
        with self._lock:
            if self._refusal is not None:
                raise AgentError(self._refusal.code, str(self._refusal))
            self._items.append(item)

    def take(self) -> Callable[[], object] | None:
        """Return the next item, None if there is none."""
        if not self._items:
            return None
        self.taken_count += 1
        return self._items.popleft()

    def shut(self, refusal: AgentError) -> None:
        """Refuse further items with this error; those handed over before stay."""
        with self._lock:
            self._refusal = refusal


@final
class Arrivals:
    """Notifications that came in, until the calls that were handed over before them have run."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, arrived: Iterable[tuple[str, bytes]], given_count: int) -> None:
        """Keep notifications, due after `given_count` calls."""
        self._waiting.extend((given_count, sender, payload) for sender, payload in arrived)

    def take_due(self, taken_count: int) -> Iterator[tuple[str, bytes]]:
        """Return the notifications that are due after `taken_count` calls, oldest first."""
        while self._waiting and self._waiting[0][0] <= taken_count:
            _, sender, payload = self._waiting.popleft()
            yield sender, payload


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

    Timers that fall due wait for the calls and notifications that arrived before them (see above). After more than half a
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


@final
class ErrorLog:
    """Counts errors by origin and keeps the text of the latest."""

    def __init__(self) -> None:
        self.callback_errors = 0
        self.loop_errors = 0
        self.last = ("", "")
        """(type and message, traceback) of the latest error."""

    def keep(self, error: BaseException, *, is_callback: bool = False) -> None:
        """Count an error, of a callback or of the loop itself."""
        if is_callback:
            self.callback_errors += 1
        else:
            self.loop_errors += 1
        self.last = (f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
