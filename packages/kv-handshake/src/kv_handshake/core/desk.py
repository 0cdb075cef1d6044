"""A listener's open asks: their budget, handing them to the engine, and sending the answers when they come.

The engine answers from any thread, at any time. An answer goes into a queue, and the listener's thread is woken for the first one
that finds the queue empty; nothing polls. Everything else runs on the listener's thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, final

from kv_handshake.wire.asks import encode_answer, encode_ask_refusal, parse_ask

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from kv_handshake.core.pacing import GatedLog
    from kv_handshake.core.server import Incoming

__all__ = ["ASKS_PER_CONNECTION", "MOST_ASKED_BYTES", "MOST_ASKS", "AskDesk"]


ASKS_PER_CONNECTION = 256
"""Open asks of one connection: an engine has one."""

MOST_ASKS = 1024
"""Open asks of all connections; an address that holds as many as are free gets no more."""

MOST_ASKED_BYTES = 1024 * 1024
"""Bytes of their payloads, under the same rule."""


@final
class OpenAsk(NamedTuple):
    """An ask that waits for its answer.

    Attributes:
        ask_id: Number within this listener; never used twice.
        envelope: Frames that lead back to the asker.
        number: The asker's own number.
        size_bytes: Bytes of its payload.
        address: The asker's IP address.
        descriptor: libzmq's descriptor of the connection.
        until_s: Time at which it is refused.
    """

    ask_id: int
    envelope: tuple[bytes, ...]
    number: int
    size_bytes: int
    address: str
    descriptor: int
    until_s: float


_AFTER_BUSY_S = 0.05
_NOTHING = (0, 0)


@final
class AskDesk:
    """Holds open asks within limits, and answers on their way.

    An address that holds as many asks, or bytes, as are still free gets no more, so a flood from one address leaves half to
    others. Example: of 1024 asks one address holds at most 512, the next one then at most 256.

    Args:
        on_ask: Called with (ask id, payload) on the listener's thread; must not block.
        on_gone: Called in the same way with the id of an ask whose asker no longer waits.
        wait_s: Seconds that an ask may stay open; below the time after which a connection without queries is reset.
        log: Gets failures of the two callbacks.
        counts: Gets ``asks``, ``asks_answered``, ``asks_cancelled``, ``asks_lost`` and ``refused.<code>``.
    """

    def __init__(
        self,
        on_ask: Callable[[int, bytes], None],
        on_gone: Callable[[int], None],
        *,
        wait_s: float,
        log: GatedLog,
        counts: Counter[str],
    ) -> None:
        self._on_ask = on_ask
        self._on_gone = on_gone
        self.wait_s = wait_s
        self._log = log
        self._lock = threading.Lock()
        self._answers: deque[tuple[int, bytes]] = deque()
        self._ended: deque[int] = deque()
        self._ids = itertools.count(1)
        # In order of arrival, and so of expiry, since all may wait equally long.
        self._open: dict[int, OpenAsk] = {}
        self._by_number: dict[tuple[str, int, int], OpenAsk] = {}
        # Number and bytes of open asks: of all (None), of each address, and of each connection (address, descriptor).
        self._held: dict[str | tuple[str, int] | None, tuple[int, int]] = {}
        self._counts = counts

    @property
    def asks_open(self) -> int:
        """Asks that wait for their answer."""
        return len(self._open)

    def put(self, ask_id: int, payload: bytes) -> bool:
        """Queue an answer; return whether the listener's thread must be woken. Any thread.

        Raises:
            ConfigurationError: ``invalid-argument`` for a payload that is too long.
        """
        encode_answer(1, payload)
        with self._lock:
            self._answers.append((ask_id, payload))
            return len(self._answers) == 1

    def connection_ended(self, descriptor: int) -> bool:
        """Note the end of a connection; return whether the listener's thread must be woken. Any thread.

        An ask that it misses, because the listener's thread is just taking it in, ends by its time limit.
        """
        if not self._open:
            return False
        self._ended.append(descriptor)
        return True

    # Everything below runs on the listener's thread.

    def receive(self, incoming: Incoming, query: bytes, now_s: float, *, wait_s: float = 0.0) -> tuple[bytes, ...]:
        """Accept an ask; return the frames of an immediate reply, none if the reply comes later.

        One that came too soon is refused: after `wait_s`, above 0, it would be accepted.

        Raises:
            WireError: As `parse_ask`.
        """
        ask, sender = parse_ask(query), incoming.sender
        if wait_s:
            return self.refuse(ask.number, "rate-limited", wait_s)
        connection = sender.address, sender.descriptor
        asks_held, bytes_held = self._held.get(sender.address, _NOTHING)
        known = self._by_number.get((*connection, ask.number))
        if ask.payload is None:
            if known is not None:
                self._drop([known], "asks_cancelled")
            return self.refuse(ask.number, "ask-cancelled")
        if known is not None:
            return self.refuse(ask.number, "ask-repeated", _AFTER_BUSY_S)
        size_bytes = len(ask.payload)
        if (
            self._held.get(connection, _NOTHING)[0] >= ASKS_PER_CONNECTION
            or asks_held >= MOST_ASKS - len(self._open)
            or bytes_held + size_bytes > MOST_ASKED_BYTES - self._held.get(None, _NOTHING)[1]
        ):
            return self.refuse(ask.number, "ask-busy", _AFTER_BUSY_S)
        until_s = now_s + self.wait_s
        made = OpenAsk(next(self._ids), incoming.envelope, ask.number, size_bytes, *connection, until_s)
        self._open[made.ask_id] = self._by_number[*connection, ask.number] = made
        self._note(made, 1)
        self._counts["asks"] += 1
        self._log.call(self._counts, "on_ask", self._on_ask, made.ask_id, ask.payload)
        return ()

    def _note(self, ask: OpenAsk, change: int) -> None:
        """Count an ask in (1) or out (-1)."""
        for key in (None, ask.address, (ask.address, ask.descriptor)):
            asks, size_bytes = self._held.get(key, _NOTHING)
            self._held[key] = asks + change, size_bytes + change * ask.size_bytes
            if asks + change == 0:
                del self._held[key]

    def _forget(self, ask: OpenAsk) -> None:
        del self._open[ask.ask_id], self._by_number[ask.address, ask.descriptor, ask.number]
        self._note(ask, -1)

    def refuse(self, number: int, code: str, wait_s: float = 0.0) -> tuple[bytes, ...]:
        """Return the frames of a refusal, counted."""
        self._counts[f"refused.{code}"] += 1
        return (encode_ask_refusal(number, code, retry_after_s=wait_s),)

    def take_replies(self, now_s: float) -> list[tuple[Sequence[bytes], tuple[bytes, ...]]]:
        """Return (envelope, frames) of every reply that is due: answers, and refusals of expired asks."""
        replies: list[tuple[Sequence[bytes], tuple[bytes, ...]]] = []
        with self._lock:
            answers, self._answers = self._answers, deque()
        for ask_id, payload in answers:
            ask = self._open.get(ask_id)
            if ask is not None:
                self._forget(ask)
                self._counts["asks_answered"] += 1
                replies.append((ask.envelope, (encode_answer(ask.number, payload),)))
        # Another connection may have an ended one's descriptor by now; the refusal of its asks permits a retry.
        ended = {self._ended.popleft() for _ in range(len(self._ended))}
        gone = list(itertools.takewhile(lambda ask: now_s >= ask.until_s, self._open.values()))
        if ended:
            gone += [ask for ask in self._open.values() if ask.descriptor in ended and now_s < ask.until_s]
        self._drop(gone, "asks_lost")
        return replies + [(ask.envelope, self.refuse(ask.number, "ask-expired", _AFTER_BUSY_S)) for ask in gone]

    def drop_all(self) -> None:
        """Forget all asks: their connections are closed."""
        self._drop(list(self._open.values()), "asks_lost")

    def _drop(self, asks: Iterable[OpenAsk], count: str) -> None:
        for ask in asks:
            self._forget(ask)
            self._counts[count] += 1
            self._log.call(self._counts, "on_gone", self._on_gone, ask.ask_id)
