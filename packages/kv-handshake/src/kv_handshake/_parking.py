"""Open asks of a listener and their budget. No input or output, no clock; for one thread."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from kv_handshake._pacing import AskLimits

__all__ = ["Parked", "Parking"]


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
