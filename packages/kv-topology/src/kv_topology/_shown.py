"""Values in error messages, cut to a length that a log line can hold, whatever a peer sent."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["shown", "shown_ranks"]

_LONGEST = 60
_FEW = 6


def shown(value: object) -> str:
    """Return a short text of any value, without building the long one."""
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}..."
    if value is None or isinstance(value, float):
        return repr(value)
    length = len(value) if isinstance(value, Sized) else None
    return f"a {type(value).__name__}" + (f" of {length} items" if length is not None else "")


def shown_ranks(ranks: Collection[object]) -> str:
    """Return the first few ranks of many."""
    few = ", ".join(str(rank) for _, rank in zip(range(_FEW), ranks, strict=False))
    return f"[{few}]" if len(ranks) <= _FEW else f"[{few}, ... {len(ranks)} in all]"
