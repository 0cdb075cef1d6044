"""Which of a request's blocks cross between engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import GroupConfig

__all__ = ["BlockClipper", "Blocks"]

Blocks = tuple[tuple[int, ...], ...]
"""Block ids, one tuple per KV-cache group, in token order."""


@final
class BlockClipper:
    """Clips block lists to what a peer can use, group by group.

    An engine allocates blocks for the whole sequence and frees those outside a window later, leaving null blocks at the
    front. Both sides therefore exchange only the tail: `ceil(window / block) + 1` blocks of a "window" group, and of a
    "state" group the one block with the running state, which is in front of the speculative scratch blocks.
    """

    __slots__ = ("_count", "_groups", "_is_plain")

    def __init__(self, groups: tuple[GroupConfig, ...]) -> None:
        self._groups = groups
        self._count = len(groups)
        self._is_plain = all(group.kind == "full" for group in groups)

    def require_groups(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Refuse block lists of another model.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        if len(block_ids) != len(self._groups):
            raise InvalidEvent(
                f"block ids come in {len(block_ids)} groups, the model has {len(self._groups)}",
                groups=len(block_ids),
                expected=len(self._groups),
            )

    def clip(self, block_ids: Sequence[Sequence[int]], *, is_partial: bool = False) -> Blocks:
        """Return the blocks that cross between engines.

        Args:
            block_ids: The request's blocks per group, in token order.
            is_partial: The list is one chunk of a prefill, so a "state" group's last block is not yet the final state
                and all of them are kept.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        if len(block_ids) != self._count:
            self.require_groups(block_ids)
        blocks = tuple(map(tuple, block_ids))
        if self._is_plain:
            return blocks
        return tuple(
            [_clip_group(group, ids, is_partial=is_partial) for group, ids in zip(self._groups, blocks, strict=True)]
        )


def _clip_group(group: GroupConfig, ids: tuple[int, ...], *, is_partial: bool) -> tuple[int, ...]:
    if group.kind == "window":
        return ids[-group.window_blocks :]
    if group.kind == "state" and ids and not is_partial:
        # Scratch may not be allocated yet: the running state is at least the first block.
        last = len(ids) - 1 - min(group.scratch_blocks, len(ids) - 1)
        return ids[last : last + 1]
    return ids
