"""A descriptor that wakes a poll from another thread."""

from __future__ import annotations

import contextlib
import socket
from typing import final

__all__ = ["WakeupPipe"]


@final
class WakeupPipe:
    """A descriptor to poll that any thread can make readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def wake(self) -> None:
        """Make the descriptor readable; harmless after `close`."""
        with contextlib.suppress(OSError):
            self._writer.send(b"!")

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
