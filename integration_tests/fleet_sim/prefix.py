"""Local prefix hits: which blocks of the pool a prompt can share, as vLLM's cache manager finds them.

Example: blocks of 4 tokens, a window of 6, and 12 tokens of a prompt are kept. A group that keeps everything shares all three
blocks. The next token sees tokens 7 to 11, so the window group shares the blocks of tokens 4 to 11 and has none in front of them.

States are not kept. A hit beside a state is of use only if the state is read from a peer, whose tokens go on after the hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from blocks import BlockPool
    from engine import Engine
    from request import Request

__all__ = ["PrefixCache"]


@final
class PrefixCache:
    """Prefix look-ups of one engine.

    Attributes:
        needs_read: Whether a hit is of use only before a read.
        pending: Blocks whose content the running step is about to compute.
    """

    def __init__(self, engine: Engine, pool: BlockPool) -> None:
        self._engine = engine
        self._pool = pool
        self._size = engine.plan.block_tokens
        self._groups = engine.fleet.plan.fleet.groups
        self.needs_read = engine.fleet.plan.fleet.has_state
        self.is_on = engine.plan.has_prefix_cache
        self.pending: set[int] = set()

    def longest_hit(self, request: Request) -> tuple[list[list[int]], int]:
        """Return the blocks by group, 0 where there is none, and the tokens of the longest hit; at least a token stays open."""
        if self.is_on and not request.computed:
            for count in range((len(request.ids) - 1) // self._size, 0, -1):
                found = [self._blocks(request, number, count) for number in range(len(self._groups))]
                kinds = zip(found, self._groups, strict=True)
                if any(found) and all(blocks or group.kind == "state" for blocks, group in kinds):
                    return found, count * self._size
        return [], 0

    def _blocks(self, request: Request, number: int, count: int) -> list[int]:
        if self._groups[number].kind == "state":
            return []
        window = self._groups[number].window_tokens
        first = max(0, count * self._size - window + 1) // self._size if window else 0
        blocks = [0] * first
        for place in range(first, count):
            ids = tuple(request.ids[: (place + 1) * self._size])
            block = self._pool.find(number, ids)
            if not block:
                return []
            if block not in self.pending:
                self._engine.checks.kept(number, block, ids)
            blocks.append(block)
        return blocks

    def keep(self, request: Request, tokens: int, *, is_pending: bool) -> None:
        """Know the full blocks of a request's first tokens by content."""
        if not self.is_on:
            return
        pool = self._pool
        for number, blocks in enumerate(request.blocks):
            if self._groups[number].kind == "state":
                continue
            for place in range(min(tokens // self._size, len(blocks))):
                block = blocks[place]
                if block and block not in pool.kept:
                    pool.keep(number, tuple(request.ids[: (place + 1) * self._size]), block)
                    if is_pending and block in pool.kept:
                        self.pending.add(block)
