"""Staged plans: read a producer's pages as they are and put the bytes in order here, when a direct plan is too fine.

Theory of operation. A direct plan needs one descriptor per run of bytes that is contiguous on *both* sides; heads-first
against tokens-first leaves runs of one head and token. A staged plan needs runs that are contiguous at the *producer*
only: they are read into the local page itself, one after the other, unit by unit and producer by producer, so that they
fill exactly the bytes that the page's fields take. Afterwards each page is permuted in place: copied aside, and written
back from the producer's order of strides to ours. The permutation is data (`PageMove`); who executes it is not ours.

This works when the fields of a page leave no gap and no tokens are dealt out; otherwise the plan stays direct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import ints
from kv_topology._slices import SliceTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._boxes import Box, Overlap, Pairing

    Rank = tuple[int, int]
    Overlaps = Sequence[tuple[Pairing, Sequence[Overlap]]]

__all__ = ["CostModel", "PageMove", "StagedRegion", "stage"]


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """What a transfer costs; the defaults are of one host over shared memory, measure yours.

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

    def direct_us(self, descriptors: float, moved_bytes: float) -> float:
        """Return the time of a transfer in microseconds."""
        return descriptors * self.descriptor_us + moved_bytes / self.bandwidth_gb_s / 1e3

    def permute_us(self, regions: int, moved_bytes: float) -> float:
        """Return the time of putting bytes in order in microseconds."""
        return regions * self.permute_launch_us + moved_bytes / self.permute_gb_s / 1e3


@final
@dataclass(frozen=True, slots=True)
class PageMove:
    """One strided copy inside a page: cell (i, j, ...) goes from source to target, all in bytes.

    Attributes:
        shape: Number of cells along each axis; the first axis is the page's units.
        element_bytes: Bytes of a cell.
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
        stop: One past the last.
        moves: Copies from the received page (set aside first) to the final one; together they fill [start, stop).
    """

    region: int
    group: int
    start: int
    stop: int
    moves: tuple[PageMove, ...]


@final
class _Bay:
    """One region and group: collects the peer-contiguous chunks of all producers, then hands out their places."""

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.unit_bytes = 0
        self.start: int | None = None
        self.stop = 0
        self.covered = 0
        self.moves: list[PageMove] = []

    def span(self, table: SliceTable, chosen: np.ndarray) -> None:
        """Take in the local bytes that a producer's slices fill."""
        units = self.pairing.local_units
        offset, length, step = table.local_offset[chosen], table.length[chosen], table.local_step[chosen]
        low, high = int(offset.min()), int((offset + (units - 1) * step + length).max())
        self.start = low if self.start is None else min(self.start, low)
        self.stop = max(self.stop, high)
        self.covered += int(length.sum()) * units


def _chunks(table: SliceTable, chosen: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Return (peer region, peer offset, peer step, bytes) of the runs that are contiguous at the producer."""
    rows = sorted(
        zip(
            table.peer_region[chosen].tolist(),
            table.peer_step[chosen].tolist(),
            table.peer_offset[chosen].tolist(),
            table.length[chosen].tolist(),
            strict=True,
        )
    )
    chunks: list[tuple[int, int, int, int]] = []
    for region, step, offset, length in rows:
        if chunks and chunks[-1][:1] + chunks[-1][2:3] == (region, step) and chunks[-1][1] + chunks[-1][3] == offset:
            chunks[-1] = (region, chunks[-1][1], step, chunks[-1][3] + length)
        else:
            chunks.append((region, offset, step, length))
    return chunks


def _open_bays(tables: Sequence[SliceTable]) -> dict[tuple[int, int], _Bay] | None:
    """Return the bytes that all producers fill in the pages of each region, None if gaps or dealt tokens forbid it."""
    bays: dict[tuple[int, int], _Bay] = {}
    for table in tables:
        if table.pairing.local.deal.size > 1 or table.pairing.peer.deal.size > 1:
            return None
        for region in np.unique(table.local_region).tolist():
            bay = bays.setdefault((region, table.pairing.local_group), _Bay(table.pairing))
            bay.span(table, table.local_region == region)
    for bay in bays.values():
        if bay.start is None or bay.stop - bay.start != bay.covered:
            return None
        bay.unit_bytes = bay.covered // bay.pairing.local_units
    return bays


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
    filled = dict.fromkeys(bays, 0)
    staged: dict[Rank, list[SliceTable]] = {}
    for rank, group_tables in tables.items():
        boxes = {(p.local_group, p.peer_group): found for p, found in overlaps[rank]}
        staged[rank] = []
        for table in group_tables:
            done: SliceTable | None = table
            if not table.pairing.local.is_state:
                found = boxes[table.pairing.local_group, table.pairing.peer_group]
                done = _stage_table(table, found, bays, filled)
            if done is None:
                return None
            staged[rank].append(done)
    regions = tuple(
        StagedRegion(region, group, bay.start or 0, bay.stop, tuple(bay.moves))
        for (region, group), bay in sorted(bays.items())
    )
    return staged, regions


def _stage_table(
    table: SliceTable,
    overlaps: Sequence[Overlap],
    bays: Mapping[tuple[int, int], _Bay],
    filled: dict[tuple[int, int], int],
) -> SliceTable | None:
    """Give every chunk of one producer a place in its page, and note the moves of its boxes.

    Returns None if a box is spread over several chunks, so that its cells do not keep the producer's strides.
    """
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    group = table.pairing.local_group
    for region in np.unique(table.local_region).tolist():
        bay, key = bays[region, group], (region, group)
        places: list[tuple[int, int, int, int]] = []
        for peer_region, offset, step, length in _chunks(table, table.local_region == region):
            place = (bay.start or 0) + filled[key]
            local_step = bay.unit_bytes if table.pairing.local_units > 1 else 0
            rows.append((region, place, local_step, peer_region, offset, step, length))
            places.append((peer_region, offset, length, place))
            filled[key] += length
        for overlap in overlaps:
            for local_region, local_offset, peer_region, peer_offset in overlap.places:
                if local_region == region:
                    for box in overlap.boxes:
                        there = peer_offset + box.there
                        source = _place_of(places, peer_region, there, there + _extent(box))
                        if source is None:
                            return None
                        bay.moves.append(_move(box, bay, source, local_offset + box.here))
    columns = [ints(list(column)) for column in zip(*rows, strict=True)]
    return SliceTable(table.pairing, *columns)


def _extent(box: Box) -> int:
    """Return the bytes from a box's first cell to the end of its last one at the producer."""
    return sum((count - 1) * stride for count, _, stride in box.axes) + box.element_bytes


def _place_of(places: Sequence[tuple[int, int, int, int]], region: int, start: int, stop: int) -> int | None:
    """Return where a stretch of the producer's page lies in the received page, None if no chunk holds all of it."""
    for peer_region, offset, length, place in places:
        if peer_region == region and offset <= start and stop <= offset + length:
            return place + start - offset
    return None


def _move(box: Box, bay: _Bay, source: int, target: int) -> PageMove:
    return PageMove(
        (bay.pairing.local_units, *(axis[0] for axis in box.axes)),
        box.element_bytes,
        source,
        (bay.unit_bytes, *(axis[2] for axis in box.axes)),
        target,
        (box.local_step, *(axis[1] for axis in box.axes)),
    )
