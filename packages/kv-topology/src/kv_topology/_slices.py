"""Byte slices between a local page and a producer's page, for every layer that the two ranks share.

Theory of operation. Every box becomes contiguous runs of bytes, joined where they touch on both sides, once per pair of
layouts. The runs are then placed for all layers at once and joined again, across fields and layers: a page that agrees
on both sides is one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology._arrays import flat_outer_sum, ints
from kv_topology._errors import UnsupportedTopology
from kv_topology._runs import Runs, box_runs, join_runs, run_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Bools, Ints
    from kv_topology._boxes import Box, Overlap, Pairing, Place

__all__ = ["MAX_SLICES", "SideColumns", "SliceColumns", "SliceTable", "build_table"]

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
            f"The layouts of the two sides cut pages into {count} runs (limit {MAX_SLICES}); "
            "use the same layout on both sides or a staged plan.",
            code="plan-too-fine",
            context={"slices": count, "limit": MAX_SLICES},
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
