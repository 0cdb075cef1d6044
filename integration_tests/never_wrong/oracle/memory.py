"""The memory of one rank and the truth about it: numpy arrays, filled and judged by slicing global tensors.

`Content` holds, per request and layer, the one global tensor whose elements all differ. `RankMemory` allocates a rank's cache as
an engine does, tells the adapter of it in the words of the host's seam (`LayerCache`), and writes a request's part of the global
tensors where an engine of that rank keeps it. Nothing here comes from the libraries under test.

Example: 2 heads, 2 ranks, blocks of 4 tokens. Rank 1 keeps head 1. Token 6 of a request whose list is (5, 9) lies in block 9 at
offset 2, so `view[9, 0, 2] = tensor[6, 1]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from facts import facts

from oracle.geometry import Group, Model, Side
from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache

Array = np.ndarray[Any, Any]

NAN = 0xFF
"""Byte that all memory is filled with at first: no byte of any content, and a NaN in every floating-point format of a cache."""
_ODD = 0x9E3779B1
_NO_NAN = 0x7F7F7F7F
_SSM_BYTES = 4
_LATENT = 3


def layer_names(model: Model) -> list[list[str]]:
    """Return the names of each group's layers; the groups' layers alternate, as in a real model."""
    order = sorted((layer, number) for number, group in enumerate(model.groups) for layer in range(group.layers))
    names: list[list[str]] = [[] for _ in model.groups]
    for index, (_, number) in enumerate(order):
        names[number].append(f"layers.{index}")
    return names


def span_tokens(model: Model, side: Side, group: int) -> int:
    """Return the tokens of the sequence that one block id of a group stands for."""
    return side.block_tokens[group] * (1 if model.groups[group].kind == "state" else side.dcp)


def share(total: int, tp: int, rank: int) -> tuple[int, int]:
    """Return the [first, stop) that a rank holds of `total` things: dealt evenly, or one thing held by several ranks."""
    first = rank * total // tp
    return first, max((rank + 1) * total // tp, first + 1)


@dataclass
class Content:
    """Global tensors of one request: int64 ids that no other request or layer of the case has."""

    model: Model
    tokens: int
    first_id: int
    _made: dict[tuple[int, int, str], Array] = field(default_factory=dict)

    def tensor(self, group: int, layer: int, name: str, shape: tuple[int, ...]) -> Array:
        """Return one layer's tensor, made when it is first asked for."""
        key = (group, layer, name)
        if key not in self._made:
            count = math.prod(shape)
            self._made[key] = np.arange(self.first_id, self.first_id + count, dtype=np.int64).reshape(shape)
            self.first_id += count
        return self._made[key]


def _bytes(ids: Array, element_bytes: int) -> Array:
    """Return ids as elements: multiplied by an odd number, so that neighbours differ in every byte; no byte is `NAN`."""
    words = ((ids + 1) * _ODD).astype(np.uint64) & _NO_NAN
    return words.astype(f"u{element_bytes}")


