"""Damage to bytes on their way."""

from __future__ import annotations

import random

__all__ = ["damaged"]


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a bit changed, or cut off."""
    if not data:
        return b"\x00"
    at = draw.randrange(len(data))
    if draw.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
