"""Engines from a few numbers: every rank's geometry, for dry runs and proofs.

The memory map is invented (addresses count up from a base), but shapes, strides, shards and groups are those that an
engine of that kind registers. Layers of one kind form one group. With state layers, the n-th layer of each group shares
memory, the way hybrid engines hand pages to either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from kv_topology._attention_layouts import (
    AttentionShape,
    cpu_layout,
    halves_layout,
    indexer_layout,
    keys_by_channel_layout,
    mla_layout,
    packed_layout,
    split_layouts,
)
from kv_topology._errors import InvalidGeometry
from kv_topology._model import Group, Layout, Member, RankGeometry, Region, StageLayer
from kv_topology._shards import TokenDeal
from kv_topology._state_layouts import StateShape, gated_delta_layout, mamba1_layout, mamba2_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._attention_layouts import PageOrder

__all__ = ["KV_LAYOUTS", "EngineSpec", "LayerKind", "ModelSpec", "StateSpec", "build_engine", "engine_layouts"]

LayerKind = Literal["attention", "sliding", "latent", "mamba2", "mamba1", "gated-delta"]
STATE_KINDS = ("mamba2", "mamba1", "gated-delta")

KV_LAYOUTS = {
    "packed-HND": "a region per layer; cells hold a head's key, then its value (vLLM: LBHNC)",
    "packed-NHD": "the same with tokens outermost (vLLM: LBNHC)",
    "halves-HND": "a region per layer; a page holds its keys, then its values",
    "halves-NHD": "the same with tokens outermost",
    "split-HND": "two regions per layer: keys and values",
    "split-NHD": "the same with tokens outermost",
    "cross-HND": "one region; a page holds all layers (vLLM: BLHNC)",
    "cross-NHD": "the same with tokens outermost (vLLM: BLNHC)",
    "heads-outer": "a region per layer and head (vLLM: LHBNC)",
    "cross-heads": "one region; a page holds, head by head, all layers (vLLM: BHLNC)",
    "keys-by-channel": "per head the keys channel by channel, then the values (vLLM's CPU attention, vec and vec16)",
    "cpu": "vLLM's CPU attention, amx: per head keys, then values, in the kernel's own order",
}
"""Layouts of attention caches by name, with what they are."""

_ALIASES = {
    "LBHNC": "packed-HND",
    "LBNHC": "packed-NHD",
    "BLHNC": "cross-HND",
    "BLNHC": "cross-NHD",
    "LHBNC": "heads-outer",
    "BHLNC": "cross-heads",
}


@final
@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of a recurrent layer; what a kind does not use stays 0.

    Attributes:
        heads: State heads (Mamba-2), channels (Mamba-1) or value heads (gated delta net).
        head_dim: Channels of a head, or the value dimension.
        state_dim: State elements per channel, or the key dimension.
        groups: Groups of B and C, or key heads.
        conv_rows: Inputs that the convolution remembers.
        conv_element_bytes: Bytes of an element of the convolution's state.
        state_element_bytes: Bytes of an element of the recurrent state.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    conv_rows: int = 3
    conv_element_bytes: int = 2
    state_element_bytes: int = 4


@final
@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers of a model that decide its KV cache.

    Attributes:
        kinds: Kind of each layer.
        kv_heads: KV heads.
        head_dim: Elements of a key of one head.
        element_bytes: Bytes of a cached element.
        window_tokens: Window of the `sliding` layers.
        latent_dim: Elements per token of the `latent` layers.
        index_dim: Elements per token of their indexer, 0 for none.
        state: Sizes of the recurrent layers.
    """

    kinds: tuple[LayerKind, ...]
    kv_heads: int = 1
    head_dim: int = 1
    element_bytes: int = 2
    window_tokens: int = 0
    latent_dim: int = 0
    index_dim: int = 0
    state: StateSpec | None = None

    @property
    def group_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds in order of first appearance: one KV-cache group each."""
        return tuple(dict.fromkeys(self.kinds))


@final
@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How one engine shards and lays out the cache.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        dcp: Context-parallel size of attention groups.
        block_tokens: Tokens of a scheduler block on one rank.
        kernel_block_tokens: Tokens of a page; 0 for one page per block.
        layout: A name of `KV_LAYOUTS`, or vLLM's name for it.
        block_count: Scheduler blocks per group.
        interleave_tokens: Tokens per turn under context parallelism; 0 for a block.
        conv_order: Order of convolution states.
        base_address: Address of the first region.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    block_tokens: int = 16
    kernel_block_tokens: int = 0
    layout: str = "packed-HND"
    block_count: int = 64
    interleave_tokens: int = 0
    conv_order: Literal["DS", "SD"] = "DS"
    base_address: int = 1 << 32

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.kernel_block_tokens or self.block_tokens

    @property
    def layout_name(self) -> str:
        """The layout's name in `KV_LAYOUTS`."""
        name = _ALIASES.get(self.layout, self.layout)
        if name not in KV_LAYOUTS:
            known = ", ".join((*KV_LAYOUTS, *_ALIASES))
            raise InvalidGeometry(f"Layout {self.layout!r} is not known; known: {known}.", code="bad-page-order")
        return name


