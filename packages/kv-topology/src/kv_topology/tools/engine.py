"""Engines from a few numbers: every rank's geometry, for dry runs, proofs and benchmarks.

The memory map is invented, at addresses that count up from a base, but shapes, strides, shards and groups are those that an
engine of that kind registers. Layers of one kind form one group. With state layers the n-th layer of each group shares
memory, the way hybrid engines hand pages to either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple, final

from kv_topology.arithmetic import TokenDeal, even_interval
from kv_topology.errors import InvalidGeometry
from kv_topology.geometry import RankGeometry
from kv_topology.model import TOKEN_AXIS, Axis, FieldLayout, Group, Layout, Member, Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kv_topology.model import GroupKind

    Memory = Iterator[tuple[int, list["_View"]]]
    LayersByKind = Mapping["LayerKind", Sequence[int]]
    LayoutsByKind = Mapping["LayerKind", Sequence[Layout]]

__all__ = ["KV_LAYOUTS", "EngineSpec", "LayerKind", "ModelSpec", "StateSpec", "build_engine"]

LayerKind = Literal["attention", "sliding", "latent", "mamba2", "mamba1", "gated-delta"]
STATE_KINDS = ("mamba2", "mamba1", "gated-delta")


class KvLayout(NamedTuple):
    """A layout of attention caches.

    Attributes:
        text: Description for a person.
        keys: Memory order of the keys' axes, outermost first; `kv` steps from the keys to the values.
        values: The same of the values; empty for the same order.
        alias: vLLM's name for it.
    """

    text: str
    keys: str
    values: str = ""
    alias: str = ""


_HND, _NHD = "head token kv channel", "token head kv channel"
KV_LAYOUTS = {
    "packed-HND": KvLayout("a region per layer; cells hold a head's key, then its value", _HND, alias="LBHNC"),
    "packed-NHD": KvLayout("the same with tokens outermost", _NHD, alias="LBNHC"),
    "halves-HND": KvLayout("a region per layer; a page holds its keys, then its values", "kv head token channel"),
    "halves-NHD": KvLayout("the same with tokens outermost", "kv token head channel"),
    "split-HND": KvLayout("two regions per layer: keys and values", "head token channel"),
    "split-NHD": KvLayout("the same with tokens outermost", "token head channel"),
    "cross-HND": KvLayout("one region; a page holds all layers", _HND, alias="BLHNC"),
    "cross-NHD": KvLayout("the same with tokens outermost", _NHD, alias="BLNHC"),
    "heads-outer": KvLayout("a region per layer and head", _HND, alias="LHBNC"),
    "cross-heads": KvLayout("one region; a page holds, head by head, all layers", _HND, alias="BHLNC"),
    "keys-by-channel": KvLayout(
        "per head the keys channel by channel, then the values (vLLM's CPU attention, vec and vec16)",
        "head kv channel token",
        "head kv token channel",
    ),
    "cpu": KvLayout(
        "vLLM's CPU attention, amx: per head keys, then values, in the kernel's own order", "head kv interior"
    ),
}
"""Layouts of attention caches by name."""


@final
@dataclass(frozen=True, slots=True)
class StateSpec:
    """Sizes of a recurrent layer; sizes that a kind does not use stay 0.

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
    def pages_per_block(self) -> int:
        """Pages of a scheduler block."""
        return self.block_tokens // self.page_tokens

    @property
    def layout_name(self) -> str:
        """The layout's name in `KV_LAYOUTS`."""
        aliases = {layout.alias: name for name, layout in KV_LAYOUTS.items() if layout.alias}
        name = aliases.get(self.layout, self.layout)
        if name not in KV_LAYOUTS:
            known = ", ".join((*KV_LAYOUTS, *aliases))
            raise InvalidGeometry("bad-page-order", f"Layout {self.layout!r} is not known; known: {known}.")
        return name


