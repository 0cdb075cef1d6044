"""A listener's open asks: their budget, handing them to the engine, and sending the answers when they come.

The engine answers from any thread, at any time. An answer goes into a queue, and the listener's thread is woken for the first one
that finds the queue empty; nothing polls. Everything else runs on the listener's thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from kv_handshake.stream.messages import encode_answer, encode_ask_refusal, parse_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake.core.pacing import GatedLog
    from kv_handshake.sockets import Incoming

__all__ = ["AskDesk", "AskLimits", "Parking"]


@final
@dataclass(frozen=True, slots=True)
class AskLimits:
    """Budget of a listener's open asks.

    Attributes:
        wait_s: Seconds that an ask may stay open; below the time after which a connection without queries is reset.
        per_connection: Open asks of one connection: an engine has one.
        in_all: Open asks of all connections; an address that holds as many as are free gets no more.
        bytes_in_all: Bytes of their payloads, under the same rule.
    """

    wait_s: float = 5.0
    per_connection: int = 256
    in_all: int = 1024
    bytes_in_all: int = 1024 * 1024


@final
class Parked(NamedTuple):
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


@final
class Parking:
    """Holds open asks within limits: of each connection, of each address, in all, in bytes and in time.

    An address that holds as many asks, or bytes, as are still free gets no more, so a flood from one address leaves half to
    others.

    Example: of 1024 asks one address holds at most 512, the next one then at most 256.
    """

    def __init__(self, limits: AskLimits) -> None:
        self._limits = limits
        self._next_id = 1
        # In order of arrival, and so of expiry, since all may wait equally long.
        self._parked: dict[int, Parked] = {}
        self._by_asker: dict[tuple[bytes, int], int] = {}
        self._held: Counter[bytes] = Counter()
        self._held_by_address: Counter[str] = Counter()
        self._bytes_by_address: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(
        self, envelope: tuple[bytes, ...], number: int, size_bytes: int, *, address: str, descriptor: int, now_s: float
    ) -> Parked | str:
        """Park an ask, or return the code of the reason for refusing it."""
        connection, limits = envelope[0], self._limits
        if (connection, number) in self._by_asker:
            return "ask-repeated"
        is_full = (
            self._held[connection] >= limits.per_connection
            or self._held_by_address[address] >= limits.in_all - len(self._parked)
            or self._bytes_by_address[address] + size_bytes > limits.bytes_in_all - self._bytes
        )
        if is_full:
            return "ask-busy"
        parked = Parked(self._next_id, envelope, number, size_bytes, address, descriptor, now_s + limits.wait_s)
        self._next_id += 1
        self._parked[parked.ask_id] = parked
        self._by_asker[connection, number] = parked.ask_id
        self._held[connection] += 1
        self._held_by_address[address] += 1
        self._bytes_by_address[address] += size_bytes
        self._bytes += size_bytes
        return parked

    def take(self, ask_id: int) -> Parked | None:
        """Return an ask and forget it; None if it has ended."""
        parked = self._parked.pop(ask_id, None)
        if parked is not None:
            connection = parked.envelope[0]
            del self._by_asker[connection, parked.number]
            self._bytes -= parked.size_bytes
            self._bytes_by_address[parked.address] -= parked.size_bytes
            self._held[connection] -= 1
            if not self._held[connection]:
                del self._held[connection]
            self._held_by_address[parked.address] -= 1
            if not self._held_by_address[parked.address]:
                del self._held_by_address[parked.address], self._bytes_by_address[parked.address]
        return parked

    def take_by_number(self, connection: bytes, number: int) -> Parked | None:
        """Return an ask by its asker's own number and forget it."""
        ask_id = self._by_asker.get((connection, number))
        return None if ask_id is None else self.take(ask_id)

    def take_expired(self, now_s: float) -> list[Parked]:
        """Return the expired asks, and forget them."""
        ended: list[Parked] = []
        for parked in self._parked.values():
            if now_s < parked.until_s:
                break
            ended.append(parked)
        for parked in ended:
            self.take(parked.ask_id)
        return ended

    def take_of(self, descriptor: int) -> list[Parked]:
        """Return the asks of a connection, and forget them."""
        ended = [each for each in self._parked.values() if each.descriptor == descriptor]
        for parked in ended:
            self.take(parked.ask_id)
        return ended

    def take_all(self) -> list[Parked]:
        """Return all asks, and forget them."""
        ended = list(self._parked.values())
        for parked in ended:
            self.take(parked.ask_id)
        return ended


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
