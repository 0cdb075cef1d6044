"""Byte slices between a local and a producer's page, and the strided descriptor rows that stand for them in all pages.

Theory of operation. A box has axes (count, stride here, stride there). Starting from one element, an axis whose stride
equals the run on *both* sides makes the run `count` times longer; what cannot be absorbed is enumerated. Runs of a pair
of layouts are joined where they touch on both sides, then placed for all layers at once and joined again, across fields
and layers: a page that agrees on both sides is one slice.

A row (address, length, device, stride, count) stands for `count` descriptors. A slice of a page with one unit is one row
over all pages. With several units, pages whose units follow each other without a gap are still one row (the stride is the
unit's); otherwise each unit position has its own row. In both cases the descriptor of a unit is its slice's first index
plus a number that all such slices share, so block ids become indices by one outer sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology.arithmetic import Runs, box_runs, flat_outer_sum, ints, run_count
from kv_topology.errors import UnsupportedTopology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology.arithmetic import Bools, Indices, Ints, Rows
    from kv_topology.model import Region
    from kv_topology.plan.boxes import Box, Overlap, Pairing, Place

__all__ = [
    "MAX_DESCRIPTORS",
    "MAX_ROWS",
    "MAX_SLICES",
    "IndexRule",
    "SideColumns",
    "SliceColumns",
    "SliceTable",
    "build_rows",
    "build_table",
    "join_runs",
]


def join_runs(runs: Sequence[Runs]) -> Runs:
    """Return all runs as one table, sorted by `here`, in which neighbours on both sides are joined."""
    here = np.concatenate([table.here for table in runs])
    there = np.concatenate([table.there for table in runs])
    length = np.concatenate([table.length for table in runs])
    order = np.argsort(here, kind="stable")
    here, there, length = here[order], there[order], length[order]
    starts = np.ones(len(here), dtype=np.bool_)
    starts[1:] = (here[1:] != here[:-1] + length[:-1]) | (there[1:] != there[:-1] + length[:-1])
    first = np.flatnonzero(starts)
    return Runs(here[first], there[first], np.add.reduceat(length, first))


MAX_SLICES = 1 << 18
"""Slices of one plan, over all producer ranks and groups, beyond which it is refused."""


class SideColumns(NamedTuple):
    """Columns of one side of a slice table, each int64 (n,) with one entry per slice.

    Attributes:
        region: Region number.
        offset: Byte offset in a page, of the page's first unit.
        step: Bytes from one unit to the next inside a page.
        length: Bytes of the slice.
    """

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
        before + sum(len(runs) * len(overlap.places) for overlap, steps in blueprints for _, _, runs in steps)
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
    count = len(places) * len(runs)
    return SliceColumns(
        local_region=np.repeat(local_region, len(runs)),
        local_offset=flat_outer_sum(local_offset, runs.here),
        local_step=np.full(count, local_step, dtype=np.int64),
        peer_region=np.repeat(peer_region, len(runs)),
        peer_offset=flat_outer_sum(peer_offset, runs.there),
        peer_step=np.full(count, peer_step, dtype=np.int64),
        length=flat_outer_sum(np.zeros(len(places), dtype=np.int64), runs.length),
    )


def _join_places(columns: SliceColumns) -> SliceColumns:
    """Join rows that lie in the same two regions with the same steps and touch on both sides."""
    table = columns.take(np.lexsort((columns.local_offset, columns.peer_region, columns.local_region)))
    starts = np.ones(len(table.length), dtype=np.bool_)
    starts[1:] = (
        (np.diff(table.local_region) != 0)
        | (np.diff(table.peer_region) != 0)
        | (np.diff(table.local_step) != 0)
        | (np.diff(table.peer_step) != 0)
        | (table.local_offset[1:] != table.local_offset[:-1] + table.length[:-1])
        | (table.peer_offset[1:] != table.peer_offset[:-1] + table.length[:-1])
    )
    first = np.flatnonzero(starts)
    return table.take(first)._replace(length=np.add.reduceat(table.length, first))


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
        woven = ~self.is_dense
        if woven.any():
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
