"""Memory of an engine's ranks: pages whose every word says which token of which conversation it belongs to.

A word of layer l, head h, token t and place e holds `id(t) ^ pattern(l, h, e)`. Ids are unique in the whole world, so a page that
holds a wrong token, head, layer or half is found, and the id tells whose it is. Free pages are poisoned at once. With a mirror,
peers see a second memory of the same form, into which production copies what it hands over, and out of which what it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy_pages import NumpyMirror, NumpyPages
from page_kinds import HEAD_SIZE, HEADS, pages_of, words_of
from plan import EnginePlan, GroupPlan

from vllm_adapter.cache.facts import LayerCache

__all__ = ["HEADS", "HEAD_SIZE", "Pages", "layer_names"]

_POISON = 0xDEAD0000
Array = np.ndarray[Any, Any]


def layer_names(groups: Sequence[GroupPlan]) -> list[tuple[str, ...]]:
    """Return the layers' names by group."""
    names: list[tuple[str, ...]] = []
    number = 0
    for group in groups:
        names.append(tuple(f"layers.{number + n}" for n in range(group.layers)))
        number += group.layers
    return names


@final
class Pages:
    """The cache of one engine, all ranks.

    Attributes:
        raw: Words by (rank, layer, block), as the engine computes them.
        wire: Those that peers read and write: the same, or the mirror's.
        mirror: Copies between the two; None if they are the same.
        groups: What the engine computes, by group: `TokenPages` or `StatePages`.
    """

    def __init__(self, engine: EnginePlan, groups: Sequence[GroupPlan], state_groups: int = 2) -> None:
        self.group_of = [number for number, group in enumerate(groups) for _ in range(group.layers)]
        words = max(words_of(group, engine, state_groups) for group in groups)
        self.page_bytes = 4 * words
        self.raw: Array = np.full((engine.tp, len(self.group_of), engine.blocks, words), _POISON, np.uint32)
        self.wire: Array = self.raw.copy() if engine.has_mirror else self.raw
        self.mirror = NumpyMirror([self.raw], [self.wire]) if engine.has_mirror else None
        self.groups: list[Any] = []
        self._seen: list[tuple[Any, int]] = []
        first = 0
        for group in groups:
            layers = slice(first, first + group.layers)
            self.groups.append(pages_of(self.raw[:, layers], group, engine, first, state_groups))
            self._seen.append((pages_of(self.wire[:, layers], group, engine, first, state_groups), first))
            first += group.layers

    def caches(self, rank: int) -> list[LayerCache]:
        """Describe a rank's layers, as peers are to see them."""
        found: list[LayerCache] = []
        for layer, group in enumerate(self.group_of):
            pages, first = self._seen[group]
            about: dict[str, Any] = {"memory_kind": "DRAM", "device": 0, "page_bytes": self.page_bytes}
            found.append(LayerCache(f"layers.{layer}", group, **about, **pages.cache(rank, layer - first)))
        return found

    def converter(self, rank: int) -> NumpyPages:
        """Return what puts received pages of a rank in order."""
        return NumpyPages(self.wire[rank])

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil freed blocks."""
        if blocks:
            self.raw[:, :, blocks] = _POISON
            self.wire[:, :, blocks] = _POISON

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero blocks that get a new owner, as the host does, except those that a read is to fill."""
        self.raw[:, :, blocks] = 0

    def is_left(self, group: int, block: int) -> bool:
        """Return whether a word of a block is as it was when the block was spoiled."""
        return bool((self.groups[group].view[:, :, block] == _POISON).any())

    def lose(self) -> None:
        """Lose everything, as memory that is unmapped does."""
        self.raw[...] = _POISON
        self.wire[...] = _POISON

    def block_of(self, address: int) -> int | None:
        """Return the block that an address lies in, None if it lies elsewhere."""
        offset = address - self.wire.ctypes.data
        return offset // self.page_bytes % self.wire.shape[2] if 0 <= offset < self.wire.nbytes else None
