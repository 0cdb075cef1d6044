"""Staged plans and their price: read a producer's pages as they are, and put the bytes in order here.

Theory of operation. A direct plan needs one descriptor per run of bytes that is contiguous on *both* sides; heads-first
against tokens-first leaves runs of one head and token. A staged plan needs runs that are contiguous at the *producer*
only: they are read into the local page itself, one after the other, unit by unit and producer by producer, so that they
fill exactly the bytes that the page's fields take. Afterwards each page is permuted in place: copied aside, and written
back from the producer's order of strides to ours. `PageMove`s describe this permutation; the caller executes it.

This works when the fields of a page leave no gap and no tokens are dealt out; otherwise the plan stays direct.

Elements of another type, which take fewer bytes at the producer, are planned as if they took as few here: each page's fields
close up towards its first byte (`narrowed`). What the plan reads, and moves if it is staged, then lies in the first part of the
page, and the targets of moves are spread to the real places (`widened`). Pages with gaps are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology.arithmetic import ints, tokens_meet
from kv_topology.errors import GeometryMismatch, InvalidGeometry, UnsupportedTopology, shown
from kv_topology.model import Layout
from kv_topology.plan.slices import SliceColumns, SliceTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology.arithmetic import Bools
    from kv_topology.geometry import RankGeometry
    from kv_topology.model import Member
    from kv_topology.plan.slices import Overlap, Pairing

    Rank = tuple[int, int]
    Overlaps = Sequence[tuple[Pairing, Sequence[Overlap]]]
    Tables = Mapping[Rank, Sequence[SliceTable]]

__all__ = [
    "Cast",
    "CostModel",
    "Estimate",
    "PageMove",
    "StagedRegion",
    "as_read",
    "bytes_per_token",
    "make_estimate",
    "narrowed",
    "stage",
    "widened",
]


class Cast(NamedTuple):
    """Elements of a group that have another type at the producer than here.

    Attributes:
        source_type: The producer's type, a name for whoever executes the moves.
        source_bytes: Bytes of an element there.
        target_type: The type here.
        target_bytes: Bytes of an element here, a multiple of `source_bytes`.
    """

    source_type: str
    source_bytes: int
    target_type: str
    target_bytes: int


@final
@dataclass(frozen=True, slots=True)
class PageMove:
    """A strided copy inside a page: cell (i, j, ...) goes from source to target, all in bytes.

    Attributes:
        shape: Number of cells along each axis; the first axis is the page's units.
        element_bytes: Bytes of a cell in the received page; in the final one, too, without a `Cast`.
        source_offset: Place of the first cell in the received page.
        source_strides: Distances of neighbours in the received page.
        target_offset: Place of the first cell in the final page.
        target_strides: Distances of neighbours in the final page.
    """

    shape: tuple[int, ...]
    element_bytes: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StagedRegion:
    """How to put the pages of one region and group in order after all reads of a request are done.

    Attributes:
        region: Local region number.
        group: Local group number.
        start: First byte of a page that is permuted.
        stop: Byte after the last that is permuted.
        moves: Copies from the received page (set aside first) to the final one; together they fill [start, stop).
        cast: Types of the cells, each of them one element, where they change; else None.
    """

    region: int
    group: int
    start: int
    stop: int
    moves: tuple[PageMove, ...]
    cast: Cast | None = None


@dataclass(slots=True)
class _Bay:
    """The bytes of one region's pages that all producers fill together, and what is put there so far.

    Attributes:
        start: First byte.
        stop: Byte after the last.
        local_units: Units in a page.
        filled: Bytes of a unit that have their place already.
        moves: Copies that complete the page.
    """

    start: int
    stop: int
    local_units: int
    filled: int = 0
    moves: list[PageMove] = field(default_factory=list[PageMove])

    @property
    def unit_bytes(self) -> int:
        """Bytes that one unit takes."""
        return (self.stop - self.start) // self.local_units

    def take(self, length: int) -> int:
        """Return the place of the next chunk."""
        place = self.start + self.filled
        self.filled += length
        return place


class _Chunk(NamedTuple):
    """A run of bytes that is contiguous at the producer, and where it is put in the received page."""

    peer_region: int
    peer_offset: int
    peer_step: int
    length: int
    place: int = 0

    def holds(self, region: int, start: int, stop: int) -> bool:
        """Return whether a stretch of the producer's page lies in this chunk."""
        return self.peer_region == region and self.peer_offset <= start and stop <= self.peer_offset + self.length


