"""Exceptions of the decoders on hostile bytes."""

from __future__ import annotations

import msgspec

__all__ = ["DECODE_ERRORS"]

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""msgspec's own errors; bad UTF-8 (a ValueError); map keys without a hash (a TypeError in older releases); nesting that
exceeds the interpreter's limit. Lengths that promise more than the frame holds are refused by msgspec before anything is
allocated."""
