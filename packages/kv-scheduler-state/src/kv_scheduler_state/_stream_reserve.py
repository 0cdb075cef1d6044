"""The blocks that streams may hold before their data is whole.

A parked stream holds blocks and computes nothing. Where two engines prefill for each other, streams that held all blocks
would keep the prompts that they wait for from running; a limited share leaves room for those prompts.

Worked example. Of 1000 blocks with a fraction of 0.5 streams hold at most 500. With 400 held and 300 free, 100 more may be
taken and 101 may not; with 80 free, 80 may.
"""

from __future__ import annotations

from typing import final

from kv_scheduler_state._errors import InvalidConfig

__all__ = ["StreamReserve"]


@final
class StreamReserve:
    """Counts the blocks that streams hold.

    Args:
        total_blocks: Blocks of the engine's pool.
        fraction: Share of them that streams may hold together, 0 to 1.

    Raises:
        InvalidConfig: `invalid-config`, for a fraction outside of 0 to 1 or a negative total.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, total_blocks: int, fraction: float) -> None:
        if not 0 <= fraction <= 1 or total_blocks < 0:
            raise InvalidConfig(f"streams may hold {fraction} of {total_blocks} blocks: give a share of 0 to 1")
        self._limit = int(total_blocks * fraction)
        self._held: dict[str, int] = {}

    @property
    def limit(self) -> int:
        """Most blocks that streams hold together."""
        return self._limit

    @property
    def held(self) -> int:
        """Blocks that streams hold now."""
        return sum(self._held.values())

    def take(self, request_id: str, blocks: int, free_blocks: int) -> bool:
        """Count a request's blocks in place of any earlier count; return False if too few are free or left in the share."""
        others = self.held - self._held.get(request_id, 0)
        if blocks > free_blocks or others + blocks > self._limit:
            self._held.pop(request_id, None)
            return False
        self._held[request_id] = blocks
        return True

    def give_back(self, request_id: str) -> None:
        """Stop counting a request's blocks, if they were counted."""
        self._held.pop(request_id, None)