def engine_layouts(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> tuple[Layout, ...]:
    """Return the layouts of one layer's regions on one rank, one per region."""
    if kind in STATE_KINDS:
        return (_state_layout(model, engine, kind, tp_rank),)
    if kind == "latent":
        latent = mla_layout(model.latent_dim, engine.page_tokens, model.element_bytes)
        return (latent, indexer_layout(model.index_dim, engine.page_tokens)) if model.index_dim else (latent,)
    shape = AttentionShape(model.kv_heads, model.head_dim, engine.page_tokens, model.element_bytes, engine.tp, tp_rank)
    family, _, order = engine.layout_name.partition("-")
    return _attention_layouts(shape, family, "NHD" if order == "NHD" else "HND")


def _attention_layouts(shape: AttentionShape, family: str, order: PageOrder) -> tuple[Layout, ...]:
    if family == "halves":
        return (halves_layout(shape, order),)
    if family == "split":
        return split_layouts(shape, order)
    if family == "cpu":
        return (cpu_layout(shape, "amx"),)
    if family == "keys":
        return (keys_by_channel_layout(shape),)
    if family == "heads":
        return _head_parts(shape)
    return (packed_layout(shape, order),)


def _head_parts(shape: AttentionShape) -> tuple[Layout, ...]:
    """Return one layout per held head: the head's pages, tokens outermost."""
    whole = packed_layout(shape)
    parts: list[Layout] = []
    for head in range(*shape.interval):
        fields = tuple(
            replace(
                field,
                axes=tuple(
                    replace(axis, start=head, stop=head + 1) if axis.split == "tp" else axis for axis in field.axes
                ),
            )
            for field in whole.fields
        )
        parts.append(Layout(fields))
    return tuple(parts)


def _state_layout(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> Layout:
    spec = model.state
    if spec is None:
        raise InvalidGeometry(f"The model has {kind} layers but no state sizes.", code="state-sizes-missing")
    shape = StateShape(
        spec.conv_rows, spec.conv_element_bytes, spec.state_element_bytes, engine.tp, tp_rank, engine.conv_order
    )
    if kind == "mamba1":
        return mamba1_layout(shape, channels=spec.heads, state_dim=spec.state_dim)
    if kind == "mamba2":
        return mamba2_layout(
            shape, heads=spec.heads, head_dim=spec.head_dim, groups=spec.groups, state_dim=spec.state_dim
        )
    return gated_delta_layout(
        shape, key_heads=spec.groups, key_dim=spec.state_dim, value_heads=spec.heads, value_dim=spec.head_dim
    )


def _group(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> Group:
    if kind in STATE_KINDS:
        return Group("state", 0)
    deal = TokenDeal()
    if engine.dcp > 1:
        deal = TokenDeal(engine.dcp, tp_rank % engine.dcp, engine.interleave_tokens or engine.block_tokens)
    names: dict[str, Literal["attention", "sliding-window", "latent"]] = {
        "attention": "attention",
        "sliding": "sliding-window",
        "latent": "latent",
    }
    window = model.window_tokens if kind == "sliding" else 0
    return Group(names[kind], engine.block_tokens, engine.block_tokens // engine.page_tokens, window, deal)


def build_engine(model: ModelSpec, engine: EngineSpec) -> Mapping[tuple[int, int], RankGeometry]:
    """Return the geometry of every rank of an engine by (pp, tp).

    Raises:
        InvalidGeometry: The numbers do not make sense together.
    """
    if engine.dcp > 1 and engine.tp % engine.dcp:
        raise InvalidGeometry(
            f"Context parallelism of {engine.dcp} does not divide {engine.tp} tensor-parallel ranks.",
            code="dcp-not-divisor",
        )
    count = len(model.kinds)
    if engine.pp > count:
        raise InvalidGeometry(
            f"{engine.pp} pipeline stages for {count} layers leave a stage without any.", code="stage-without-layers"
        )
    stages = tuple(
        tuple(range(stage * count // engine.pp, (stage + 1) * count // engine.pp)) for stage in range(engine.pp)
    )
    entries = tuple(tuple(_stage_layer(model, engine, number) for number in stage) for stage in stages)
    ranks: dict[tuple[int, int], RankGeometry] = {}
    for pp_rank, stage in enumerate(stages):
        for tp_rank in range(engine.tp):
            ranks[pp_rank, tp_rank] = RankGeometry(
                tp_size=engine.tp,
                tp_rank=tp_rank,
                groups=tuple(_group(model, engine, kind, tp_rank) for kind in model.group_kinds),
                regions=tuple(_regions(model, engine, stage, tp_rank)),
                pp_size=engine.pp,
                pp_rank=pp_rank,
                stage_layers=entries if engine.pp > 1 else (),
            )
    return ranks


def _stage_layer(model: ModelSpec, engine: EngineSpec, number: int) -> StageLayer:
    kind = model.kinds[number]
    fields = [field.name for layout in engine_layouts(model, engine, kind, 0) for field in layout.fields]
    return StageLayer(f"layers.{number}", model.group_kinds.index(kind), tuple(dict.fromkeys(fields)))


def _regions(model: ModelSpec, engine: EngineSpec, stage: Sequence[int], tp_rank: int) -> list[Region]:
    kinds = model.group_kinds
    by_group: dict[LayerKind, Sequence[int]] = {
        kind: [number for number in stage if model.kinds[number] == kind] for kind in kinds
    }
    layouts: dict[LayerKind, Sequence[Layout]] = {kind: engine_layouts(model, engine, kind, tp_rank) for kind in kinds}
    address = engine.base_address
    regions: list[Region] = []
    if engine.layout_name.startswith("cross"):
        for number, kind in enumerate(kinds):
            region = _cross_region(model, engine, by_group[kind], layouts[kind], number, address)
            if region is not None:
                regions.append(region)
                address += region.page_stride_bytes * region.page_count
        return regions
    has_states = any(kind in STATE_KINDS for kind in kinds)
    if not has_states:
        for number, kind in enumerate(kinds):
            for layer in by_group[kind]:
                placed, address = _layer_regions(engine, layer, layouts[kind], number, address)
                regions += placed
        return regions
    return _hybrid_regions(engine, by_group, layouts, address)


def _layer_regions(
    engine: EngineSpec, layer: int, layouts: Sequence[Layout], group: int, address: int
) -> tuple[list[Region], int]:
    pages = engine.block_count * (engine.block_tokens // engine.page_tokens)
    regions: list[Region] = []
    for layout in layouts:
        size = layout.extent_bytes
        regions.append(Region(address, size, size, pages, (Member(f"layers.{layer}", layout, group),)))
        address += size * pages
    return regions, address


def _cross_region(
    model: ModelSpec, engine: EngineSpec, layers: Sequence[int], layouts: Sequence[Layout], group: int, address: int
) -> Region | None:
    """Return the one region of a group whose pages hold all its layers, or None if the stage has none of them."""
    if not layers:
        return None
    step = sum(layout.extent_bytes for layout in layouts)
    pages = engine.block_count * (
        1 if model.group_kinds[group] in STATE_KINDS else engine.block_tokens // engine.page_tokens
    )
    members: list[Member] = []
    is_heads_outer = engine.layout_name == "cross-heads" and model.group_kinds[group] in {"attention", "sliding"}
    if is_heads_outer:
        head_bytes = 2 * engine.page_tokens * model.head_dim * model.element_bytes
        layouts = tuple(_stretched(layout, head_bytes * len(layers)) for layout in layouts)
        members = [
            Member(f"layers.{layer}", layouts[0], group, place * head_bytes) for place, layer in enumerate(layers)
        ]
    else:
        for place, layer in enumerate(layers):
            offset = place * step
            for layout in layouts:
                members.append(Member(f"layers.{layer}", layout, group, offset))
                offset += layout.extent_bytes
    return Region(address, step * len(layers), step * len(layers), pages, tuple(members))


def _stretched(layout: Layout, head_stride: int) -> Layout:
    """Return a layout whose heads lie `head_stride` bytes apart."""
    return Layout(
        tuple(
            replace(
                field,
                axes=tuple(replace(a, stride_bytes=head_stride) if a.name == "head" else a for a in field.axes),
            )
            for field in layout.fields
        )
    )


def _hybrid_regions(
    engine: EngineSpec,
    by_group: Mapping[LayerKind, Sequence[int]],
    layouts: Mapping[LayerKind, Sequence[Layout]],
    address: int,
) -> list[Region]:
    """Return regions in which the n-th layers of all groups share memory, pages padded to the largest."""
    per_block = engine.block_tokens // engine.page_tokens
    sizes = {
        kind: sum(layout.extent_bytes for layout in parts) * (1 if kind in STATE_KINDS else per_block)
        for kind, parts in layouts.items()
    }
    block_bytes = -(-max(sizes.values()) // per_block) * per_block
    regions: list[Region] = []
    for slot in range(max(len(layers) for layers in by_group.values())):
        for group, (kind, layers) in enumerate(by_group.items()):
            if slot >= len(layers):
                continue
            pages_per_block = 1 if kind in STATE_KINDS else per_block
            stride = block_bytes // pages_per_block
            offset = 0
            for layout in layouts[kind]:
                size = layout.extent_bytes
                member = (Member(f"layers.{layers[slot]}", layout, group),)
                regions.append(Region(address + offset, size, stride, engine.block_count * pages_per_block, member))
                offset += size
        address += block_bytes * engine.block_count
    return regions
