"""Geometry documents: the plain form in which a rank's geometry travels between engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports import MemoryKind

__all__ = [
    "AxisEntry",
    "FieldDocument",
    "GeometryDocument",
    "GroupDocument",
    "HeadOrder",
    "MemberEntry",
    "PeerSizes",
    "RegionDocument",
    "with_names",
]

HeadOrder = Literal["HN", "NH"]
"""Order of the axes in memory: heads outside tokens (HN) or inside (NH)."""


class PeerSizes(NamedTuple):
    """Parallel sizes of a peer engine, as its ticket states them."""

    tp: int
    pp: int
    dcp: int


class AxisEntry(NamedTuple):
    """An axis of a field; a list of six in the document."""

    name: str
    size: int
    start: int
    stop: int
    stride_bytes: int
    split: Literal["whole", "tp"] = "whole"


class FieldDocument(TypedDict):
    """A logical tensor in a page."""

    name: str
    element_bytes: int
    offset_bytes: int
    packing: str
    axes: list[AxisEntry]


class MemberEntry(NamedTuple):
    """Position of a layer in the pages of a region; a list of four in the document."""

    layer: str
    layout: int
    group: int
    offset_bytes: int


class RegionDocument(TypedDict):
    """Registered memory, divided into pages."""

    base_address: int
    page_bytes: int
    page_stride_bytes: int
    page_count: int
    memory_kind: MemoryKind
    device: int
    members: list[MemberEntry]


class GroupDocument(TypedDict):
    """A KV-cache group; `context` is (size, rank, tokens per turn)."""

    kind: str
    block_tokens: int
    pages_per_block: int
    window_tokens: int
    context: tuple[int, int, int]


class GeometryDocument(TypedDict):
    """A rank's geometry in wire form; `tp` and `pp` are (size, rank)."""

    schema: str
    version: int
    tp: tuple[int, int]
    pp: tuple[int, int]
    null_block: int | None
    stage_layers: list[list[str]]
    groups: list[GroupDocument]
    layouts: list[list[FieldDocument]]
    regions: list[RegionDocument]


def with_names(document: Mapping[str, object]) -> GeometryDocument:
    """Return a document whose axes and members are named; for documents that the planner made, not for a peer's."""
    layouts = cast("Sequence[Sequence[FieldDocument]]", document["layouts"])
    regions = cast("Sequence[RegionDocument]", document["regions"])
    named: dict[str, object] = {
        **document,
        "layouts": [
            [{**field, "axes": [AxisEntry(*axis) for axis in field["axes"]]} for field in layout] for layout in layouts
        ],
        "regions": [
            {**region, "members": [MemberEntry(*member) for member in region["members"]]} for region in regions
        ],
    }
    return cast("GeometryDocument", named)
