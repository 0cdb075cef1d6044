"""Geometry documents from other sources, with names for the parts that travel as lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from vllm_adapter.ports.topology import AxisEntry, FieldDocument, GeometryDocument, MemberEntry, RegionDocument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["with_names"]


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
