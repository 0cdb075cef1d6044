"""Boxes, slices and rows: the cells that two layouts share, as byte slices of pages, and as strided descriptor rows.

Theory of operation. Two members of one layer are intersected field by field: interval by interval on every axis, and
one *unit* of tokens on the token axis. Layers that use the same two layouts have the same boxes, so these are built
once per pair of layouts and remembered with the places (regions and offsets) at which they apply.

Worked example. A page of 4 tokens; 4 heads in the model; a key of a head is 8 bytes. This rank (tp 1) holds heads 0..3,
heads outermost: a head steps 4 * 8 = 32 bytes, a token 8. The peer (rank 1 of tp 2) holds heads 2..3, tokens outermost:
a token steps 2 * 8 = 16 bytes, a head 8. The pages are equal, so the unit is 4 tokens. The common interval of heads is
[2, 4), which begins 2 * 32 = 64 bytes into our page and 0 bytes into the peer's. With axes (count, stride here, stride
there) the box is

    Box(axes=((4, 8, 16), (2, 32, 8), (8, 1, 1)), here=64, there=0, element_bytes=1)

whose cell (token 3, head 3) is at 64 + 3 * 8 + 1 * 32 = 120 here and at 3 * 16 + 1 * 8 = 56 there.

Runs of a pair of layouts (`arithmetic.box_runs`) are joined where they touch on both sides, then placed for all layers at
once and joined again, across fields and layers: a page that agrees on both sides is one slice.

A row (address, length, device, stride, count) stands for `count` descriptors. A slice of a page with one unit is one row
over all pages. With several units, pages whose units follow each other without a gap are still one row (the stride is the
unit's); otherwise each unit position has its own row. In both cases the descriptor of a unit is its slice's first index
plus a number that all such slices share, so block ids become indices by one outer sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology.arithmetic import Runs, box_runs, flat_outer_sum, ints, run_count
from kv_topology.errors import UnsupportedTopology
from kv_topology.geometry import check_fields_match, check_groups_match, check_names_match
from kv_topology.plan.readers import choose_pieces, field_class

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kv_topology.arithmetic import Bools, BoxAxis, Indices, Ints, Rows
    from kv_topology.geometry import RankGeometry
    from kv_topology.model import FieldLayout, Group, Layout, Region

__all__ = [
    "MAX_DESCRIPTORS",
    "MAX_ROWS",
    "MAX_SLICES",
    "Box",
    "IndexRule",
    "Overlap",
    "Pairing",
    "Place",
    "SideColumns",
    "SliceColumns",
    "SliceTable",
    "build_rows",
    "build_table",
    "find_overlaps",
    "join_runs",
    "pair_groups",
]


class Place(NamedTuple):
    """Where two members meet: region numbers, and the members' byte offsets in their pages."""

    local_region: int
    local_offset: int
    peer_region: int
    peer_offset: int


class Pairing(NamedTuple):
    """A local and a peer group whose blocks hold the same layers, and the token unit between them.

    Attributes:
        local_group: Group number here.
        peer_group: Group number at the peer.
        local: The local group.
        peer: The peer's group.
        unit_tokens: Tokens of a unit; 0 for states, where the unit is a page.
        local_units: Units in a local page.
        peer_units: Units in a peer page.
        is_page_to_page: Whether each local block is filled from one block of the peer, one page from one page.
    """

    local_group: int
    peer_group: int
    local: Group
    peer: Group
    unit_tokens: int
    local_units: int
    peer_units: int
    is_page_to_page: bool


