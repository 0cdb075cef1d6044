"""Slots of the fence array and the generations written into them.

A slot is taken when a prompt is allocated, so that the workers have written the new generation before anybody can
hold the ticket, and returned when every worker has ended the lease. Returned slots go to the end of the line: a slot
is reused as late as possible, and never with a generation that it carried before. A prompt that starts again keeps its slot
and gets a new generation.
"""

from __future__ import annotations

from collections import deque
from typing import Final, final

from kv_scheduler_state._config import MAX_GENERATION

__all__ = ["ENDED_BIT", "FencePool", "ended_generation"]

ENDED_BIT: Final = 1 << 63
"""Set in a fence word whose lease has ended; no granted generation has it."""


def ended_generation(generation: int) -> int:
    """Return the word that voids a granted generation; the same on every worker, and granted to nobody."""
    return generation | ENDED_BIT


@final
class FencePool:
    """Hands out (slot, generation) pairs.

    Args:
        slots: Words of the fence array.
        seed: First generation, 1 to 2**53 - 1.
        first: First word of the pool; those before it belong to another one.
    """

    __slots__ = ("_end", "_first", "_next", "_returned", "_unused", "slots")

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

    @property
    def free_slots(self) -> tuple[int, ...]:
        """Slots that are not in use, next one first."""
        return (*range(self._unused, self._end), *self._returned)
