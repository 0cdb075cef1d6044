"""Outstanding leases: the blocks that they keep from the engine, and whether one more may be granted.

A lease is outstanding from its grant until every worker has reported its end, revoked or not: the engine keeps the blocks for
that long.

Example: `max_leases` 2 and `max_leased_blocks` 100. With leases of 40 and 50 blocks outstanding, no further lease is granted.
Once the lease of 40 blocks has ended, a prompt of 50 blocks is handed over, and a prompt of 51 is not.

A prompt that is offered while it is computed is promised its lease before the offer: its reader reserves blocks and reads, and
would fail if the lease were refused at the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state._config import SchedulerConfig
    from kv_scheduler_state._producer_record import ProducerRecord

__all__ = ["Outstanding"]


@final
class Outstanding:
    """The outstanding leases.

    Args:
        config: The engine, with its quotas.

    Attributes:
        has_quota: Whether `has_room` can ever refuse.
    """

    __slots__ = ("_blocks", "_leased", "_max_blocks", "_max_leases", "_null", "_promised", "has_quota")

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_leases = math.inf if config.max_leases is None else config.max_leases
        self._max_blocks = math.inf if config.max_leased_blocks is None else config.max_leased_blocks
        self.has_quota = config.max_leases is not None or config.max_leased_blocks is not None
        # A group that keeps the whole prompt has no null blocks to look for.
        self._null = None if all(group.kind == "full" for group in config.groups) else config.null_block
        self._leased: set[str] = set()
        self._blocks = [0] * len(config.groups)
        # Blocks of prompts whose lease is promised, by request; empty without quotas.
        self._promised: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._leased)

    def has_room(self, block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether the quotas admit one more lease, of these blocks."""
        nulls = 0 if self._null is None else sum(ids.count(self._null) for ids in block_ids)
        return self._admits(sum(map(len, block_ids)) - nulls)

    def promise(self, request_id: str, block_count: int) -> bool:
        """Promise a lease of at most so many blocks; return False if the quotas do not admit it."""
        if not self.has_quota or request_id in self._promised:
            return True
        if not self._admits(block_count):
            return False
        self._promised[request_id] = block_count
        return True

    def forget_promise(self, request_id: str) -> None:
        """Take a promise back."""
        self._promised.pop(request_id, None)

    def _admits(self, block_count: int) -> bool:
        if len(self) + len(self._promised) >= self._max_leases:
            return False
        return sum(self._blocks) + sum(self._promised.values()) + block_count <= self._max_blocks

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that the leases keep, per KV-cache group. Null blocks do not count; blocks of two leases count twice."""
        return tuple(self._blocks)

    def grant(self, request_id: str, record: ProducerRecord, block_ids: Sequence[Sequence[int]]) -> None:
        """Note a lease that was granted."""
        self._leased.add(request_id)
        if self._promised:
            self._promised.pop(request_id, None)
        null, blocks = self._null, self._blocks
        if null is None and len(blocks) == 1:  # nearly every model
            (ids,) = block_ids
            count = len(ids)
            record.leased_blocks = (count,)
            blocks[0] += count
            return
        counts = [len(ids) if null is None else len(ids) - ids.count(null) for ids in block_ids]
        record.leased_blocks = counts
        for group, count in enumerate(counts):
            blocks[group] += count

    def end(self, request_id: str, record: ProducerRecord) -> None:
        """Note the end of a lease on every worker."""
        self._leased.discard(request_id)
        if self._promised:
            self._promised.pop(request_id, None)
        blocks, counts = self._blocks, record.leased_blocks
        if len(counts) == 1:
            blocks[0] -= counts[0]
            return
        for group, count in enumerate(counts):
            blocks[group] -= count
