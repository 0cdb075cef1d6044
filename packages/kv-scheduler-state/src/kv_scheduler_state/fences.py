"""Slots of the fence array and the generations written into them.

A slot is taken when a prompt is allocated, so that the workers have written the new generation before anybody can
hold the ticket, and returned when every worker has ended the lease. Returned slots go to the end of the line: a slot
is reused as late as possible, and never with a generation that it carried before. A prompt that starts again keeps its slot
and gets a new generation.

Outstanding leases: the blocks that they keep from the engine, and whether one more may be granted.

A lease is outstanding from its grant until every worker has reported its end, revoked or not: the engine keeps the blocks for
that long.

Example: `max_leases` 2 and `max_leased_blocks` 100. With leases of 40 and 50 blocks outstanding, no further lease is granted.
Once the lease of 40 blocks has ended, a prompt of 50 blocks is handed over, and a prompt of 51 is not.

A prompt that is offered while it is computed is promised its lease before the offer: its reader reserves blocks and reads, and
would fail if the lease were refused at the end.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.config import MAX_GENERATION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.config import SchedulerConfig
    from kv_scheduler_state.records import ProducerRecord

__all__ = ["ENDED_BIT", "FencePool", "Outstanding", "ended_generation", "is_later_tag", "stream_tag"]

_TAG_BITS: Final = 32
ENDED_BIT: Final = 1 << 63
"""Set in a fence word whose lease has ended; no granted generation has it."""


def ended_generation(generation: int) -> int:
    """Return the word that voids a granted generation; the same on every worker, and never granted."""
    return generation | ENDED_BIT


def stream_tag(generation: int) -> int:
    """Return the tag of a generation: its low 32 bits.

    A tag paces reads and names the table's owner; it repeats after 2**32 generations, so it never decides. Example: the
    generations 7 and 2**32 + 7 share the tag 7, and a reader that mistakes one for the other fails at the fence.
    """
    return generation % (1 << _TAG_BITS)


def is_later_tag(tag: int, other: int) -> bool:
    """Return whether `tag` was issued after `other`, provided that fewer than half of all tags lie between them.

    Examples: 8 is later than 7; 1 is later than 2**32 - 1, since tags wrap around; 7 is not later than 7.
    """
    return 0 < (tag - other) % (1 << _TAG_BITS) < 1 << (_TAG_BITS - 1)


@final
class FencePool:
    """Hands out (slot, generation) pairs.

    Args:
        slots: Words of the fence array.
        seed: First generation, 1 to 2**53 - 1.
        first: First word of the pool; those before it belong to another one.
    """

    def __init__(self, slots: int, seed: int, first: int = 0) -> None:
        self.slots = slots
        self._first = first
        self._end = first + slots
        # First slot that was never taken; after all of those come the returned slots, oldest first.
        self._unused = first
        self._returned: deque[int] = deque()
        self._next = seed

    def take(self) -> tuple[int, int] | None:
        """Return a free slot with a fresh generation, or None if every slot is in use."""
        slot = self._unused
        if slot < self._end:
            self._unused = slot + 1
        elif self._returned:
            slot = self._returned.popleft()
        else:
            return None
        return slot, self._draw()

    def renew(self, slot: int) -> tuple[int, int]:
        """Return a slot in use with a fresh generation."""
        return slot, self._draw()

    def _draw(self) -> int:
        generation = self._next
        self._next = generation + 1 if generation < MAX_GENERATION else 1
        return generation

    def give_back(self, slot: int) -> None:
        """Return a slot whose last generation no reader may trust any more."""
        self._returned.append(slot)

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self._unused - self._first - len(self._returned)


@final
class Outstanding:
    """The outstanding leases.

    Args:
        config: The engine, with its quotas.

    Attributes:
        has_quota: Whether `has_room` can ever refuse.
        blocks: Blocks that the leases keep, per KV-cache group. Null blocks do not count; blocks of two leases count twice.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_leases = math.inf if config.max_leases is None else config.max_leases
        self._max_blocks = math.inf if config.max_leased_blocks is None else config.max_leased_blocks
        self.has_quota = config.max_leases is not None or config.max_leased_blocks is not None
        # A group that keeps the whole prompt has no null blocks to look for.
        self._null = None if all(group.kind == "full" for group in config.groups) else config.null_block
        self._leased: set[str] = set()
        self.blocks = [0] * len(config.groups)
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
        return sum(self.blocks) + sum(self._promised.values()) + block_count <= self._max_blocks

    def grant(self, record: ProducerRecord, block_ids: Sequence[Sequence[int]]) -> None:
        """Note a lease that was granted."""
        self._leased.add(record.request_id)
        self._promised.pop(record.request_id, None)
        null = self._null
        record.leased_blocks = [len(ids) if null is None else len(ids) - ids.count(null) for ids in block_ids]
        for group, count in enumerate(record.leased_blocks):
            self.blocks[group] += count

    def end(self, record: ProducerRecord) -> None:
        """Note the end of a lease on every worker."""
        self._leased.discard(record.request_id)
        self._promised.pop(record.request_id, None)
        for group, count in enumerate(record.leased_blocks):
            self.blocks[group] -= count
