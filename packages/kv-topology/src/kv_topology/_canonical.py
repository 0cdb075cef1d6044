"""Orders of bytes and meanings of descriptors that do not depend on how a rank lays out its pages.

Two sides that hold the same cells in different layouts get the same checksum when they gather the cells in *canonical*
order: tokens first, then the field's axes as listed, then the bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology._errors import InvalidGeometry
from kv_topology._model import TOKEN_AXIS
from kv_topology._runs import Runs, box_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Ints
    from kv_topology._link import Link
    from kv_topology._model import FieldLayout, RankGeometry
    from kv_topology._runs import BoxAxis

__all__ = ["DescriptorMeaning", "canonical_segments", "contents_of", "explain"]


def canonical_segments(
    geometry: RankGeometry,
    layer: str,
    field: str,
    *,
    interval: tuple[int, int] | None = None,
    tokens: tuple[int, int] | None = None,
) -> Ints:
    """Return where the bytes of a field lie in a page, in canonical order, neighbours joined.

    Args:
        geometry: The rank's geometry.
        layer: Layer name.
        field: Field name.
        interval: Parts of the split axis to take, [start, stop) in the whole model; all that are held by default.
        tokens: Tokens of the page to take, [start, stop); all by default.

    Returns:
        int64 (n, 3) of (region number, offset in the page, bytes): a field may be kept in several regions.

    Raises:
        InvalidGeometry: `field-not-held` when not all of those cells are held.
    """
    found = _placed_parts(geometry, layer, field)
    held = _held_interval([part for _, part, _ in found])
    interval = held if interval is None else interval
    pieces = [piece for entry in found if (piece := _piece(*entry, interval, tokens)) is not None]
    # Without a split axis every rank has the whole field, and no number of parts is asked for.
    wanted = interval[1] - interval[0] if held and interval else None
    if not pieces or wanted not in {None, sum(piece.parts for piece in pieces)}:
        raise InvalidGeometry(
            f"Parts {interval} of field {field!r} of layer {layer!r} are not all held here.",
            code="field-not-held",
            context={"layer": layer, "field": field, "interval": interval},
        )
    return _joined(pieces)


def _placed_parts(geometry: RankGeometry, layer: str, field: str) -> list[tuple[int, FieldLayout, int]]:
    """Return (region number, layout, offset in the page) of every place in which a layer keeps a field."""
    return [
        (number, part, member.offset_bytes + part.offset_bytes)
        for number, member in geometry.placements.get(layer, ())
        for part in member.layout.fields
        if part.name == field
    ]


def _held_interval(parts: Sequence[FieldLayout]) -> tuple[int, int] | None:
    """Return from where to where the parts hold the split axis, None if there is no such axis."""
    held = [axis for part in parts if (axis := part.split_axis) is not None]
    return (min(axis.start for axis in held), max(axis.stop for axis in held)) if held else None


class _Piece(NamedTuple):
    """The runs of one region's share of a field; `there` is the place in the canonical stream."""

    region: int
    parts: int
    runs: Runs


def _piece(
    region: int, part: FieldLayout, offset: int, interval: tuple[int, int] | None, tokens: tuple[int, int] | None
) -> _Piece | None:
    """Return the share of the wanted cells that one part of a field holds, None if it holds none.

    Example: tokens 0..3 and heads 2..5 wanted, cells of 8 bytes: the canonical strides are 8 for a head and 4 * 8 = 32
    for a token. A region that holds head 4 alone begins at (4 - 2) * 8 = 16 of the stream.
    """
    axes: list[BoxAxis] = []
    there, canonical_stride, count = 0, part.element_bytes, 1
    for axis in sorted(part.axes, key=lambda axis: axis.name != TOKEN_AXIS)[::-1]:
        wanted = tokens if axis.name == TOKEN_AXIS else interval if axis is part.split_axis else None
        start, stop = wanted or (axis.start, axis.stop)
        low, high = max(start, axis.start), min(stop, axis.stop)
        if low >= high or (axis is not part.split_axis and (low, high) != (start, stop)):
            return None
        offset += (low - axis.start) * axis.stride_bytes
        there += (low - start) * canonical_stride
        axes.insert(0, (high - low, axis.stride_bytes, canonical_stride))
        canonical_stride *= stop - start
        count = high - low if axis is part.split_axis else count
    return _Piece(region, count, box_runs(axes, part.element_bytes, offset, there))


def _joined(pieces: Sequence[_Piece]) -> Ints:
    """Return (region, offset, bytes) in canonical order, neighbours in one region joined."""
    region = np.repeat([piece.region for piece in pieces], [len(piece.runs) for piece in pieces])
    here, there, length = (
        np.concatenate([getattr(piece.runs, name) for piece in pieces]) for name in ("here", "there", "length")
    )
    order = np.argsort(there)
    region, here, length = region[order], here[order], length[order]
    starts = np.ones(len(here), dtype=np.bool_)
    starts[1:] = (region[1:] != region[:-1]) | (here[1:] != here[:-1] + length[:-1])
    first = np.flatnonzero(starts)
    return np.stack([region[first], here[first], np.add.reduceat(length, first)], axis=1)


@final
@dataclass(frozen=True, slots=True)
class DescriptorMeaning:
    """Meaning of a descriptor of a prepared list.

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
        slices = table.columns.local if is_local else table.columns.peer
        units, number = (
            (pairing.local_units, pairing.local_group) if is_local else (pairing.peer_units, pairing.peer_group)
        )
        slot = int(np.searchsorted(rule.first, index, side="right")) - 1
        if slot < 0:
            continue
        region = int(slices.region[slot])
        if index - int(rule.first[slot]) >= geometry.regions[region].page_count * units:
            continue
        page, unit = rule.page_and_unit(slot, index)
        offset = int(slices.offset[slot]) + unit * int(slices.step[slot])
        length = int(slices.length[slot])
        contents = contents_of(geometry, region, number, offset, offset + length)
        block = page // geometry.groups[number].pages_per_block
        return DescriptorMeaning(region, page, block, number, unit, offset, length, contents)
    raise InvalidGeometry(
        f"Descriptor {index} is not in the list of this producer rank.",
        code="index-out-of-range",
        context={"index": index},
    )


def contents_of(geometry: RankGeometry, region: int, group: int, start: int, stop: int) -> tuple[tuple[str, str], ...]:
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