def _chunks(table: SliceTable, chosen: Bools) -> list[_Chunk]:
    """Return the runs that are contiguous at the producer."""
    slices = table.columns.take(chosen)
    columns = (slices.peer_region, slices.peer_step, slices.peer_offset, slices.length)
    chunks: list[_Chunk] = []
    for region, step, offset, length in sorted(zip(*(column.tolist() for column in columns), strict=True)):
        last = chunks[-1] if chunks else None
        end = (last.peer_region, last.peer_step, last.peer_offset + last.length) if last is not None else None
        if last is not None and end == (region, step, offset):
            chunks[-1] = last._replace(length=last.length + length)
        else:
            chunks.append(_Chunk(region, offset, step, length))
    return chunks


def _open_bays(tables: Sequence[SliceTable]) -> dict[tuple[int, int], _Bay] | None:
    """Return the bytes that all producers fill in the pages of each region and group.

    None if gaps, dealt tokens, or units of different sizes in one page forbid it.
    """
    if any(table.pairing.local.deal.size > 1 or table.pairing.peer.deal.size > 1 for table in tables):
        return None
    bays: dict[tuple[int, int], _Bay] = {}
    filled: dict[tuple[int, int], int] = {}
    for table in tables:
        units = table.pairing.local_units
        for region in np.unique(table.columns.local_region).tolist():
            slices = table.columns.take(table.columns.local_region == region)
            stops = slices.local_offset + (units - 1) * slices.local_step + slices.length
            key = (region, table.pairing.local_group)
            bay = bays.setdefault(key, _Bay(1 << 62, 0, units))
            if bay.local_units != units:
                return None
            bay.start, bay.stop = min(bay.start, int(slices.local_offset.min())), max(bay.stop, int(stops.max()))
            filled[key] = filled.get(key, 0) + int(slices.length.sum()) * units
    has_gaps = any(bay.stop - bay.start != filled[key] for key, bay in bays.items())
    return None if has_gaps else bays


def stage(
    tables: Mapping[Rank, Sequence[SliceTable]], overlaps: Mapping[Rank, Overlaps]
) -> tuple[dict[Rank, list[SliceTable]], tuple[StagedRegion, ...]] | None:
    """Return the slices of a staged plan and the permutations that complete it, or None if it cannot be staged.

    State groups are left direct: their pages are few and their runs long.

    Args:
        tables: Slices of the direct plan by producer rank.
        overlaps: The boxes from which they were made.
    """
    bays = _open_bays([t for found in tables.values() for t in found if not t.pairing.local.is_state])
    if bays is None:
        return None
    staged: dict[Rank, list[SliceTable]] = {}
    for rank, found in tables.items():
        for table, (_, boxes) in zip(found, overlaps[rank], strict=True):
            done = table if table.pairing.local.is_state else _stage_table(table, boxes, bays)
            if done is None:
                return None
            staged.setdefault(rank, []).append(done)
    regions = tuple(
        StagedRegion(region, group, bay.start, bay.stop, tuple(bay.moves))
        for (region, group), bay in sorted(bays.items())
    )
    return staged, regions


def _stage_table(
    table: SliceTable, overlaps: Sequence[Overlap], bays: Mapping[tuple[int, int], _Bay]
) -> SliceTable | None:
    """Give every chunk of one producer a place in its page, and note the moves of its boxes.

    Returns None if a box is spread over several chunks, so that its cells do not keep the producer's strides.
    """
    rows: list[tuple[int, ...]] = []  # the columns of `SliceColumns`, one number each
    group = table.pairing.local_group
    for region in np.unique(table.columns.local_region).tolist():
        bay = bays[region, group]
        chunks: list[_Chunk] = []
        for found in _chunks(table, table.columns.local_region == region):
            chunk = found._replace(place=bay.take(found.length))
            rows.append((region, chunk.place, bay.unit_bytes, *chunk[:4]))
            chunks.append(chunk)
        for overlap in overlaps:
            for place in overlap.places:
                if place.local_region == region:
                    for box in overlap.boxes:
                        there = place.peer_offset + box.there
                        source = _place_of(chunks, place.peer_region, there, there + box.extent_bytes)
                        if source is None:
                            return None
                        # A field without axes, such as one scale of a page, has three empty columns.
                        counts, here, strides = ([axis[column] for axis in box.axes] for column in range(3))
                        shape, received = (bay.local_units, *counts), (bay.unit_bytes, *strides)
                        target, final = place.local_offset + box.here, (box.local_step, *here)
                        bay.moves.append(PageMove(shape, box.element_bytes, source, received, target, final))
    return SliceTable(table.pairing, SliceColumns(*(ints(list(column)) for column in zip(*rows, strict=True))))