def _dense(axes: Sequence[Axis], order: str, element_bytes: int) -> tuple[tuple[Axis, ...], int]:
    """Return the axes with the strides of dense memory, and the bytes from keys to values (0 if `kv` is not in the order).

    Example: 2 heads, 4 tokens, 8 channels of 2 bytes in the order "head token kv channel": a channel steps 2 bytes, values
    lie 16 behind keys, a token steps 32 and a head 128.
    """
    counts = {"kv": 2, **{axis.name: axis.count for axis in axes}}
    strides: dict[str, int] = {}
    step = element_bytes
    for name in reversed(order.split()):
        strides[name] = step
        step *= counts[name]
    return tuple(replace(axis, stride_bytes=strides[axis.name]) for axis in axes), strides.get("kv", 0)


def _whole(name: str, size: int) -> Axis:
    return Axis(name, size, 0, size, 1)


def attention_layouts(
    name: str,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    element_bytes: int = 2,
    tp_size: int = 1,
    tp_rank: int = 0,
) -> tuple[Layout, ...]:
    """Return the layouts of one attention layer's regions on one rank, one per region; `name` is of `KV_LAYOUTS`."""
    kind = KV_LAYOUTS[name]

    def both(start: int, stop: int) -> Layout:
        """Return the layout of keys and values for an interval of heads."""
        heads = Axis("head", kv_heads, start, stop, 1, "tp")
        axes, packing = [_whole(TOKEN_AXIS, page_tokens), heads, _whole("channel", head_dim)], ""
        if name == "cpu":  # the kernel interleaves tokens and channels, so only heads can be separated
            axes, packing = [heads, _whole("interior", page_tokens * head_dim)], f"vllm-cpu:amx:{page_tokens}"
        fields: list[FieldLayout] = []
        for place, order in enumerate((kind.keys, kind.values or kind.keys)):
            placed, to_values = _dense(axes, order, element_bytes)
            fields.append(FieldLayout(("key", "value")[place], element_bytes, place * to_values, placed, packing))
        return Layout(tuple(fields))

    start, stop = even_interval(kv_heads, tp_size, tp_rank)
    if name == "heads-outer":
        return tuple(both(head, head + 1) for head in range(start, stop))
    whole = both(start, stop)
    return tuple(Layout((field,)) for field in whole.fields) if name.startswith("split") else (whole,)


def latent_layout(latent_dim: int, page_tokens: int, element_bytes: int = 2, field: str = "latent") -> Layout:
    """Return a page of latent attention (MLA), or of its indexer: one vector per token that every rank holds."""
    axes, _ = _dense((_whole(TOKEN_AXIS, page_tokens), _whole("channel", latent_dim)), "token channel", element_bytes)
    return Layout((FieldLayout(field, element_bytes, 0, axes),))


def state_layout(kind: LayerKind, spec: StateSpec, tp_size: int, tp_rank: int, conv_order: str = "DS") -> Layout:
    """Return a state page: the convolution's last inputs, one field per projection, then the recurrent state.

    In the order "DS" (channel before row) each projection is contiguous; "SD" only changes strides. Projections that
    belong to groups are shared when there are more ranks than groups, like KV heads.

    Raises:
        InvalidGeometry: `state-misaligned`.
    """
    groups, heads = (spec.groups, spec.state_dim), (spec.heads, spec.head_dim)
    projections, inner = {
        "mamba1": ({"conv_x": (spec.heads, 1)}, {"state": spec.state_dim}),
        "mamba2": (
            {"conv_x": heads, "conv_b": groups, "conv_c": groups},
            {"channel": spec.head_dim, "state": spec.state_dim},
        ),
        "gated-delta": (
            {"conv_q": groups, "conv_k": groups, "conv_v": heads},
            {"value": spec.head_dim, "key": spec.state_dim},
        ),
    }[kind]
    element, rows = spec.conv_element_bytes, spec.conv_rows
    held = {name: even_interval(parts, tp_size, tp_rank) for name, (parts, _) in projections.items()}
    width = sum((stop - start) * projections[name][1] for name, (start, stop) in held.items())
    channel_stride, row_stride = (rows * element, element) if conv_order == "DS" else (element, width * element)
    fields: list[FieldLayout] = []
    done = 0
    for name, (parts, channels) in projections.items():
        start, stop = held[name]
        axes = (
            Axis("group", parts, start, stop, channels * channel_stride, "tp"),
            Axis("channel", channels, 0, channels, channel_stride),
            Axis("row", rows, 0, rows, row_stride),
        )
        fields.append(FieldLayout(name, element, done * channel_stride, axes))
        done += (stop - start) * channels
    offset = width * rows * element
    if offset % spec.state_element_bytes:
        raise InvalidGeometry(
            "state-misaligned",
            f"The convolution's state takes {offset} bytes, which does not align the recurrent state's "
            f"{spec.state_element_bytes}-byte elements.",
            {"conv_bytes": offset, "element_bytes": spec.state_element_bytes},
        )
    share = Axis("head", spec.heads, *even_interval(spec.heads, tp_size, tp_rank), 1, "tp")
    whole = [_whole(name, size) for name, size in inner.items()]
    state, _ = _dense((share, *whole), " ".join(("head", *inner)), spec.state_element_bytes)
    return Layout((*fields, FieldLayout("ssm", spec.state_element_bytes, offset, state)))


