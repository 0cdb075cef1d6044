"""A look at one of libzmq's own TCP connections: how much came in, who is at the other end, and an end to it.

libzmq bounds the bytes of a frame, but neither the frames of a message nor the connections of a socket. The kernel counts the
bytes of every connection, so the bound is kept here: `Grip` reads that count and can shut a connection down, after which
libzmq drops what it holds of it.

The descriptors belong to libzmq, which may close one at any moment, and the next file of the process may take its number. So
nothing here acts on a bare number: `dup2` pins whatever is behind it to a descriptor of our own, and the two ends are compared
before it is shut down. That descriptor exists from the beginning, so a process without any descriptor left can still do it.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from typing import Final, final

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
        with_info = self._pin(descriptor)
        try:
            info = self._pinned.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES) if with_info else b""
        except OSError:
            return 0
        finally:
            self._let_go()
        return int(_COUNT.unpack_from(info, _RECEIVED_AT)[0]) if len(info) == _INFO_BYTES else 0

    def ends(self, descriptor: int) -> Ends | None:
        """Return the two ends of a connection, or None if it is gone."""
        try:
            return self._pinned_ends() if self._pin(descriptor) else None
        except OSError:
            return None
        finally:
            self._let_go()

    def hang_up(self, descriptor: int, ends: Ends) -> bool:
        """Shut a connection down if the descriptor still is the one with these ends; return whether it was."""
        try:
            if not self._pin(descriptor) or self._pinned_ends() != ends:
                return False
            # libzmq's close then resets the connection: a peer that sends without end learns of it, and no buffer stays.
            self._pinned.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            self._pinned.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        finally:
            self._let_go()
        return True

    def close(self) -> None:
        """Give both descriptors back."""
        self._pinned.close()
        os.close(self._nothing)

    def _pinned_ends(self) -> Ends:
        own: tuple[str, int] | str = self._pinned.getsockname()
        peer: tuple[str, int] | str = self._pinned.getpeername()
        if not (isinstance(own, tuple) and isinstance(peer, tuple)):
            raise OSError("the descriptor is not a TCP connection any more")
        return (str(own[0]), int(own[1])), (str(peer[0]), int(peer[1]))

    def _pin(self, descriptor: int) -> bool:
        try:
            os.dup2(descriptor, self._pinned.fileno(), inheritable=False)
        except OSError:
            return False
        return True

    def _let_go(self) -> None:
        os.dup2(self._nothing, self._pinned.fileno(), inheritable=False)


A_CONTEXT_NEEDS: Final = 32
"""More than a context opens with its first sockets and what belongs to them: 12 for a client, 21 for a listener with keys."""

_EACH: Final = 4
_SHARE: Final = 2
"""A client's connections take at most one descriptor in this many that the process may open."""


def refuse_without_descriptors() -> None:
    """Do nothing if a context can start.

    Raises:
        OSError: ``EMFILE``: too few descriptors are left.
    """
    left = _descriptors_left()
    if left is not None and left < A_CONTEXT_NEEDS:
        raise OSError(
            errno.EMFILE,
            f"only {left} more files may be opened by this process, and {A_CONTEXT_NEEDS} are needed: raise its limit "
            "(`ulimit -n`, or LimitNOFILE of its service)",
        )


def most_connections(wanted: int) -> int:
    """Return how many connections a client may have: as many as it wants, fewer where the process may open few files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, max(8, files // (_EACH * _SHARE)))


def _descriptors_left() -> int | None:
    """Return how many more descriptors this process may open; None where their number is unlimited or unknown."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        # An entry is that of the directory itself, which is closed again.
        return max(0, most - len(os.listdir("/proc/self/fd")) + 1)  # noqa: PTH208 - no object per descriptor
    except OSError:
        return 0