def slot_mapping(tokens: Array, blocks: Sequence[int], block_tokens: int, deal: tuple[int, int, int]) -> Array:
    """Return each token's slot in a request's blocks, -1 for one of another context rank.

    `test_the_byte_oracle_deals_tokens_out_as_the_hosts_kernel_does` compares it with vLLM's own.

    Args:
        tokens: Positions in the sequence.
        blocks: The request's list.
        block_tokens: Tokens per block and context rank.
        deal: Context ranks, the rank among them, and tokens per turn. Example: of 2 ranks with blocks of 4 and turns of 2, rank
            0 has of tokens 0 to 7 those of 0 1 4 5, at places 0 to 3 of its block.
    """
    dcp, rank, turn = deal
    number, inside = np.divmod(tokens, block_tokens * dcp)
    places = inside // (turn * dcp) * turn + inside % turn
    return np.where(inside // turn % dcp == rank, np.asarray(blocks, np.int64)[number] * block_tokens + places, -1)


class RankMemory:
    """The cache of a rank. `data` are its bytes, `base` is their address; it has room for the layers of all pipeline stages."""

    def __init__(self, model: Model, side: Side, rank: int, blocks: int, stage: int = 0) -> None:
        self.model, self.side, self.rank, self.blocks = model, side, rank, blocks
        names = [name for layers in layer_names(model) for name in layers]
        self._held = {name for name in names if int(name[len("layers.") :]) * side.pp // len(names) == stage}
        self.heads = share(model.heads, side.tp, rank)
        self.caches: list[LayerCache] = []
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        total = self._allocate()
        self.data = np.full(total, NAN, np.uint8)
        self.base = int(self.data.ctypes.data)
        self.caches = [replace(cache, address=self.base + cache.address) for cache in self.caches]

    # ------------------------------------------------------------------------------------------------- allocation

    def _allocate(self) -> int:
        model, side = self.model, self.side
        own = [self._page_bytes(number) for number in range(len(model.groups))]
        names = layer_names(model)
        at = 64
        if side.is_shared:  # layer k of every group lies in slot k, as vLLM's hybrid allocator does it
            page = -(-max(own) // 8) * 8 if len(own) > 1 else own[0]
            slots = max(group.layers for group in model.groups)
            for number, group in enumerate(model.groups):
                for layer in range(group.layers):
                    self._add(number, layer, names[number][layer], at, page, own[number], slots)
            return at + slots * self.blocks * page + 64
        for number, group in enumerate(model.groups):
            for layer in range(group.layers):
                self._add(number, layer, names[number][layer], at, own[number], own[number], group.layers)
            at += group.layers * self.blocks * own[number] + 32
        return at + 64

    def _page_bytes(self, number: int) -> int:
        model, group, tokens = self.model, self.model.groups[number], self.side.block_tokens[number]
        if group.kind == "state":
            return sum(math.prod(shape) * size for shape, size in zip(*self._state_shapes(group), strict=True))
        if group.kind == "latent":
            return tokens * model.head_size * _LATENT * model.element_bytes
        return tokens * (self.heads[1] - self.heads[0]) * 2 * model.head_size * model.element_bytes

    def _add(self, number: int, layer: int, name: str, start: int, page: int, own: int, slots: int) -> None:
        """Place one layer: `start` is its pool, `page` the bytes that a block has in a slot, `own` those that it uses."""
        if name not in self._held:
            return
        model, side, group = self.model, self.side, self.model.groups[number]
        is_across = side.layout.startswith("B")
        stride = page * slots if is_across else page
        at = start + layer * (page if is_across else page * self.blocks)
        size, tokens = model.element_bytes, side.block_tokens[number] // side.split
        count, page_stride = self.blocks * side.split, stride // side.split
        kind: dict[str, Any]
        if group.kind == "state":
            shapes, sizes = self._state_shapes(group)
            size, shape, steps = 1, (self.blocks, 1, 1, own), (stride, own, own)
            kind = {"state_shapes": shapes, "state_element_bytes": sizes, "state_kind": group.state}
        elif group.kind == "latent":
            content = model.head_size * _LATENT
            shape, steps = (count, 1, tokens, content), (page_stride, tokens * content * size, content * size)
            kind = {"is_latent": True}
        else:
            heads, content = self.heads[1] - self.heads[0], 2 * model.head_size
            cell = content * size
            inner = side.layout[-3:-1] if side.layout not in {"BHLNC", "LHBNC"} else side.layout
            shape = (count, heads, tokens, content)
            steps = {
                "HN": (page_stride, tokens * cell, cell),
                "NH": (page_stride, cell, heads * cell),
                "LN": (stride, slots * tokens * cell, cell),
                "BHLNC": (stride, slots * tokens * cell, cell),
                "LHBNC": (tokens * cell, self.blocks * tokens * cell, cell),
            }[inner]
            if side.layout == "BHLNC":
                at = start + layer * tokens * cell
            kind = {"key_size": model.head_size, "value_size": model.head_size}
        cache = LayerCache(name, number, at, shape, (*steps, size), size, "DRAM", 0, page, **kind)
        self.caches.append(cache)
        self._places[number, layer] = (at, len(self.caches) - 1)

    def _state_shapes(self, group: Group) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        model, tp = self.model, self.side.tp
        heads, size = model.state_heads // tp, model.state_size
        groups = max(1, model.state_groups // tp)
        if group.state == "LINEAR":
            return ((heads, size, size),), (_SSM_BYTES,)
        ssm: tuple[int, ...]
        if group.state == "MAMBA1":
            channels, ssm = heads * 4, (heads * 4, size)
        else:
            channels, ssm = heads * (size + 1) + 2 * groups * size, (heads, size + 1, size)
        conv = (channels, model.rows) if self.side.conv_order == "DS" else (model.rows, channels)
        return (conv, ssm), (model.element_bytes, _SSM_BYTES)

    # ------------------------------------------------------------------------------------------------------ truth

    def view(self, data: Array, group: int, layer: int) -> Array:
        """Return a token layer in `data`, with the axes (kernel block, head, token, content)."""
        at, number = self._places[group, layer]
        cache = self.caches[number]
        return np.ndarray(cache.shape, f"u{cache.element_bytes}", data.data, at, cache.stride_bytes)

    def write(
        self, data: Array, content: Content, group: int, blocks: Sequence[int], tokens: Array, ones: bool = False
    ) -> None:
        """Write what this rank holds of `tokens` into a request's blocks; `ones` sets all bits instead."""
        kind = self.model.groups[group]
        if kind.kind == "state":
            for layer in self._layers(group):
                page = self.state_page(content, group, layer)
                at, number = self._places[group, layer]
                start = at + blocks[0] * self.caches[number].stride_bytes[0]
                data[start : start + len(page)] = 255 if ones else page
            return
        size, dcp = self.side.block_tokens[group], self.side.dcp
        slots = slot_mapping(tokens, blocks, size, (dcp, self.rank % dcp, self.side.turn_tokens))
        tokens, slots = tokens[slots >= 0], slots[slots >= 0]
        page_tokens = size // self.side.split
        pages, inside = slots // page_tokens, slots % page_tokens
        for layer in self._layers(group):
            view = self.view(data, group, layer)
            if ones:
                view[pages, :, inside] = np.iinfo(view.dtype).max
            else:
                view[pages, :, inside] = self._cells(content, group, layer)[tokens]

    def _layers(self, group: int) -> list[int]:
        """Return the numbers of a group's layers that this rank holds."""
        return [layer for number, layer in self._places if number == group]

    def _cells(self, content: Content, group: int, layer: int) -> Array:
        model = self.model
        if model.groups[group].kind == "latent":
            shape: tuple[int, ...] = (content.tokens, 1, model.head_size * _LATENT)
            return _bytes(content.tensor(group, layer, "cell", shape), model.element_bytes)
        ids = content.tensor(group, layer, "cell", (content.tokens, model.heads, 2 * model.head_size))
        return _bytes(ids[:, self.heads[0] : self.heads[1]], model.element_bytes)

    def state_page(self, content: Content, group: int, layer: int) -> Array:
        """Return the bytes of this rank's state: the convolution's inputs, projection by projection, then the recurrent state."""
        model, side, kind = self.model, self.side, self.model.groups[group].state
        size = model.state_size
        heads = share(model.state_heads, side.tp, self.rank)
        groups = share(model.state_groups, side.tp, self.rank)

        def part(name: str, total: int, held: tuple[int, int], *inner: int) -> Array:
            return content.tensor(group, layer, name, (total, *inner))[held[0] : held[1]]

        def rows(name: str, total: int, held: tuple[int, int], width: int) -> Array:
            return part(name, total, held, width, model.rows).reshape(-1, model.rows)

        if kind == "LINEAR":
            return _bytes(part("ssm", model.state_heads, heads, size, size), _SSM_BYTES).reshape(-1).view(np.uint8)
        if kind == "MAMBA1":
            conv = rows("x", model.state_heads, heads, 4)
            ssm = part("ssm", model.state_heads, heads, 4, size)
        else:
            x = rows("x", model.state_heads, heads, size + 1)
            b, c = (rows(name, model.state_groups, groups, size) for name in "bc")
            conv = np.concatenate([x, b, c] if kind == "MAMBA2" else [b, c, x])
            ssm = part("ssm", model.state_heads, heads, size + 1, size)
        ordered = conv if side.conv_order == "DS" else conv.T
        parts = [_bytes(np.ascontiguousarray(ordered), model.element_bytes), _bytes(ssm, _SSM_BYTES)]
        return np.concatenate([np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in parts])


def make_facts(
    model: Model, side: Side, rank: int, blocks: int, name: str, port: int, generation: int, stage: int = 0
) -> EngineFacts:
    """Return what the host's seam says of an engine and a rank."""
    names = layer_names(model)
    kinds: dict[str, Any] = {
        "full": "attention",
        "chunked": "attention",
        "window": "sliding-window",
        "latent": "latent",
        "state": "state",
    }
    groups = tuple(
        CacheGroup(
            kinds[group.kind],
            side.block_tokens[number],
            group.reach if group.kind == "window" else 0,
            side.scratch[number],
            tuple(names[number]),
            chunk_tokens=group.reach if group.kind == "chunked" else 0,
        )
        for number, group in enumerate(model.groups)
    )
    return facts(
        name, port=port, tp=side.tp, tp_rank=rank, dcp=side.dcp, total_kv_heads=model.heads, head_size=model.head_size,
        block_count=blocks, generation=generation, layout=side.layout, groups=groups, interleave_tokens=side.turn_tokens,
        pp=side.pp, pp_rank=stage,
        state_groups=model.state_groups if any(group.state == "MAMBA2" for group in model.groups) else 0,
    )  # fmt: skip
