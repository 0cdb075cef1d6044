"""Blocks of requests: taken for tokens, shared on a hit, skipped behind a window, written by a step, given back.

Blocks of a request that the running step computes are given back at the end of the step, as vLLM does: others may have been given
them as a hit in that very step, and the step writes them whatever became of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from blocks import BlockPool, PrefixCache

from vllm_adapter.scheduler.chunks import ScheduledTokens

if TYPE_CHECKING:
    from engine import Engine
    from request import Request


@final
@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A chunk of a step, its tokens, the blocks when it was scheduled, and the request's life then."""

    chunk: ScheduledTokens
    request: Request
    ids: list[int]
    blocks: list[list[int]]
    life: int


@final
class Holdings:
    """Blocks of an engine's requests.

    Attributes:
        pool: All blocks.
        prefix: Finds those that are known by content.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups = engine.fleet.plan.fleet.groups
        self._size = engine.plan.block_tokens
        self.pool = BlockPool(engine)
        self.prefix = PrefixCache(engine, self.pool)
        self._computing: set[int] = set()
        self._deferred: list[tuple[Request, list[int]]] = []

    # ------------------------------------------------------------------------------------------------------ take

    def _wanted(self, number: int, tokens: int) -> int:
        """Return the blocks of a group that so many tokens take: of a state one, whatever it has seen."""
        return 1 if self._groups[number].kind == "state" else -(-tokens // self._size)

    def promised(self, requests: Iterable[Request]) -> int:
        """Return the blocks that prompts under way will need: vLLM parks nothing in their place."""
        return sum(
            max(0, self._wanted(number, one.prompt_tokens) - len(group))
            for one in requests
            if one.status == "parked" or (one.status == "running" and one.scheduled < one.prompt_tokens)
            for number, group in enumerate(one.blocks)
        )

    def take(self, request: Request, tokens: int, hits: Sequence[Sequence[int]] = (), reserved: int = 0) -> bool:
        """Give a request blocks for so many tokens, those of a hit first; False, and nothing changed, if too few are free.

        As many as are reserved stay free.
        """
        had = [list(hit) for hit in hits] or request.blocks or [[] for _ in self._groups]
        missing = [max(0, self._wanted(number, tokens) - len(group)) for number, group in enumerate(had)]
        shared = [block for hit in hits for block in hit if block]
        if sum(missing) + self.pool.idle_count(shared) + reserved > len(self.pool.free):
            return False
        self.pool.share(request, shared)
        request.blocks = had
        for group, count in zip(had, missing, strict=True):
            group.extend(self.pool.take(request, count))
        return True

    def new_blocks(self, request: Request, hits: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the blocks that no hit covers."""
        if not hits:
            return request.blocks
        return [
            [block for block in group if block and block not in hit]
            for group, hit in zip(request.blocks, hits, strict=True)
        ]

    def count_bytes(self, target: int, size: int) -> None:
        """Count bytes that have come to an address for a request that is read while its peer computes it."""
        block = self._engine.pages.block_of(target)
        holders = self.pool.holders(block) if block else ()
        for request in self._engine.host.requests.values():
            if request.is_streamed and request.serial in holders:
                if request.hand_over_id in self._engine.fleet.whole:
                    request.late_bytes += size
                else:
                    request.early_bytes += size

    # ------------------------------------------------------------------------------------------------------ give back

    def free_all(self, request: Request) -> None:
        """Free all blocks of a request."""
        blocks, request.blocks = request.blocks, []
        real = [block for group in blocks for block in group if block]
        if request.serial in self._computing:
            self._deferred.append((request, real))
        else:
            self.pool.give_back(request, real)

    def skip_window(self, request: Request, tokens: int) -> None:
        """Null and free the blocks before every window of a request that has so many tokens."""
        for number, group in enumerate(self._groups):
            if group.window_tokens and request.blocks:
                first = max(0, tokens - group.window_tokens + 1) // self._size
                gone = [block for block in request.blocks[number][:first] if block]
                if gone:
                    request.blocks[number][:first] = [0] * first
                    self.pool.give_back(request, gone)

    def filled(self, request: Request, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (group, block) of all blocks that a read of these tokens is to fill."""
        for number, group in enumerate(request.blocks):
            places = (
                slice(None)
                if self._groups[number].kind == "state"
                else slice(start // self._size, -(-stop // self._size))
            )
            yield from ((number, block) for block in group[places] if block)

    def leave_to_read(self, request: Request, start: int, stop: int) -> None:
        """Leave the blocks of a read as their last owners left them: the host does not zero what a read fills."""
        self._engine.pages.poison([block for _, block in self.filled(request, start, stop)])

    # ------------------------------------------------------------------------------------------------------ a step

    def schedule(self, request: Request, chunk: ScheduledTokens) -> Work:
        """Return the work of a chunk, whose tokens are known by content from now on."""
        first, stop = chunk.computed_tokens, chunk.computed_tokens + chunk.new_tokens
        ids, held = request.ids[first:stop], request.blocks
        if self.prefix.is_on:
            self.prefix.keep(request, stop, is_pending=True)
            held = [list(group) for group in held]
            self._computing.add(request.serial)
        return Work(chunk, request, ids, held, request.preemptions)

    def compute(self, work: Sequence[Work]) -> None:
        """Write what a step computes, and give back what waited for its end."""
        for item in work:
            if self.prefix.is_on or item.request.status == "running":
                self._compute(item)
        self._computing.clear()
        self.prefix.pending.clear()
        for request, blocks in self._deferred:
            self.pool.give_back(request, blocks)
        self._deferred.clear()

    def _compute(self, item: Work) -> None:
        size, first, ids, pages = self._size, item.chunk.computed_tokens, item.ids, self._engine.pages
        for number, group in enumerate(item.blocks):
            if self._groups[number].kind == "state":
                if group:
                    pages.groups[number].advance(group[0], group[0] if first else 0, ids)
                continue
            for place in range(first // size, -(-(first + len(ids)) // size)):
                if place < len(group) and group[place]:
                    start, stop = max(first, place * size), min(first + len(ids), (place + 1) * size)
                    part = np.array(ids[start - first : stop - first], np.uint32)
                    pages.groups[number].write(group[place], start - place * size, part)