def layer_layouts(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> tuple[Layout, ...]:
    """Return the layouts of one layer's regions on one rank, one per region."""
    if kind in STATE_KINDS:
        if model.state is None:
            raise InvalidGeometry("state-sizes-missing", f"The model has {kind} layers but no state sizes.")
        return (state_layout(kind, model.state, engine.tp, tp_rank, engine.conv_order),)
    if kind == "latent":
        latent = latent_layout(model.latent_dim, engine.page_tokens, model.element_bytes)
        index = [latent_layout(model.index_dim, engine.page_tokens, 1, "index")] if model.index_dim else []
        return (latent, *index)
    return attention_layouts(
        engine.layout_name, model.kv_heads, model.head_dim, engine.page_tokens, model.element_bytes, engine.tp, tp_rank
    )


class _View(NamedTuple):
    """Pages of a group in memory that others may share: first byte of page 0, bytes of a page, pages of a block, members."""

    offset: int
    page_bytes: int
    per_block: int
    members: tuple[Member, ...]


def _regions(model: ModelSpec, engine: EngineSpec, stage: Sequence[int], layouts: LayoutsByKind) -> list[Region]:
    """Return the regions of a rank.

    Args:
        model: The model.
        engine: The engine.
        stage: Numbers of the layers on this rank.
        layouts: Layouts of one layer of each kind, one per region.
    """
    layers: LayersByKind = {
        kind: [number for number in stage if model.kinds[number] == kind] for kind in model.group_kinds
    }
    if engine.layout_name.startswith("cross"):
        memory = _cross_memory(model, engine, layers, layouts)
    elif any(kind in STATE_KINDS for kind in layers):
        memory = _hybrid_memory(engine, layers, layouts)
    else:
        memory = _layer_memory(engine, layers, layouts)
    address = engine.base_address
    regions: list[Region] = []
    for block_bytes, views in memory:
        for offset, page_bytes, per_block, members in views:
            count = engine.block_count * per_block
            regions.append(Region(address + offset, page_bytes, block_bytes // per_block, count, members))
        address += block_bytes * engine.block_count
    return regions


def _layer_memory(engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> Memory:
    """Yield (bytes of a block, views) of memory of one layer each, group after group."""
    per_block = engine.pages_per_block
    for group, (kind, numbers) in enumerate(layers.items()):
        for layer, layout in product(numbers, layouts[kind]):
            size, member = layout.extent_bytes, Member(f"layers.{layer}", layout, group)
            yield size * per_block, [_View(0, size, per_block, (member,))]


def _cross_memory(model: ModelSpec, engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> Memory:
    """Yield the memory of each group that has layers on this stage; its pages hold all of them."""
    for group, (kind, numbers) in enumerate(layers.items()):
        if not numbers:
            continue
        parts, step = layouts[kind], sum(layout.extent_bytes for layout in layouts[kind])
        page_bytes = step * len(numbers)
        if engine.layout_name == "cross-heads" and kind in {"attention", "sliding"}:
            step = 2 * engine.page_tokens * model.head_dim * model.element_bytes  # a head of one layer
            parts = tuple(_stretched(layout, step * len(numbers)) for layout in parts)
        members: list[Member] = []
        for place, layer in enumerate(numbers):
            offset = place * step
            for layout in parts:
                members.append(Member(f"layers.{layer}", layout, group, offset))
                offset += layout.extent_bytes
        per_block = 1 if kind in STATE_KINDS else engine.pages_per_block
        yield page_bytes * per_block, [_View(0, page_bytes, per_block, tuple(members))]


def _hybrid_memory(engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> Memory:
    """Yield memory that the n-th layers of all groups share, pages padded to the largest."""
    per_block = {kind: 1 if kind in STATE_KINDS else engine.pages_per_block for kind in layouts}
    largest = max(sum(each.extent_bytes for each in parts) * per_block[kind] for kind, parts in layouts.items())
    block_bytes = -(-largest // engine.pages_per_block) * engine.pages_per_block
    for slot in range(max(map(len, layers.values()))):
        views: list[_View] = []
        for group, (kind, numbers) in enumerate(layers.items()):
            offset = 0
            for layout in layouts[kind] if slot < len(numbers) else ():
                member = Member(f"layers.{numbers[slot]}", layout, group)
                views.append(_View(offset, layout.extent_bytes, per_block[kind], (member,)))
                offset += layout.extent_bytes
        yield block_bytes, views


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


def _group(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> Group:
    if kind in STATE_KINDS:
        return Group("state", 0)
    deal = TokenDeal()
    if engine.dcp > 1:
        deal = TokenDeal(engine.dcp, tp_rank % engine.dcp, engine.interleave_tokens or engine.block_tokens)
    names: dict[str, GroupKind] = {"attention": "attention", "sliding": "sliding-window", "latent": "latent"}
    window = model.window_tokens if kind == "sliding" else 0
    return Group(names[kind], engine.block_tokens, engine.pages_per_block, window, deal)


def build_engine(model: ModelSpec, engine: EngineSpec) -> Mapping[tuple[int, int], RankGeometry]:
    """Return the geometry of every rank of an engine by (pp, tp).

    Raises:
        InvalidGeometry: The numbers do not make sense together.
    """
    if engine.dcp > 1 and engine.tp % engine.dcp:
        message = f"Context parallelism of {engine.dcp} does not divide {engine.tp} tensor-parallel ranks."
        raise InvalidGeometry("dcp-not-divisor", message)
    layers, pp = len(model.kinds), engine.pp
    if pp > layers:
        message = f"{pp} pipeline stages for {layers} layers leave a stage without any."
        raise InvalidGeometry("stage-without-layers", message)
    # As vLLM does: what does not divide evenly goes to the stages before the last. 6 layers on 4 stages are 0, 1..2, 3..4 and 5.
    counts = [layers // pp + (pp - layers % pp <= stage + 1 < pp) for stage in range(pp)]
    stages = [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(pp)]
    ranks: dict[tuple[int, int], RankGeometry] = {}
    for pp_rank, stage in enumerate(stages):
        for tp_rank in range(engine.tp):
            layouts: dict[LayerKind, Sequence[Layout]] = {
                kind: layer_layouts(model, engine, kind, tp_rank) for kind in model.group_kinds
            }
            ranks[pp_rank, tp_rank] = RankGeometry(
                tp_size=engine.tp,
                tp_rank=tp_rank,
                groups=tuple(_group(model, engine, kind, tp_rank) for kind in model.group_kinds),
                regions=tuple(_regions(model, engine, stage, layouts)),
                pp_size=engine.pp,
                pp_rank=pp_rank,
            )
    if pp > 1:
        entries = tuple(ranks[stage, 0].own_layers for stage in range(pp))
        ranks = {rank: replace(made, stage_layers=entries) for rank, made in ranks.items()}
    return ranks
