"""Messages over a plain byte stream, for embedders whose transport has no frames of its own.

ZeroMQ delivers whole frames and needs none of this. Over TCP, a pipe or a TLS connection, write each frame as four
bytes (big-endian: bit 31 says that another frame of the same message follows, bits 0 to 30 are the length) and then
the frame.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, final

from kv_handshake._errors import ConfigurationError, WireError
from kv_handshake._limits import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StreamReader", "encode_stream"]

_HEADER = struct.Struct(">I")
_MORE = 1 << 31
_MAX_FRAMES = 4


def encode_stream(frames: Sequence[bytes]) -> bytes:
    """Return a message of one or more frames as stream bytes.

    Raises:
        ConfigurationError: ``invalid-argument`` for no frame, too many, or one that is too long.
    """
    if not 1 <= len(frames) <= _MAX_FRAMES or max(map(len, frames)) > MAX_REPLY_BYTES:
        raise ConfigurationError(
            "invalid-argument", f"a message has 1 to {_MAX_FRAMES} frames of at most {MAX_REPLY_BYTES} bytes"
        )
    last = len(frames) - 1
    return b"".join(
        _HEADER.pack(len(frame) | (_MORE if index < last else 0)) + frame for index, frame in enumerate(frames)
    )


@final
class StreamReader:
    """Cuts a byte stream into messages; takes bytes in pieces of any size.

    Args:
        max_message_bytes: Longest message that is read.
    """

    def __init__(self, *, max_message_bytes: int = MAX_REPLY_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._message_bytes = 0

    def feed(self, data: bytes) -> list[tuple[bytes, ...]]:
        """Take in bytes and return the messages that they complete.

        Raises:
            WireError: ``malformed-stream``; the stream cannot be read on after that.
        """
        self._buffer += data
        messages: list[tuple[bytes, ...]] = []
        while len(self._buffer) >= _HEADER.size:
            (header,) = _HEADER.unpack_from(self._buffer)
            frame_bytes = header & ~_MORE
            if self._message_bytes + frame_bytes > self._max_message_bytes or len(self._frames) == _MAX_FRAMES:
                raise WireError(
                    "malformed-stream",
                    f"a message exceeds {self._max_message_bytes} bytes or {_MAX_FRAMES} frames; close the connection",
                )
            end = _HEADER.size + frame_bytes
            if len(self._buffer) < end:
                break
            self._frames.append(bytes(self._buffer[_HEADER.size : end]))
            self._message_bytes += frame_bytes
            del self._buffer[:end]
            if not header & _MORE:
                messages.append(tuple(self._frames))
                self._frames.clear()
                self._message_bytes = 0
        return messages
