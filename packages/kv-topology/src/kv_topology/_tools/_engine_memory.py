"""The memory of one rank of an invented engine: its regions, at addresses that count up from a base.

With state layers the n-th layer of each group shares memory, the way hybrid engines hand pages to either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kv_topology._model import Layout, Member, Region
from kv_topology._tools._engine_values import STATE_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._tools._engine_values import EngineSpec, LayerKind, ModelSpec

    LayersByKind = Mapping[LayerKind, Sequence[int]]
    LayoutsByKind = Mapping[LayerKind, Sequence[Layout]]

__all__ = ["build_regions"]


def build_regions(
    model: ModelSpec, engine: EngineSpec, stage: Sequence[int], layouts: LayoutsByKind
) -> tuple[Region, ...]:
    """Return the regions of a rank whose stage has these layers.

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
        return tuple(_cross_regions(model, engine, layers, layouts))
    if any(kind in STATE_KINDS for kind in model.group_kinds):
        return tuple(_hybrid_regions(engine, layers, layouts))
    return tuple(_regions_by_layer(engine, layers, layouts))


def _regions_by_layer(engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> list[Region]:
    """Return regions of one layer each, group after group."""
    address = engine.base_address
    regions: list[Region] = []
    for group, (kind, numbers) in enumerate(layers.items()):
        for layer in numbers:
            placed, address = _layer_regions(engine, layer, layouts[kind], group, address)
            regions += placed
    return regions


def _cross_regions(model: ModelSpec, engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> list[Region]:
    """Return one region per group that has layers on this stage."""
    address = engine.base_address
    regions: list[Region] = []
    for group, (kind, numbers) in enumerate(layers.items()):
        region = _cross_region(model, engine, numbers, layouts[kind], group, address)
        if region is not None:
            regions.append(region)
            address += region.page_stride_bytes * region.page_count
    return regions


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


def _hybrid_regions(engine: EngineSpec, layers: LayersByKind, layouts: LayoutsByKind) -> list[Region]:
    """Return regions in which the n-th layers of all groups share memory, pages padded to the largest."""
    per_block = engine.block_tokens // engine.page_tokens
    sizes = {
        kind: sum(layout.extent_bytes for layout in parts) * (1 if kind in STATE_KINDS else per_block)
        for kind, parts in layouts.items()
    }
    block_bytes = -(-max(sizes.values()) // per_block) * per_block
    address = engine.base_address
    regions: list[Region] = []
    for slot in range(max(len(numbers) for numbers in layers.values())):
        for group, (kind, numbers) in enumerate(layers.items()):
            if slot >= len(numbers):
                continue
            pages_per_block = 1 if kind in STATE_KINDS else per_block
            stride = block_bytes // pages_per_block
            offset = 0
            for layout in layouts[kind]:
                size = layout.extent_bytes
                member = (Member(f"layers.{numbers[slot]}", layout, group),)
                regions.append(Region(address + offset, size, stride, engine.block_count * pages_per_block, member))
                offset += size
        address += block_bytes * engine.block_count
    return regions
