"""Orders of bytes and meanings of descriptors that do not depend on how a rank lays out its pages.

Two sides that hold the same cells in different layouts get the same checksum when they gather the cells in *canonical*
order: tokens first, then the field's axes as listed, then the bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._errors import InvalidGeometry
from kv_topology._model import TOKEN_AXIS
from kv_topology._runs import box_runs, join_runs

if TYPE_CHECKING:
    from kv_topology._arrays import Ints
    from kv_topology._link import Link
    from kv_topology._model import FieldLayout, RankGeometry

__all__ = ["DescriptorMeaning", "canonical_segments", "explain"]


def canonical_segments(
    geometry: RankGeometry,
    layer: str,
    field: str,
    *,
    interval: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
) -> tuple[int, Ints]:
    """Return the region of a field and where its bytes lie in a page, in canonical order.

    Args:
        geometry: The rank's geometry.
        layer: Layer name.
        field: Field name.
        interval: Parts of the split axis to take, [start, stop) in the whole model; all that are held by default.
        tokens: Tokens of the page to take, [start, stop); all by default.

    Returns:
        The region number and int64 (n, 2) of (offset in the page, bytes), neighbours joined.

    Raises:
        InvalidGeometry: `field-not-held` when no region holds those cells.
    """
    for number, member in geometry.placements.get(layer, ()):
        for part in member.layout.fields:
            if part.name == field:
                segments = _segments(part, member.offset_bytes + part.offset_bytes, interval, tokens)
                if segments is not None:
                    return number, segments
    raise InvalidGeometry(
        f"No region holds parts {interval} of field {field!r} of layer {layer!r}.",
        code="field-not-held",
        context={"layer": layer, "field": field, "interval": interval},
    )


def _segments(
    part: FieldLayout, offset: int, interval: tuple[int, int] | None, tokens: tuple[int, int] | None
) -> Ints | None:
    wanted = {TOKEN_AXIS: tokens}
    split = part.split_axis
    if split is not None:
        wanted[split.name] = interval
    axes: list[tuple[int, int, int]] = []
    canonical_stride = part.element_bytes
    for axis in sorted(part.axes, key=lambda axis: axis.name != TOKEN_AXIS):
        start, stop = wanted.get(axis.name) or (axis.start, axis.stop)
        if not axis.start <= start < stop <= axis.stop:
            return None
        offset += (start - axis.start) * axis.stride_bytes
        axes.append((stop - start, axis.stride_bytes, 0))
    # The other side of the box is the gathered stream: strides of a dense array in canonical order.
    for place in reversed(range(len(axes))):
        axes[place] = (axes[place][0], axes[place][1], canonical_stride)
        canonical_stride *= axes[place][0]
    runs = join_runs([box_runs(axes, part.element_bytes, offset, 0)], keep_order=True)
    return np.stack([runs.here, runs.length], axis=1)


@final
@dataclass(frozen=True, slots=True)
class DescriptorMeaning:
    """What one descriptor of a prepared list moves.

    Attributes:
        region: Region number on the side asked about.
        page: Page number.
        block: Scheduler block that the page belongs to.
        group: KV-cache group.
        unit: Unit of tokens in the page.
        offset_bytes: Offset in the page.
        length_bytes: Bytes.
        contents: (layer, field) pairs that have bytes in it.
    """

    region: int
    page: int
    block: int
    group: int
    unit: int
    offset_bytes: int
    length_bytes: int
    contents: tuple[tuple[str, str], ...]


def explain(link: Link, geometry: RankGeometry, index: int, *, is_local: bool) -> DescriptorMeaning:
    """Return what a descriptor index of one side of a link stands for.

    Raises:
        InvalidGeometry: `index-out-of-range`.
    """
    rules = link.local_rules if is_local else link.peer_rules
    for table, rule in zip(link.tables, rules, strict=True):
        pairing = table.pairing
        region_of = table.local_region if is_local else table.peer_region
        units = pairing.local_units if is_local else pairing.peer_units
        slot = int(np.searchsorted(rule.first, index, side="right")) - 1
        if slot < 0:
            continue
        region = int(region_of[slot])
        inside = index - int(rule.first[slot])
        if inside >= geometry.regions[region].page_count * units:
            continue
        page_step, unit_step = int(rule.page_step[slot]), int(rule.unit_step[slot])
        page, unit = divmod(inside, page_step) if page_step > 1 or units == 1 else divmod(inside, unit_step)[::-1]
        number = pairing.local_group if is_local else pairing.peer_group
        step = table.local_step if is_local else table.peer_step
        offset = int((table.local_offset if is_local else table.peer_offset)[slot]) + unit * int(step[slot])
        length = int(table.length[slot])
        contents = _contents(geometry, region, number, offset, offset + length)
        block = page // geometry.groups[number].pages_per_block
        return DescriptorMeaning(region, page, block, number, unit, offset, length, contents)
    raise InvalidGeometry(
        f"Descriptor {index} is not in the list of this producer rank.",
        code="index-out-of-range",
        context={"index": index},
    )


def _contents(geometry: RankGeometry, region: int, group: int, start: int, stop: int) -> tuple[tuple[str, str], ...]:
    """Return the (layer, field) pairs of a group that have bytes in [start, stop) of a region's pages."""
    found: list[tuple[str, str]] = []
    for member in geometry.regions[region].members:
        if member.group == group:
            for part in member.layout.fields:
                axes = [(axis.count, axis.stride_bytes, axis.stride_bytes) for axis in part.axes]
                runs = box_runs(axes, part.element_bytes, member.offset_bytes + part.offset_bytes, 0)
                if bool(((runs.here < stop) & (runs.here + runs.length > start)).any()):
                    found.append((member.layer, part.name))
    return tuple(found)
