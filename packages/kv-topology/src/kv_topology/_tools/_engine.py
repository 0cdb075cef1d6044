"""Engines from a few numbers: every rank's geometry, for dry runs and proofs.

The memory map is invented (`_engine_memory.py`), but shapes, strides, shards and groups are those that an engine of that
kind registers. Layers of one kind form one group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kv_topology._attention_layouts import (
    AttentionShape,
    cpu_layout,
    halves_layout,
    keys_by_channel_layout,
    mla_layout,
    packed_layout,
    split_layouts,
)
from kv_topology._errors import InvalidGeometry
from kv_topology._model import Group, Layout, RankGeometry, StageLayer
from kv_topology._shards import TokenDeal
from kv_topology._state_layouts import StateShape, gated_delta_layout, mamba1_layout, mamba2_layout
from kv_topology._tools._engine_memory import build_regions
from kv_topology._tools._engine_values import STATE_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._attention_layouts import PageOrder
    from kv_topology._tools._engine_values import EngineSpec, LayerKind, ModelSpec

__all__ = ["build_engine", "engine_layouts"]


def engine_layouts(model: ModelSpec, engine: EngineSpec, kind: LayerKind, tp_rank: int) -> tuple[Layout, ...]:
    """Return the layouts of one layer's regions on one rank, one per region."""
    if kind in STATE_KINDS:
        return (_state_layout(model, engine, kind, tp_rank),)
    if kind == "latent":
        latent = mla_layout(model.latent_dim, engine.page_tokens, model.element_bytes)
        return (
            (latent, mla_layout(model.index_dim, engine.page_tokens, 1, field="index"))
            if model.index_dim
            else (latent,)
        )
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
    _check_sizes(model, engine)
    stages = [_stage(len(model.kinds), engine.pp, pp_rank) for pp_rank in range(engine.pp)]
    entries = tuple(tuple(_stage_layer(model, engine, number) for number in stage) for stage in stages)
    ranks: dict[tuple[int, int], RankGeometry] = {}
    for pp_rank, stage in enumerate(stages):
        for tp_rank in range(engine.tp):
            layouts: dict[LayerKind, Sequence[Layout]] = {
                kind: engine_layouts(model, engine, kind, tp_rank) for kind in model.group_kinds
            }
            ranks[pp_rank, tp_rank] = RankGeometry(
                tp_size=engine.tp,
                tp_rank=tp_rank,
                groups=tuple(_group(model, engine, kind, tp_rank) for kind in model.group_kinds),
                regions=build_regions(model, engine, stage, layouts),
                pp_size=engine.pp,
                pp_rank=pp_rank,
                stage_layers=entries if engine.pp > 1 else (),
            )
    return ranks


def _check_sizes(model: ModelSpec, engine: EngineSpec) -> None:
    if engine.dcp > 1 and engine.tp % engine.dcp:
        raise InvalidGeometry(
            f"Context parallelism of {engine.dcp} does not divide {engine.tp} tensor-parallel ranks.",
            code="dcp-not-divisor",
        )
    if engine.pp > len(model.kinds):
        raise InvalidGeometry(
            f"{engine.pp} pipeline stages for {len(model.kinds)} layers leave a stage without any.",
            code="stage-without-layers",
        )


def _stage(layers: int, pp_size: int, pp_rank: int) -> range:
    """Return the layers of a pipeline stage: 5 layers on 2 stages are 0..1 and 2..4."""
    return range(pp_rank * layers // pp_size, (pp_rank + 1) * layers // pp_size)


def _stage_layer(model: ModelSpec, engine: EngineSpec, number: int) -> StageLayer:
    kind = model.kinds[number]
    fields = [field.name for layout in engine_layouts(model, engine, kind, 0) for field in layout.fields]
    return StageLayer(f"layers.{number}", model.group_kinds.index(kind), tuple(dict.fromkeys(fields)))