def _place_of(chunks: Sequence[_Chunk], region: int, start: int, stop: int) -> int | None:
    """Return where a stretch of the producer's page lies in the received page, None if no chunk holds all of it."""
    found = next((chunk for chunk in chunks if chunk.holds(region, start, stop)), None)
    return None if found is None else found.place + start - found.peer_offset


def narrowed(local: RankGeometry, casts: Mapping[int, Cast]) -> RankGeometry:
    """Return this rank as if the elements of the groups in `casts` took the producer's bytes; pages begin where they did.

    Example: a page of 4 tokens x 2 heads x 8 channels of 2 bytes, cast from 1 byte: it ends at byte 64 instead of 128, a
    head steps 8 bytes instead of 16, and a value behind the keys begins at 32 instead of 64.

    Raises:
        GeometryMismatch: `element-bytes-differ`: a field's elements are not those of the cast.
        UnsupportedTopology: `not-stageable`: the fields of a page leave gaps.
    """
    layouts: dict[tuple[Layout, int], Layout] = {}

    def closed_up(member: Member, start: int) -> Member:
        cast = casts[member.group]
        ratio = cast.target_bytes // cast.source_bytes
        for part in member.layout.fields:
            if part.element_bytes != cast.target_bytes:
                raise GeometryMismatch(
                    "element-bytes-differ",
                    f"Elements of field {part.name!r} of layer {member.layer!r} have {part.element_bytes} bytes; those of "
                    f"{cast.target_type}, cast from the peer's {cast.source_type}, have {cast.target_bytes}.",
                    {"local": part.element_bytes, "cast": cast.target_bytes},
                )
        key = member.layout, member.group
        if key not in layouts:
            layouts[key] = Layout(
                tuple(
                    replace(
                        part,
                        element_bytes=cast.source_bytes,
                        offset_bytes=part.offset_bytes // ratio,
                        axes=tuple(replace(axis, stride_bytes=axis.stride_bytes // ratio) for axis in part.axes),
                    )
                    for part in member.layout.fields
                )
            )
        offset = start + (member.offset_bytes - start) // ratio
        return replace(member, layout=layouts[key], offset_bytes=offset)

    regions = [
        replace(
            region,
            members=tuple(
                closed_up(member, _span(local, number, member.group)[0]) if member.group in casts else member
                for member in region.members
            ),
        )
        for number, region in enumerate(local.regions)
    ]
    return replace(local, regions=tuple(regions))


def _span(local: RankGeometry, region: int, group: int) -> tuple[int, int]:
    """Return the first byte of a region's pages that a group's fields take, and the byte after the last; refuse gaps between."""
    members = [member for member in local.regions[region].members if member.group == group]
    start = min(member.offset_bytes for member in members)
    stop = max(member.offset_bytes + member.layout.extent_bytes for member in members)
    held = sum(part.held_bytes for member in members for part in member.layout.fields)
    if held != stop - start:
        raise UnsupportedTopology(
            "not-stageable",
            f"The elements of region {region} cannot be cast: its pages have gaps, {held} bytes of fields in {stop - start}.",
            {"held": held, "extent": stop - start},
        )
    return start, stop


def as_read(tables: Tables, narrow: RankGeometry, casts: Mapping[int, Cast]) -> tuple[StagedRegion, ...]:
    """Return the regions of a direct plan whose elements are cast where they were read."""
    places = {
        (region, table.pairing.local_group)
        for found in tables.values()
        for table in found
        if table.pairing.local_group in casts
        for region in np.unique(table.columns.local_region).tolist()
    }
    regions: list[StagedRegion] = []
    for region, group in sorted(places):
        (start, stop), size = _span(narrow, region, group), casts[group].source_bytes
        move = PageMove((1, (stop - start) // size), size, start, (0, size), start, (0, size))
        regions.append(StagedRegion(region, group, start, stop, (move,)))
    return tuple(regions)


def widened(regions: Sequence[StagedRegion], casts: Mapping[int, Cast]) -> tuple[StagedRegion, ...]:
    """Return the regions with the targets of moves in pages as they are, not as `narrowed` shows them."""
    return tuple(_widened(each, casts[each.group]) if each.group in casts else each for each in regions)


def _widened(region: StagedRegion, cast: Cast) -> StagedRegion:
    ratio, start = cast.target_bytes // cast.source_bytes, region.start
    moves = tuple(
        replace(
            move,
            target_offset=start + (move.target_offset - start) * ratio,
            target_strides=tuple(stride * ratio for stride in move.target_strides),
        )
        for move in region.moves
    )
    return replace(region, stop=start + (region.stop - start) * ratio, moves=moves, cast=cast)


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices of a transfer; the defaults are of one host over shared memory, measure yours.

    Attributes:
        descriptor_us: Time per descriptor.
        bandwidth_gb_s: Bytes over the wire, in 1e9 bytes per second.
        permute_gb_s: Bytes put in order by the receiver.
        permute_launch_us: Time per region that is permuted, however small.
        prompt_tokens: Length of the prompt for which the two kinds of plan are compared.

    Source: NIXL 1.5.1 over UCX on one host, 2 to 3.5 us per descriptor and 8 to 10 GB/s.
    """

    descriptor_us: float = 2.5
    bandwidth_gb_s: float = 9.0
    permute_gb_s: float = 10.0
    permute_launch_us: float = 20.0
    prompt_tokens: int = 1024

    def __post_init__(self) -> None:
        """Refuse values that are not prices: `size-out-of-range`."""
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name.endswith("_us") else 1e-9
            if type(value) not in (int, float) or not least <= value <= 1e15:
                limits = "0 or positive" if not least else "positive"
                raise InvalidGeometry("size-out-of-range", f"{name} is {shown(value)}; it must be a {limits} number.")


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes and times of a plan, before NIXL joins neighbouring descriptors.

    Attributes:
        bytes_per_token: Bytes received per token of the prompt, states left out.
        state_bytes: Bytes of states received per request.
        direct_descriptors_per_token: Descriptors per token of the direct plan.
        staged_descriptors_per_token: The same of the staged plan; None if there is none.
        state_descriptors: Descriptors of states per request.
        direct_us: Time of the direct plan for the cost model's prompt.
        staged_us: Time of the staged plan; None if there is none.
    """

    bytes_per_token: float
    state_bytes: int
    direct_descriptors_per_token: float
    staged_descriptors_per_token: float | None
    state_descriptors: int
    direct_us: float
    staged_us: float | None

    @property
    def is_staged_cheaper(self) -> bool:
        """Whether the staged plan exists and takes less time."""
        return self.staged_us is not None and self.staged_us < self.direct_us


def _tokens_per_unit(table: SliceTable) -> float:
    """Return the tokens of the prompt for each of which a unit of this table is read; 1 for states, which count by request."""
    pairing = table.pairing
    return 1.0 if pairing.local.is_state else pairing.unit_tokens / tokens_meet(pairing.local.deal, pairing.peer.deal)


def bytes_per_token(table: SliceTable) -> float:
    """Return the bytes of a table per token of the prompt; of states, per request."""
    return float(table.columns.length.sum()) / _tokens_per_unit(table)


def make_estimate(tables: Tables, staged: tuple[Tables, Sequence[StagedRegion]] | None, cost: CostModel) -> Estimate:
    """Return the cost of the direct plan and, if there is one, of the staged plan, for the cost model's prompt."""
    every = [table for found in tables.values() for table in found]
    states = [table for table in every if table.pairing.local.is_state]
    per_token = sum(bytes_per_token(table) for table in every if not table.pairing.local.is_state)
    state_bytes, state_descriptors = sum(int(table.columns.length.sum()) for table in states), sum(map(len, states))
    moved = per_token * cost.prompt_tokens

    def priced(chosen: Tables) -> tuple[float, float]:
        """Return descriptors per token, and the microseconds until all bytes have arrived."""
        parts = [table for found in chosen.values() for table in found if not table.pairing.local.is_state]
        descriptors = sum(len(table) / _tokens_per_unit(table) for table in parts)
        count = descriptors * cost.prompt_tokens + state_descriptors
        return descriptors, count * cost.descriptor_us + (moved + state_bytes) / cost.bandwidth_gb_s / 1e3

    direct, direct_us = priced(tables)
    if staged is None:
        return Estimate(per_token, state_bytes, direct, None, state_descriptors, direct_us, None)
    whole, read_us = priced(staged[0])
    permute_us = len(staged[1]) * cost.permute_launch_us + moved / cost.permute_gb_s / 1e3
    return Estimate(per_token, state_bytes, direct, whole, state_descriptors, direct_us, read_us + permute_us)
