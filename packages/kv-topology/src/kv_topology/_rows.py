"""Strided descriptor rows, and where each slice's descriptors are in the prepared list.

Theory of operation. A row (address, length, device, stride, count) stands for `count` descriptors. A slice of a page
with one unit is one row over all pages. With several units, pages whose units follow each other without a gap are still
one row (the stride is the unit's); otherwise each unit position has its own row. In both cases the descriptor of a unit
is its slice's first index plus a number that all such slices share, so block ids become indices by one outer sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast, final

import numpy as np

from kv_topology._errors import UnsupportedTopology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Bools, Indices, Ints, Rows
    from kv_topology._model import Region
    from kv_topology._slices import SideColumns


__all__ = ["MAX_DESCRIPTORS", "IndexRule", "build_rows", "expand_rows"]

MAX_DESCRIPTORS = (1 << 31) - 1
"""Descriptors in one prepared list: indices are int32."""

MAX_ROWS = 1 << 18
"""Rows of one producer rank beyond which a plan is refused; a peer may claim pages of any number of units."""


@final
@dataclass(frozen=True)
class IndexRule:
    """Descriptor numbers of the slices of one pairing on one side.

    Attributes:
        units: Units in a page.
        first: int64 (n,), index of the descriptor of (page 0, unit 0) of each slice.
        is_dense: bool (n,), whether a slice's descriptors follow page by page, and in a page unit by unit; otherwise
            unit by unit, and in a unit page by page.
        pages: int64 (n,), pages of each slice.
    """

    units: int
    first: Ints
    is_dense: Bools
    pages: Ints

    @cached_property
    def _first_indices(self) -> Indices:
        return self.first.astype(np.int32)[:, None]

    @cached_property
    def _woven(self) -> list[tuple[int, Ints]]:
        """(Pages, slices) of the slices that are not dense."""
        counts = np.unique(self.pages[~self.is_dense]).tolist()
        return [(count, np.flatnonzero(~self.is_dense & (self.pages == count))) for count in counts]

    def fill(self, out: Indices, units: Indices) -> None:
        """Write the descriptor index of every slice (row) and unit number (column); out is int32 (n, len(units)).

        Example: 3 units in a page, 5 pages: unit number 7 is page 2, unit 1. A dense slice has it at first + 7, one in
        rows of 5 pages at first + 1 * 5 + 2.
        """
        if self.is_dense.any():
            np.add(self._first_indices, units, out=out)
        for pages, chosen in self._woven:
            place = units // self.units + (units % self.units) * pages
            out[chosen] = self._first_indices[chosen] + place

    def indices(self, units: Indices) -> Indices:
        """Return the descriptor indices of all slices, slice by slice; int32 (n * len(units),)."""
        if not self._woven:  # a new array is a fifth faster than one that was made before
            return cast("Indices", (self._first_indices + units).ravel())
        out = np.empty((len(self.first), len(units)), dtype=np.int32)
        self.fill(out, units)
        return out.ravel()

    def page_and_unit(self, slot: int, index: int) -> tuple[int, int]:
        """Return the page and the unit of a descriptor of one slice; undoes `fill`."""
        inside = index - int(self.first[slot])
        if self.is_dense[slot]:
            return divmod(inside, self.units)
        unit, page = divmod(inside, int(self.pages[slot]))
        return page, unit


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
    rule = IndexRule(units, first, is_dense, pages)
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
            f"The plan needs at least {total} descriptors for one producer rank; indices end at {MAX_DESCRIPTORS}.",
            code="too-many-descriptors",
            context={"descriptors": total, "limit": MAX_DESCRIPTORS},
        )
    rows = int(row_counts.sum())
    if rows > MAX_ROWS:
        raise UnsupportedTopology(
            f"The plan needs {rows} rows for one producer rank (limit {MAX_ROWS}): its pages hold many units that do not "
            "follow each other; use block sizes that are closer to each other.",
            code="plan-too-fine",
            context={"rows": rows, "limit": MAX_ROWS},
        )
    return total


def expand_rows(rows: Rows) -> Rows:
    """Return the (address, length, device) descriptor of every place of strided rows, in index order.

    For NIXL before 1.5, which knows no strides. Costs memory per descriptor; the strided form does not.

    Args:
        rows: uint64 (n, 5), as `local_rows` and `peer_rows` return them.

    Returns:
        uint64 (sum of counts, 3).
    """
    counts = rows[:, 4].astype(np.int64)
    owner = np.repeat(np.arange(len(rows)), counts)
    place = np.arange(len(owner), dtype=np.uint64) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.uint64)
    out: Rows = np.ascontiguousarray(rows[owner, :3])
    out[:, 0] += place * rows[owner, 3]
    return out
