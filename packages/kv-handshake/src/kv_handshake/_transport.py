"""Parts of the transport that are not ZeroMQ: a message as it comes, who may connect, and a way to wake a poll."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Doorbell", "GuestList", "Incoming"]

_MAX_NAMES = 256


class Incoming(NamedTuple):
    """One message from a peer.

    Attributes:
        envelope: Frames that lead back to the sender: its identity, and the empty delimiter if it sent one.
        query: The query, or None if the message is not shaped like one.
        address: The sender's IP address.
    """

    envelope: tuple[bytes, ...]
    query: bytes | None
    address: str


@final
class GuestList:
    """Knows which client keys may connect, and counts who was turned away.

    Args:
        authorized: Name by public key in Z85.
    """

    def __init__(self, authorized: Mapping[str, str]) -> None:
        self._authorized = dict(authorized)
        self._denied: Counter[str] = Counter()

    def name_of(self, key: str, address: str) -> str | None:
        """Return the client's name, or None, counted, if it must not connect."""
        name = self._authorized.get(key)
        if name is None:
            who = f"{address} {key}"
            self._denied[who if who in self._denied or len(self._denied) < _MAX_NAMES else "others"] += 1
        return name

    def denied(self) -> Mapping[str, int]:
        """Return how often each client was turned away, by address and key."""
        return dict(self._denied)


@final
class Doorbell:
    """Something to poll that any thread can ring."""

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._ear.fileno()

    def hear(self) -> None:
        """Take in all rings so far."""
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def ring(self) -> None:
        """Wake the poll; also after `close`."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def close(self) -> None:
        """Close both ends."""
        self._ear.close()
        self._bell.close()
