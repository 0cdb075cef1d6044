"""Checks of what a caller hands to an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_scheduler_state._errors import InvalidEvent, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["covered_blocks", "require_count"]


def require_count(name: str, value: int) -> None:
    """Refuse anything but an integer of zero or more.

    Raises:
        InvalidEvent: `invalid-event`.
    """
    if type(value) is not int or value < 0:
        raise InvalidEvent(f"{name} is {quote(value)}, must be an integer of zero or more")


def covered_blocks(block_ids: Sequence[Sequence[int]], new_block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many blocks per group come before the new ones.

    Raises:
        InvalidEvent: `invalid-event`, if the lists do not have the same number of groups.
    """
    if len(block_ids) != len(new_block_ids):
        raise InvalidEvent(f"block_ids has {len(block_ids)} groups, new_block_ids has {len(new_block_ids)}")
    return tuple([max(0, len(all_ids) - len(new)) for all_ids, new in zip(block_ids, new_block_ids, strict=True)])
