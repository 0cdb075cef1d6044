"""Blocks that finished requests keep for a reader: the level that an operator sees while an engine drains."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_adapter.ports import BlockIds

__all__ = ["LeasedBlocks"]


@final
class LeasedBlocks:
    """Counts leased blocks, each once, however many leases share it as a common prefix.

    Example: blocks 1, 2, 3 of one request and 1, 2, 4 of another, 4096 bytes each: 4 blocks, 16384 bytes. When the first lease
    ends, 3 blocks (1, 2, 4) stay.

    Args:
        block_bytes: Bytes of a block on each rank, per transferable group.
        null_block: Id that means "no block here".
    """

    def __init__(self, block_bytes: Sequence[int], *, null_block: int = 0) -> None:
        self._block_bytes = tuple(block_bytes)
        self._null_block = null_block
        self._requests: dict[str, tuple[tuple[int, int], ...]] = {}
        self._leases: dict[tuple[int, int], int] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """Requests whose blocks are leased."""
        return tuple(self._requests)

    @property
    def blocks(self) -> int:
        """Blocks that are leased."""
        return len(self._leases)

    @property
    def block_bytes(self) -> int:
        """Bytes of these blocks on each rank."""
        return sum(self._block_bytes[group] for group, _ in self._leases)

    def lease(self, request_id: str, block_ids: BlockIds) -> None:
        """Note the blocks that a request keeps, per transferable group."""
        if request_id in self._requests:
            return
        kept = tuple(
            {(group, block): None for group, ids in enumerate(block_ids) for block in ids if block != self._null_block}
        )
        self._requests[request_id] = kept
        for block in kept:
            self._leases[block] = self._leases.get(block, 0) + 1

    def end(self, request_ids: Iterable[str]) -> None:
        """Note that the engine has these requests' blocks back."""
        for request_id in request_ids:
            for block in self._requests.pop(request_id, ()):
                left = self._leases[block] - 1
                if left:
                    self._leases[block] = left
                else:
                    del self._leases[block]
