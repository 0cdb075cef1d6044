"""Memory of an engine's ranks: pages whose every word says which token of which conversation it belongs to.

A word of layer l, head h, token t and place e holds `id(t) ^ pattern(l, h, e)`. Ids are unique in the whole world, so a page that
holds a wrong token, head, layer or half is found, and the id tells whose it is. Free pages are poisoned at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from plan import EnginePlan, GroupPlan

from vllm_adapter.cache.facts import LayerCache

__all__ = ["HEADS", "HEAD_SIZE", "Pages", "layer_names"]

HEADS, HEAD_SIZE = 4, 2
_POISON = 0xDEAD0000
Array = np.ndarray[Any, Any]

_PATTERNS = np.random.default_rng(7).integers(0, 1 << 32, (16, HEADS, 1, 2 * HEAD_SIZE), dtype=np.uint32)


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
    """The cache of one engine, all ranks."""

    def __init__(self, engine: EnginePlan, groups: Sequence[GroupPlan]) -> None:
        self.tokens, self.share = engine.block_tokens, HEADS // engine.tp
        self.group_of = [number for number, group in enumerate(groups) for _ in range(group.layers)]
        layers = len(self.group_of)
        page = self.share * self.tokens * 2 * HEAD_SIZE
        self.page_bytes = 4 * page
        self.raw = np.full((engine.tp, layers, engine.blocks, page), _POISON, np.uint32)
        if engine.order == "HND":
            shaped = self.raw.reshape(engine.tp, layers, engine.blocks, self.share, self.tokens, 2 * HEAD_SIZE)
        else:
            flat = self.raw.reshape(engine.tp, layers, engine.blocks, self.tokens, self.share, 2 * HEAD_SIZE)
            shaped = flat.transpose(0, 1, 2, 4, 3, 5)
        self.shaped: Array = shaped
        patterns = _PATTERNS[:layers].reshape(layers, engine.tp, self.share, 1, 2 * HEAD_SIZE).swapaxes(0, 1)
        self.patterns: Array = patterns  # (rank, layer, head, 1, element)

    def caches(self, rank: int) -> list[LayerCache]:
        """Describe a rank's layers as the host's seam does."""
        found: list[LayerCache] = []
        for layer, group in enumerate(self.group_of):
            array = self.shaped[rank, layer]
            address = array.ctypes.data
            found.append(
                LayerCache(f"layers.{layer}", group, address, array.shape, array.strides, 4, "DRAM", 0, self.page_bytes)
            )
        return found

    def write(self, group: int, block: int, first: int, ids: Array) -> None:
        """Compute tokens of a block, from its token `first` on, in all layers of a group on all ranks."""
        layers = [layer for layer, of in enumerate(self.group_of) if of == group]
        at = slice(layers[0], layers[-1] + 1)
        self.shaped[:, at, block, :, first : first + len(ids), :] = self.patterns[:, at] ^ ids[:, None]

    def poison(self, blocks: Sequence[int]) -> None:
        """Spoil freed blocks."""
        if blocks:
            self.raw[:, :, blocks] = _POISON

    def wrong(self, group: int, block: int, first: int, ids: Array) -> int | None:
        """Return None if a block holds these tokens from its token `first` on, else the id in the first wrong word."""
        layers = [layer for layer, of in enumerate(self.group_of) if of == group]
        at = slice(layers[0], layers[-1] + 1)
        found = self.shaped[:, at, block, :, first : first + len(ids), :] ^ self.patterns[:, at]
        differs = found != ids[:, None]
        if not differs.any():
            return None
        return int(found[differs][0])

    def touches(self, address: int, blocks: set[int]) -> int | None:
        """Return the block of `blocks` that an address lies in, None if it lies elsewhere."""
        offset = address - self.raw.ctypes.data
        if not 0 <= offset < self.raw.nbytes:
            return None
        block = offset // self.page_bytes % self.raw.shape[2]
        return block if block in blocks else None
