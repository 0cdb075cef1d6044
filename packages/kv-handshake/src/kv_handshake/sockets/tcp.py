"""A look at one of libzmq's own TCP connections: how much came in, who is at the other end, and an end to it.

libzmq bounds the bytes of a frame, but neither the frames of a message nor the connections of a socket. The kernel counts the
bytes of every connection, so the bound is kept here: `Grip` reads that count and can shut a connection down, after which
libzmq drops what it holds of it.

The descriptors belong to libzmq, which may close one at any moment, and the next file of the process may take its number. So
nothing here acts on a bare number: `dup2` pins whatever is behind it to a descriptor of our own, and the two ends are compared
before it is shut down. That descriptor exists from the beginning, so a process without any descriptor left can still do it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from typing import TYPE_CHECKING, final

from kv_handshake.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Ends", "Grip", "most_connections", "refuse_without_descriptors"]

_INFO_BYTES = 136
_RECEIVED_AT = 128
_COUNT = struct.Struct("=Q")
"""``tcpi_bytes_received`` of Linux's ``struct tcp_info``: 8 bytes of flags, 24 numbers of 32 bits, then 64 bits each of two
paces, of ``bytes_acked`` at 120 and of ``bytes_received`` at 128."""

_RESET_AT_CLOSE = struct.pack("ii", 1, 0)

Ends = tuple[tuple[str, int], tuple[str, int]]
"""(host, port) of this end and of the peer's end of a connection, which no other living connection shares."""


@final
class Grip:
    """A descriptor that points at one connection after the other; for one thread."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Only a holder. Of its family CPython takes the room for an address: an IPv4 one would cut IPv6 addresses off.
        self._pinned = socket.socket(socket.AF_UNIX)

    def received_bytes(self, descriptor: int) -> int:
        """Return the bytes that have come in on a connection, or 0 if it is gone."""
        try:
            with self._hold(descriptor) as held:
                info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return 0
        return int(_COUNT.unpack_from(info, _RECEIVED_AT)[0]) if len(info) == _INFO_BYTES else 0

    def ends(self, descriptor: int) -> Ends | None:
        """Return the two ends of a connection, or None if it is gone."""
        try:
            with self._hold(descriptor) as held:
                return _ends_of(held)
        except OSError:
            return None

    def hang_up(self, descriptor: int, ends: Ends) -> bool:
        """Shut a connection down if the descriptor still is the one with these ends; return whether it was."""
        try:
            with self._hold(descriptor) as held:
                if _ends_of(held) != ends:
                    return False
                # libzmq's close then resets the connection: a peer that sends without end learns of it, and no buffer stays.
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
                held.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Give both descriptors back."""
        self._pinned.close()
        os.close(self._nothing)

    @contextlib.contextmanager
    def _hold(self, descriptor: int) -> Generator[socket.socket, None, None]:
        """Pin a descriptor; raises OSError if it is gone."""
        os.dup2(descriptor, self._pinned.fileno(), inheritable=False)
        try:
            yield self._pinned
        finally:
            os.dup2(self._nothing, self._pinned.fileno(), inheritable=False)


def _ends_of(connection: socket.socket) -> Ends:
    own: tuple[str, int] | str = connection.getsockname()
    peer: tuple[str, int] | str = connection.getpeername()
    if not (isinstance(own, tuple) and isinstance(peer, tuple)):
        raise OSError("the descriptor is not a TCP connection any more")
    return (str(own[0]), int(own[1])), (str(peer[0]), int(peer[1]))


A_CONTEXT_NEEDS = 32
"""More than a context opens with its first sockets and what belongs to them: 12 for a client, 21 for a listener with keys."""


def refuse_without_descriptors(code: str, problem: str, **context: object) -> None:
    """Raise a `TransportError` with this code unless a context can start: too few files may be opened."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return
    left = 0
    with contextlib.suppress(OSError):
        # An entry is that of the directory itself, which is closed again.
        left = max(0, most - len(os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208 - no object per descriptor
    if left < A_CONTEXT_NEEDS:
        raise TransportError(
            code,
            f"{problem}: only {left} more files may be opened by this process, and {A_CONTEXT_NEEDS} are needed: raise its "
            "limit (`ulimit -n`, or LimitNOFILE of its service)",
            **context,
        )


def most_connections(wanted: int, *, share: int) -> int:
    """Return how many connections there may be: as many as are wanted, fewer where the process may open few files.

    Args:
        wanted: Connections.
        share: They take at most one descriptor in this many that the process may open.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, max(8, files // share))
