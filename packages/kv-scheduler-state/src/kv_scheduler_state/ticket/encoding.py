"""The canonical bytes under a MAC or a digest, the same in every kind of message."""

from __future__ import annotations

from struct import Struct
from typing import Final

__all__ = ["encode"]

_INTEGER: Final = Struct("<q")
_SECONDS: Final = Struct("<d")


def encode(tag: str, *fields: float | str | bytes | None) -> bytes:
    """Return a tag, one zero byte, and the fields.

    An integer takes 8 bytes, signed, little-endian; a float, an IEEE 754 double, little-endian; a text, its length in bytes as
    an integer, then UTF-8; None is the integer -1, and so is an absent text's length; bytes are taken as they are.
    """
    parts = [tag.encode(), b"\0"]
    for field in fields:
        if field is None:
            parts.append(_INTEGER.pack(-1))
        elif isinstance(field, str):
            data = field.encode("utf-8", "surrogatepass")
            parts += _INTEGER.pack(len(data)), data
        elif isinstance(field, bytes):
            parts.append(field)
        elif isinstance(field, int):
            parts.append(_INTEGER.pack(field))
        else:
            parts.append(_SECONDS.pack(field))
    return b"".join(parts)
