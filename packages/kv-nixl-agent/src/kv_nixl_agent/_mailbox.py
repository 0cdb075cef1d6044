"""Calls and orders that other threads hand to the owner thread, and the order in which they are served.

Calls, notifications and timers may wait for the owner thread at the same time, and their order matters to a producer. The engine
thread hands over "expect readers of request 7" before anybody can hold a ticket of it, so a reader's completion must not be
delivered before that call has run. And a reader's renewal that waits, since the process was stopped for a minute, must count
before the timer that ends leases. So each notification, and each round of timers, carries the number of calls that were handed
over before it, and is due only when so many have run. The number is fixed, so a steady stream of calls delays neither for ever.

Example: calls 1 to 3 wait, a notification comes in (due after call 3), call 4 is handed over. Served: 1, 2, 3, notification, 4.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, final

from ._errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ._values import TransferOrder

__all__ = ["Arrivals", "Mailbox"]


@final
class Mailbox:
    """Calls and orders, first in, first out. `put` and `len` are for any thread, the rest for the owner."""

    def __init__(self) -> None:
        self._items: deque[Callable[[], object] | TransferOrder] = deque()
        self._lock = threading.Lock()
        self._refusal: tuple[str, str] | None = None
        self.taken_count = 0
        """Items that were taken out so far."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def given_count(self) -> int:
        """Items that were handed over so far."""
        return self.taken_count + len(self._items)

    def put(self, item: Callable[[], object] | TransferOrder) -> None:
        """Hand an item over. Once this returns, the item is served, also when the thread dies.

        Raises:
            AgentError: the refusal given to `shut`.
        """
        with self._lock:
            if self._refusal is None:
                self._items.append(item)
                return
        code, message = self._refusal
        raise AgentError(code, message)

    def take(self) -> Callable[[], object] | TransferOrder | None:
        """Return the next item, None if there is none."""
        if not self._items:
            return None
        self.taken_count += 1
        return self._items.popleft()

    def shut(self, code: str, message: str) -> None:
        """Refuse further items with this error; those handed over before stay."""
        with self._lock:
            self._refusal = (code, message)


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
