"""Prefix hits whose pages are complete before a step, so that a stream may show them at once.

The host indexes a block by its content as soon as the step that computes it is scheduled, so a hit may name blocks that another
request of the same step is about to fill. Therefore, once a prompt that will be streamed has a hit, and only then, the blocks
that the step writes are collected from the block tables of all its requests.

Example: blocks of 16 tokens. A step computes tokens 16 to 47 of a request with the blocks 4, 5 and 6, so it writes 5 and 6. A
hit on blocks 4 and 5 is not complete before the step; a hit on block 4 is.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["PrefixHits"]


@final
class PrefixHits:
    """Checks the prefix hits of one step.

    Args:
        span_tokens: Tokens that a block of each transferable group stands for; 0 for a group of states, which is not checked.
        scheduled: (request, computed tokens) of all requests of the step.
        blocks_of: Returns a request's whole block table, per transferable group; None if the host does not tell.
        null: The block id that stands for no block.
    """

    def __init__(
        self,
        span_tokens: Sequence[int],
        scheduled: Callable[[], Iterable[tuple[str, int]]],
        blocks_of: Callable[[str], Sequence[Sequence[int]] | None],
        *,
        null: int = 0,
    ) -> None:
        self._spans = span_tokens
        self._scheduled = scheduled
        self._blocks_of = blocks_of
        self._null = null
        self._written: set[int] | None = None
        self._is_known = True

    def held(self, block_ids: Sequence[Sequence[int]], computed_tokens: int) -> int:
        """Return the tokens of a hit, in whole blocks of all groups; 0 if this step computes any of them, or in case of doubt."""
        whole_tokens = computed_tokens - computed_tokens % lcm(*filter(None, self._spans))
        if not whole_tokens:
            return 0
        if self._written is None:
            self._written = self._find_written()
        hits = {
            block
            for ids, span in zip(block_ids, self._spans, strict=True)
            if span
            for block in ids[: whole_tokens // span]
        } - {self._null}
        return whole_tokens if self._is_known and not hits & self._written else 0

    def _find_written(self) -> set[int]:
        written: set[int] = set()
        for request_id, computed_tokens in self._scheduled():
            tables = self._blocks_of(request_id)
            if tables is None:
                self._is_known = False
                continue
            for ids, span in zip(tables, self._spans, strict=True):
                if span:
                    written.update(ids[computed_tokens // span :])
        return written
