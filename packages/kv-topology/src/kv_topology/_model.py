"""Geometry of one rank: everything that it registered, checked when it is made. Its parts are in `_parts`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

from kv_topology._parts import (
    TOKEN_AXIS,
    Axis,
    FieldLayout,
    Group,
    GroupKind,
    Layout,
    Member,
    MemoryKind,
    Region,
    Split,
    StageLayer,
)
from kv_topology._validate import check_geometry
from kv_topology._validate_layouts import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "TOKEN_AXIS",
    "Axis",
    "FieldLayout",
    "Group",
    "GroupKind",
    "Layout",
    "Member",
    "MemoryKind",
    "RankGeometry",
    "Region",
    "Split",
    "StageLayer",
]


@final
@dataclass(frozen=True)
class RankGeometry:
    """Everything that one rank registered.

    Attributes:
        tp_size: Tensor-parallel ranks of the engine.
        tp_rank: This rank among them.
        groups: KV-cache groups, in the order of the scheduler's block lists.
        regions: Registered memory.
        pp_size: Pipeline stages of the engine.
        pp_rank: This rank's stage.
        stage_layers: Layers by stage; needed of a consumer with more than one stage, else empty.
        null_block: Block id that stands for "no block" in lists that name none themselves, or None.
    """

    tp_size: int
    tp_rank: int
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    pp_size: int = 1
    pp_rank: int = 0
    stage_layers: tuple[tuple[StageLayer, ...], ...] = ()
    null_block: int | None = None

    def __post_init__(self) -> None:
        """Refuse a geometry that contradicts itself (`InvalidGeometry`), so that every value in use is sound."""
        try:
            check_geometry(self, self.placements)
        except (AttributeError, TypeError) as error:  # a part that is not what the check takes it for
            raise refusal("geometry-malformed", f"A part of the geometry has another type: {error}.") from error

    @cached_property
    def placements(self) -> Mapping[str, tuple[tuple[int, Member], ...]]:
        """(region number, member) pairs of each layer."""
        found: dict[str, list[tuple[int, Member]]] = {}
        for number, region in enumerate(self.regions):
            for member in region.members:
                found.setdefault(member.layer, []).append((number, member))
        return {layer: tuple(pairs) for layer, pairs in found.items()}

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names in registration order."""
        return tuple(self.placements)

    @property
    def own_layers(self) -> tuple[StageLayer, ...]:
        """This rank's layers with their groups and fields, as its stage's entry of `stage_layers` lists them."""
        return tuple(
            StageLayer(
                layer,
                placed[0][1].group,
                tuple(dict.fromkeys(part.name for _, member in placed for part in member.layout.fields)),
            )
            for layer, placed in self.placements.items()
        )
