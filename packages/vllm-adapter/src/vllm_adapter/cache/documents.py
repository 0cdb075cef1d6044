"""Geometry documents: the plain form in which a rank's geometry travels between engines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

if TYPE_CHECKING:
    from vllm_adapter.ports import MemoryKind

__all__ = [
    "AxisEntry",
    "FieldDocument",
    "GeometryDocument",
    "GroupDocument",
    "HeadOrder",
    "MemberEntry",
    "RegionDocument",
    "StageEntry",
    "natural",
]

HeadOrder = Literal["HN", "NH"]
"""Order of the axes in memory: heads outside tokens (HN) or inside (NH)."""


AxisEntry = tuple[str, int, int, int, int, Literal["whole", "tp"]]
"""(name, size, start, stop, stride_bytes, split) of an axis of a field."""
MemberEntry = tuple[str, int, int, int]
"""(layer, number of its layout, group, offset_bytes): position of a layer in the pages of a region."""

StageEntry = tuple[str, int, list[str]]
"""(layer, group, names of its fields) of a layer of a pipeline stage."""


class FieldDocument(TypedDict):
    """A logical tensor in a page."""

    name: str
    element_bytes: int
    offset_bytes: int
    packing: str
    axes: list[AxisEntry]


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
    """A KV-cache group; `context` is (size, rank, tokens per turn). `element_types` has a list for each kind of layer in it."""

    kind: str
    block_tokens: int
    pages_per_block: int
    window_tokens: int
    context: tuple[int, int, int]
    element_types: NotRequired[list[list[str]]]


class GeometryDocument(TypedDict):
    """A rank's geometry in wire form; `tp` and `pp` are (size, rank), and only engines with several stages have `stages`."""

    schema: str
    version: int
    tp: tuple[int, int]
    pp: tuple[int, int]
    null_block: int | None
    stage_layers: list[list[str]]
    stages: NotRequired[list[list[StageEntry]]]
    groups: list[GroupDocument]
    layouts: list[list[FieldDocument]]
    regions: list[RegionDocument]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which layers.10 follows layers.2, and numbers come before words."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]
