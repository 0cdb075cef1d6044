"""The listener's desk for asks: hands them to the engine, keeps them open, and sends the answers when they come.

The engine answers from any thread, at any time. An answer goes into a queue, and the listener's thread is woken for the first one
that finds the queue empty; nothing polls. Everything else runs on the listener's thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, final

from kv_handshake._ask_frames import encode_answer, encode_ask_refusal, parse_ask
from kv_handshake._parking import Parked, Parking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake._log import GatedLog
    from kv_handshake._pacing import AskLimits
    from kv_handshake._zmq import Incoming

__all__ = ["AskDesk"]

_AFTER_BUSY_S = 0.05


@final
class AskDesk:
    """Holds open asks, and answers on their way.

    Args:
        on_ask: Called with (ask id, payload) on the listener's thread; must not block.
        on_gone: Called in the same way with the id of an ask whose asker no longer waits.
        limits: The budget.
        log: Gets failures of the two callbacks.
    """

    def __init__(
        self,
        on_ask: Callable[[int, bytes], None],
        on_gone: Callable[[int], None],
        *,
        limits: AskLimits,
        log: GatedLog,
    ) -> None:
        self._on_ask = on_ask
        self._on_gone = on_gone
        self._log = log
        self._parking = Parking(limits)
        self._lock = threading.Lock()
        self._answers: deque[tuple[int, bytes]] = deque()
        self._ended: deque[int] = deque()
        # Read by the watch's thread. If it misses a descriptor for a moment, that connection's asks just end by their time limit.
        self._descriptors: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()

    def statistics(self) -> Mapping[str, int]:
        """Return counts: ``asks``, ``asks_open``, ``asks_answered``, ``asks_cancelled``, ``asks_lost`` and ``refused.<code>``."""
        names = ("asks", "asks_answered", "asks_cancelled", "asks_lost")
        return {**dict.fromkeys(names, 0), **self._counts, "asks_open": len(self._parking)}

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
        """Note the end of a connection; return whether the listener's thread must be woken. Any thread."""
        if not self._descriptors.get(descriptor):
            return False
        self._ended.append(descriptor)
        return True

    # Everything below runs on the listener's thread.

    def receive(self, incoming: Incoming, query: bytes, now_s: float) -> tuple[bytes, ...]:
        """Accept an ask; return the frames of an immediate reply, none if the reply comes later.

        Raises:
            WireError: As `parse_ask`.
        """
        ask = parse_ask(query)
        if ask.payload is None:
            self._cancel(incoming.envelope[0], ask.number)
            return self.refuse(ask.number, "ask-cancelled")
        size_bytes, sender = len(ask.payload), incoming.sender
        parked = self._parking.park(
            incoming.envelope,
            ask.number,
            size_bytes,
            address=sender.address,
            descriptor=sender.descriptor,
            now_s=now_s,
        )
        if isinstance(parked, str):
            return self.refuse(ask.number, parked, _AFTER_BUSY_S)
        self._counts["asks"] += 1
        self._descriptors[parked.descriptor] += 1
        self._call("on_ask", self._on_ask, parked.ask_id, ask.payload)
        return ()

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
            parked = self._parking.take(ask_id)
            if parked is not None:
                self._forget(parked)
                self._counts["asks_answered"] += 1
                replies.append((parked.envelope, (encode_answer(parked.number, payload),)))
        gone = self._parking.take_expired(now_s)
        while self._ended:
            # Another connection may have this descriptor by now; its asks are then refused with a code that permits a retry.
            gone += self._parking.take_of(self._ended.popleft())
        for parked in gone:
            self._lose(parked)
            replies.append((parked.envelope, self.refuse(parked.number, "ask-expired", _AFTER_BUSY_S)))
        return replies

    def drop_all(self) -> None:
        """Forget all asks: their connections are closed."""
        for parked in self._parking.take_all():
            self._lose(parked)

    def _cancel(self, connection: bytes, number: int) -> None:
        parked = self._parking.take_by_number(connection, number)
        if parked is not None:
            self._counts["asks_cancelled"] += 1
            self._forget(parked)
            self._call("on_ask_gone", self._on_gone, parked.ask_id)

    def _lose(self, parked: Parked) -> None:
        self._counts["asks_lost"] += 1
        self._forget(parked)
        self._call("on_ask_gone", self._on_gone, parked.ask_id)

    def _forget(self, parked: Parked) -> None:
        self._descriptors[parked.descriptor] -= 1
        if self._descriptors[parked.descriptor] <= 0:
            del self._descriptors[parked.descriptor]

    def _call(self, name: str, callback: Callable[..., None], *values: object) -> None:
        try:
            callback(*values)
        except Exception as error:  # noqa: BLE001 - the engine's mistake must not end the listener
            self._counts["callback_errors"] += 1
            self._log.warning("callback", f"{name} of the listener raised {error!r}")