def pair_groups(number: int, local: Group, peer_number: int, peer: Group) -> Pairing:
    """Return how blocks of a local group relate to blocks of a peer group.

    A unit is the largest run of tokens that crosses neither a page nor a turn of context parallelism on either side.
    """
    if local.is_state:
        return Pairing(number, peer_number, local, peer, 0, 1, 1, is_page_to_page=False)
    turns = (group.deal.interleave_tokens for group in (local, peer) if group.deal.size > 1)
    unit = gcd(local.page_tokens, peer.page_tokens, *turns)
    units = (local.page_tokens // unit, peer.page_tokens // unit)
    is_plain = units == (1, 1) and all(group.pages_per_block == group.deal.size == 1 for group in (local, peer))
    return Pairing(number, peer_number, local, peer, unit, *units, is_page_to_page=is_plain)


class Box(NamedTuple):
    """Cells that two members share: the same cells on both sides, at different strides.

    Attributes:
        axes: (count, local stride, peer stride) in bytes per axis, in the field's canonical order.
        here: Offset of the first cell relative to the local member.
        there: Offset relative to the peer's member.
        element_bytes: Bytes of a cell.
        local_step: Bytes from one unit to the next in a local page, 0 if it has but one.
        peer_step: The same at the peer.
    """

    axes: tuple[BoxAxis, ...]
    here: int
    there: int
    element_bytes: int
    local_step: int
    peer_step: int

    @property
    def extent_bytes(self) -> int:
        """Bytes from the first cell to the end of the last one at the producer."""
        return sum((count - 1) * stride for count, _, stride in self.axes) + self.element_bytes


class Overlap(NamedTuple):
    """The boxes of one pair of layouts, and every place at which two members with these layouts meet."""

    boxes: tuple[Box, ...]
    places: list[Place]


def _box(local: FieldLayout, peer: FieldLayout, pairing: Pairing, interval: tuple[int, int]) -> Box | None:
    """Return the intersection of two parts of a field with a piece of its split axis, or None when it is empty."""
    here, there = local.offset_bytes, peer.offset_bytes
    axes: list[BoxAxis] = []
    token = local.token_axis
    local_step = peer_step = 0
    for mine in local.axes:
        theirs = peer.axis(mine.name)
        if theirs is None:  # pragma: no cover - excluded by `check_fields_match`
            return None
        if mine is token:
            axes.append((pairing.unit_tokens, mine.stride_bytes, theirs.stride_bytes))
            local_step = pairing.unit_tokens * mine.stride_bytes if pairing.local_units > 1 else 0
            peer_step = pairing.unit_tokens * theirs.stride_bytes if pairing.peer_units > 1 else 0
            continue
        low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if mine.split == "tp":
            low, high = max(low, interval[0]), min(high, interval[1])
        if low >= high:
            return None
        here += (low - mine.start) * mine.stride_bytes
        there += (low - theirs.start) * theirs.stride_bytes
        axes.append((high - low, mine.stride_bytes, theirs.stride_bytes))
    return Box(tuple(axes), here, there, local.element_bytes, local_step, peer_step)


def _check_unit(local: FieldLayout, pairing: Pairing, layer: str) -> None:
    if pairing.unit_tokens and local.token_axis is None and max(pairing.local_units, pairing.peer_units) > 1:
        mine, theirs = pairing.local.page_tokens, pairing.peer.page_tokens
        raise UnsupportedTopology(
            "packed-block-needs-equal-pages",
            f"Field {local.name!r} of layer {layer!r} keeps a block in the order {local.packing!r} of a kernel, so "
            f"pages cannot be cut: {mine} tokens here, {theirs} at the peer. Use the same block size on both sides.",
            {"local": mine, "peer": theirs, "packing": local.packing},
        )


def _layout_boxes(
    mine: Layout, theirs: Layout, pairing: Pairing, local: RankGeometry, peer: RankGeometry, layer: str
) -> tuple[Box, ...]:
    """Return the boxes of all fields that two layouts share and that are read from this producer rank."""
    found: list[Box] = []
    for one in mine.fields:
        for two in theirs.fields:
            if one.name == two.name:
                check_fields_match(one, two, layer)
                _check_unit(one, pairing, layer)
                kind = field_class(one, pairing.local, pairing.peer)
                for piece in choose_pieces(kind, local.tp_size, local.tp_rank, peer.tp_size):
                    if piece.producer == peer.tp_rank:
                        box = _box(one, two, pairing, (piece.start, piece.stop))
                        found += [box] if box is not None else []
    return tuple(found)


def find_overlaps(
    local: RankGeometry, peer: RankGeometry, layers: Collection[str]
) -> list[tuple[Pairing, list[Overlap]]]:
    """Return what a local rank reads from one producer rank, by pair of groups and by pair of layouts.

    Args:
        local: This rank.
        peer: The producer rank.
        layers: Layers to read from its stage.

    Raises:
        GeometryMismatch: The two sides disagree about a field or a group, with both values.
        UnsupportedTopology: `packed-block-needs-equal-pages`.
    """
    found: dict[tuple[int, int], tuple[Pairing, dict[tuple[Layout, Layout], Overlap]]] = {}
    # Most layers look alike, so the names of their fields are compared once.
    checked: set[tuple[tuple[Layout, ...], tuple[Layout, ...]]] = set()
    for layer, mine in local.placements.items():
        theirs = peer.placements.get(layer) if layer in layers else None
        if theirs is None:
            continue
        groups = (mine[0][1].group, theirs[0][1].group)
        if groups not in found:
            one, two = local.groups[groups[0]], peer.groups[groups[1]]
            check_groups_match(one, two, layer)
            found[groups] = (pair_groups(groups[0], one, groups[1], two), {})
        pairing, overlaps = found[groups]
        layouts = (tuple(member.layout for _, member in mine), tuple(member.layout for _, member in theirs))
        if layouts not in checked:
            check_names_match(mine, theirs, layer)
            checked.add(layouts)
        for (local_region, ours), (peer_region, other) in product(mine, theirs):
            pair = (ours.layout, other.layout)
            if pair not in overlaps:
                overlaps[pair] = Overlap(_layout_boxes(*pair, pairing, local, peer, layer), [])
            overlaps[pair].places.append(Place(local_region, ours.offset_bytes, peer_region, other.offset_bytes))
    return [
        (pairing, [overlap for overlap in overlaps.values() if overlap.boxes]) for pairing, overlaps in found.values()
    ]


def _joined(here: Ints, there: Ints, length: Ints, *same: Ints) -> tuple[Ints, Ints]:
    """Return the first of each series of rows that touch on both sides and agree in the other columns, and its bytes."""
    starts = np.ones(len(here), dtype=np.bool_)
    starts[1:] = (here[1:] != here[:-1] + length[:-1]) | (there[1:] != there[:-1] + length[:-1])
    for column in same:
        starts[1:] |= np.diff(column) != 0
    first: Ints = np.flatnonzero(starts)
    return first, np.add.reduceat(length, first)


def join_runs(runs: Sequence[Runs]) -> Runs:
    """Return all runs as one table, sorted by `here`, in which neighbours on both sides are joined."""
    here, there, length = (np.concatenate(column) for column in zip(*runs, strict=True))
    order = np.argsort(here, kind="stable")
    here, there, length = here[order], there[order], length[order]
    first, length = _joined(here, there, length)
    return Runs(here[first], there[first], length)


MAX_SLICES = 1 << 18
"""Slices of one plan, over all producer ranks and groups, beyond which it is refused."""


class SideColumns(NamedTuple):
    """Columns of one side of `SliceColumns`, each int64 (n,) with one entry per slice."""

    region: Ints
    offset: Ints
    step: Ints
    length: Ints


class SliceColumns(NamedTuple):
    """Slices by column, one per row; all columns int64 (n,).

    Attributes:
        local_region: Region number here.
        local_offset: Byte offset in a local page, of the page's first unit.
        local_step: Bytes from one unit to the next inside a local page.
        peer_region: Region number at the peer.
        peer_offset: Byte offset in a peer page.
        peer_step: Bytes from one unit to the next inside a peer page.
        length: Bytes of the slice.
    """

    local_region: Ints
    local_offset: Ints
    local_step: Ints
    peer_region: Ints
    peer_offset: Ints
    peer_step: Ints
    length: Ints

    @property
    def local(self) -> SideColumns:
        """The local side."""
        return SideColumns(self.local_region, self.local_offset, self.local_step, self.length)

    @property
    def peer(self) -> SideColumns:
        """The producer's side."""
        return SideColumns(self.peer_region, self.peer_offset, self.peer_step, self.length)

    def take(self, chosen: Ints | Bools) -> SliceColumns:
        """Return the chosen rows."""
        return SliceColumns(*(column[chosen] for column in self))


@final
@dataclass(frozen=True, slots=True)
class SliceTable:
    """Slices of one pairing with one producer rank.

    Attributes:
        pairing: The groups and their unit.
        columns: The slices.
    """

    pairing: Pairing
    columns: SliceColumns

    def __len__(self) -> int:
        return len(self.columns.length)


def _check_fineness(count: int) -> None:
    if count > MAX_SLICES:
        raise UnsupportedTopology(
            "plan-too-fine",
            f"The layouts of the two sides cut pages into {count} runs (limit {MAX_SLICES}); "
            "use the same layout on both sides or a staged plan.",
            {"slices": count, "limit": MAX_SLICES},
        )


def _runs_by_step(boxes: Sequence[Box]) -> list[tuple[int, int, Runs]]:
    """Return (local step, peer step, joined runs) of the boxes of one pair of layouts."""
    by_step: dict[tuple[int, int], list[Runs]] = {}
    for box in boxes:
        runs = box_runs(box.axes, box.element_bytes, box.here, box.there)
        by_step.setdefault((box.local_step, box.peer_step), []).append(runs)
    return [(*steps, join_runs(parts)) for steps, parts in by_step.items()]


def build_table(pairing: Pairing, overlaps: Sequence[Overlap], *, before: int = 0) -> SliceTable:
    """Return the slices of one pair of groups with one producer rank.

    Args:
        pairing: The groups.
        overlaps: Parts that their layers have in common.
        before: Slices that the plan has already.

    Raises:
        UnsupportedTopology: `plan-too-fine`.
    """
    _check_fineness(sum(run_count(box.axes, box.element_bytes) for overlap in overlaps for box in overlap.boxes))
    blueprints = [(overlap, _runs_by_step(overlap.boxes)) for overlap in overlaps]
    _check_fineness(
        before + sum(len(runs.here) * len(overlap.places) for overlap, steps in blueprints for _, _, runs in steps)
    )
    parts = [
        _at_places(overlap.places, local_step, peer_step, runs)
        for overlap, steps in blueprints
        for local_step, peer_step, runs in steps
    ]
    return SliceTable(pairing, _join_places(SliceColumns(*(np.concatenate(c) for c in zip(*parts, strict=True)))))


def _at_places(places: Sequence[Place], local_step: int, peer_step: int, runs: Runs) -> SliceColumns:
    """Return the runs of one pair of layouts at every place where the two meet."""
    local_region, local_offset, peer_region, peer_offset = (ints(column) for column in zip(*places, strict=True))
    count = len(places) * len(runs.here)
    return SliceColumns(
        local_region=np.repeat(local_region, len(runs.here)),
        local_offset=flat_outer_sum(local_offset, runs.here),
        local_step=np.full(count, local_step, dtype=np.int64),
        peer_region=np.repeat(peer_region, len(runs.here)),
        peer_offset=flat_outer_sum(peer_offset, runs.there),
        peer_step=np.full(count, peer_step, dtype=np.int64),
        length=flat_outer_sum(np.zeros(len(places), dtype=np.int64), runs.length),
    )


def _join_places(columns: SliceColumns) -> SliceColumns:
    """Join rows that lie in the same two regions with the same steps and touch on both sides."""
    table = columns.take(np.lexsort((columns.local_offset, columns.peer_region, columns.local_region)))
    same = table.local_region, table.peer_region, table.local_step, table.peer_step
    first, length = _joined(table.local_offset, table.peer_offset, table.length, *same)
    return table.take(first)._replace(length=length)


MAX_DESCRIPTORS = (1 << 31) - 1
"""Descriptors in one prepared list: indices are int32."""

MAX_ROWS = 1 << 18
"""Rows of one producer rank beyond which a plan is refused; a peer may claim pages of any number of units."""


@final
@dataclass(frozen=True, slots=True)
class IndexRule:
    """Descriptor numbers of the slices of one pairing on one side.

    Attributes:
        units: Units in a page.
        first: int32 (n,), index of the descriptor of (page 0, unit 0) of each slice.
        is_dense: bool (n,), whether a slice's descriptors follow page by page, and in a page unit by unit; otherwise
            unit by unit, and in a unit page by page.
        pages: int32 (n,), pages of each slice.
    """

    units: int
    first: Indices
    is_dense: Bools
    pages: Indices

    def indices(self, units: Indices) -> Indices:
        """Return the descriptor indices of all slices, slice by slice; int32 (n * len(units),).

        Example: 3 units in a page, 5 pages: unit number 7 is page 2, unit 1. A dense slice has it at first + 7, one in
        rows of 5 pages at first + 1 * 5 + 2.
        """
        out: Indices = self.first[:, None] + units
        if self.units > 1 and (woven := ~self.is_dense).any():
            place = units // self.units + units % self.units * self.pages[woven, None]
            out[woven] = self.first[woven, None] + place
        return out.ravel()


def build_rows(
    regions: Sequence[Region], slices: SideColumns, units: int, first_index: int
) -> tuple[Rows, IndexRule, int]:
    """Return the rows of one side's slices, their index rule, and the number of descriptors up to and with them.

    Args:
        regions: All regions of the side.
        slices: This side of the slices.
        units: Units in a page.
        first_index: Descriptors already in the list.

    Returns:
        uint64 (m, 5) rows with m between n and n * units, the rule, and the running total.

    Raises:
        UnsupportedTopology: `too-many-descriptors` beyond int32, `plan-too-fine` with too many rows.
    """
    region, offset, step, length = slices
    base = np.array([item.base_address for item in regions], dtype=np.uint64)[region]
    stride = np.array([item.page_stride_bytes for item in regions], dtype=np.int64)[region]
    pages = np.array([item.page_count for item in regions], dtype=np.int64)[region]
    device = np.array([item.device for item in regions], dtype=np.uint64)[region]
    is_dense = (step * units == stride) | (units == 1)
    row_counts = np.where(is_dense, 1, units)
    counts = pages * units
    total = _checked_total(first_index, counts, row_counts)
    first = first_index + np.cumsum(counts) - counts
    rule = IndexRule(units, first.astype(np.int32), is_dense, pages.astype(np.int32))
    owner = np.repeat(np.arange(len(length)), row_counts)
    unit = np.arange(len(owner)) - np.repeat(np.cumsum(row_counts) - row_counts, row_counts)
    rows = np.empty((len(owner), 5), dtype=np.uint64)
    rows[:, 0] = base[owner] + (offset[owner] + unit * step[owner]).astype(np.uint64)
    rows[:, 1] = length[owner]
    rows[:, 2] = device[owner]
    rows[:, 3] = np.where(is_dense & (units > 1), step, stride)[owner]
    rows[:, 4] = np.where(is_dense, counts, pages)[owner]
    return rows, rule, total


def _checked_total(first_index: int, counts: Ints, row_counts: Ints) -> int:
    """Return the number of descriptors up to and with these, after checking that they and their rows are not too many."""
    # A count beyond the limit is as bad as any other, and a sum of those would not fit.
    total = first_index + int(np.minimum(counts, MAX_DESCRIPTORS + 1).sum())
    if total > MAX_DESCRIPTORS:
        raise UnsupportedTopology(
            "too-many-descriptors",
            f"The plan needs at least {total} descriptors for one producer rank; indices end at {MAX_DESCRIPTORS}.",
            {"descriptors": total, "limit": MAX_DESCRIPTORS},
        )
    rows = int(row_counts.sum())
    if rows > MAX_ROWS:
        raise UnsupportedTopology(
            "plan-too-fine",
            f"The plan needs {rows} rows for one producer rank (limit {MAX_ROWS}): its pages hold many units that do not "
            "follow each other; use block sizes that are closer to each other.",
            {"rows": rows, "limit": MAX_ROWS},
        )
    return total
