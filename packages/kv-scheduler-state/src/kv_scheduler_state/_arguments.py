"""Checks of what a caller hands to an event."""

from __future__ import annotations

from operator import sub
from typing import TYPE_CHECKING, NoReturn

from kv_scheduler_state._errors import InvalidEvent, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["covered_blocks", "refuse_count", "refuse_excess"]


def refuse_count(name: str, value: object) -> NoReturn:
    """Refuse what is no integer of zero or more; callers look themselves, for every hook has one of these.

    Raises:
        InvalidEvent: `invalid-event`, always.
    """
    raise InvalidEvent(f"{name} is {quote(value)}, must be an integer of zero or more")


def refuse_excess(request_id: str, external_tokens: int, held: int) -> NoReturn:
    """Refuse to wait for more tokens than a peer holds.

    Raises:
        InvalidEvent: `invalid-event`, always.
    """
    raise InvalidEvent(
        f"request {quote(request_id)} expects {external_tokens} external tokens, its peer has {held} for it",
        request_id=request_id,
    )


def covered_blocks(block_ids: Sequence[Sequence[int]], new_block_ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return how many blocks per group come before the new ones.

    Raises:
        InvalidEvent: `invalid-event`, if the lists do not have the same number of groups.
    """
    if len(block_ids) != len(new_block_ids):
        raise InvalidEvent(f"block_ids has {len(block_ids)} groups, new_block_ids has {len(new_block_ids)}")
    covered = tuple(map(sub, map(len, block_ids), map(len, new_block_ids)))
    return covered if min(covered, default=0) >= 0 else tuple([max(0, count) for count in covered])
