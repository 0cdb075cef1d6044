"""An engine's blocks: free, held by one request or several, kept by content after their last holder is gone.

As in vLLM: a block is known by the tokens that it and all blocks before it hold, from the step on in which these tokens are
scheduled. The free blocks are a queue; a kept block that comes to its head loses its content to the next taker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from engine import Engine
    from request import Request

Key = tuple[int, tuple[int, ...]]
"""Group, and all tokens up to the end of the block."""


@final
class BlockPool:
    """The blocks of one engine.

    Attributes:
        free: Blocks that nobody holds, the longest free one first.
        pressed: Blocks that memory pressure has taken away.
        kept: Blocks that are known by content.
        spoils: Whether freed pages are spoiled at once; not where no step follows that may write them before they are lost.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._world = engine.fleet.world
        self.free = list(range(1, engine.plan.blocks))
        self.pressed: list[int] = []
        self.spoils = True
        self.kept: dict[int, Key] = {}
        self._found: dict[Key, int] = {}
        self._holders: dict[int, list[int]] = {}

    def take(self, request: Request, count: int) -> list[int]:
        """Give a request so many blocks; there are enough."""
        taken: list[int] = []
        for _ in range(count):
            block = self.free.pop(0)
            if block in self._holders:
                self._engine.violated("double-owner", f"block {block} has two owners")
            self._drop_content(block)
            self._holders[block] = [request.serial]
            taken.append(block)
        self._engine.pages.zero(taken)
        return taken

    def share(self, request: Request, blocks: Sequence[int]) -> None:
        """Let a request hold kept blocks, too."""
        for block in blocks:
            if block not in self._holders:
                self.free.remove(block)
            self._holders.setdefault(block, []).append(request.serial)
            self._world.counts["shared-blocks"] += 1

    def holders(self, block: int) -> Sequence[int]:
        """Return the serial numbers of the requests that hold a block."""
        return self._holders.get(block, ())

    def idle_count(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks are free."""
        return sum(block not in self._holders for block in blocks)

    def is_shared(self, block: int) -> bool:
        """Return whether others may use a block: several requests hold it, or it is kept by content."""
        return len(self._holders.get(block, ())) > 1 or block in self.kept

    def give_back(self, request: Request, blocks: Sequence[int]) -> None:
        """Let a request hold blocks no longer, and check that nothing may still write into those that are free now."""
        freed: list[int] = []
        for block in blocks:
            holders = self._holders.get(block, [])
            if request.serial not in holders:
                self._engine.violated("double-free", f"{request.request_id} frees block {block} twice")
                return
            holders.remove(request.serial)
            if not holders:
                del self._holders[block]
                freed.append(block)
        self._engine.checks.freed(request, set(freed))
        if self.spoils:
            self._engine.pages.poison([block for block in freed if block not in self.kept])
        self.free += freed

    # ------------------------------------------------------------------------------------------------------ content

    def keep(self, group: int, ids: tuple[int, ...], block: int) -> None:
        """Know a block by content, unless another one is known by the same."""
        if block not in self.kept and (group, ids) not in self._found:
            self.kept[block] = group, ids
            self._found[group, ids] = block

    def find(self, group: int, ids: tuple[int, ...]) -> int:
        """Return the block with this content, 0 for none."""
        return self._found.get((group, ids), 0)

    def reset(self) -> bool:
        """Forget all content; False, and nothing done, while a request holds blocks."""
        if self._holders:
            return False
        self._engine.pages.poison(list(self.kept))
        self.kept.clear()
        self._found.clear()
        return True

    def forget(self) -> None:
        """Forget all content, also of blocks in use, for it is about to be lost."""
        for block in list(self.kept):
            self._drop_content(block)

    def _drop_content(self, block: int) -> None:
        key = self.kept.pop(block, None)
        if key is not None:
            del self._found[key]
            if block not in self._holders:  # blocks in use lose their content with the memory, not before
                self._engine.pages.poison([block])

    # ------------------------------------------------------------------------------------------------------ pressure

    def press(self, count: int) -> None:
        """Take free blocks away."""
        for _ in range(count):
            block = self.free.pop()
            self._drop_content(block)
            self.pressed.append(block)

    def unpress(self) -> None:
        """Give back what pressure took."""
        self.free += self.pressed
        self.pressed.clear()


@final
class PrefixCache:
    """Local prefix hits of one engine: which blocks of the pool a prompt can share, as vLLM's cache manager finds them.

    Example: blocks of 4 tokens, a window of 6, and 12 tokens of a prompt are kept. A group that keeps everything shares all three
    blocks. The next token sees tokens 7 to 11, so the window group shares the blocks of tokens 4 to 11, and none before them.

    States are not kept. A hit beside a state is of use only if the state is read from a peer, whose tokens go on after the hit.

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
