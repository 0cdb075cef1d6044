"""Byte slices between a local page and a producer's page, for every layer that the two ranks share.

Theory of operation. Every box becomes contiguous runs of bytes, joined where they touch on both sides, once per pair of
layouts. The runs are then placed for all layers at once and joined again, across fields and layers: a page that agrees
on both sides is one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import grid
from kv_topology._errors import UnsupportedTopology
from kv_topology._runs import Runs, box_runs, join_runs, run_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Ints
    from kv_topology._boxes import Box, Overlap, Pairing

__all__ = ["MAX_SLICES", "SliceTable", "build_table"]

MAX_SLICES = 1 << 22
"""Slices of one producer rank and group beyond which a plan is refused."""


@final
@dataclass(frozen=True, slots=True)
class SliceTable:
    """Slices of one pairing with one producer rank, one per row; all columns int64 (n,).

    Attributes:
        pairing: The groups and their unit.
        local_region: Region number here.
        local_offset: Byte offset in a local page, of the page's first unit.
        local_step: Bytes from one unit to the next inside a local page.
        peer_region: Region number at the peer.
        peer_offset: Byte offset in a peer page.
        peer_step: Bytes from one unit to the next inside a peer page.
        length: Bytes of the slice.
    """

    pairing: Pairing
    local_region: Ints
    local_offset: Ints
    local_step: Ints
    peer_region: Ints
    peer_offset: Ints
    peer_step: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)


def _check_fineness(count: int) -> None:
    if count > MAX_SLICES:
        raise UnsupportedTopology(
            f"The layouts of the two sides cut every page into {count} runs (limit {MAX_SLICES}); "
            "use the same layout on both sides or a staged plan.",
            code="plan-too-fine",
            context={"slices": count, "limit": MAX_SLICES},
        )


def _runs_by_step(boxes: Sequence[Box]) -> list[tuple[int, int, Runs]]:
    """Return (local step, peer step, joined runs) of the boxes of one pair of layouts."""
    _check_fineness(sum(run_count(box.axes, box.element_bytes) for box in boxes))
    by_step: dict[tuple[int, int], list[Runs]] = {}
    for box in boxes:
        runs = box_runs(box.axes, box.element_bytes, box.here, box.there)
        by_step.setdefault((box.local_step, box.peer_step), []).append(runs)
    return [(*steps, join_runs(parts)) for steps, parts in by_step.items()]


def build_table(pairing: Pairing, overlaps: Sequence[Overlap]) -> SliceTable:
    """Return the slices of one pair of groups with one producer rank.

    Raises:
        UnsupportedTopology: `plan-too-fine`.
    """
    blueprints = [(overlap, _runs_by_step(overlap.boxes)) for overlap in overlaps]
    _check_fineness(sum(len(runs) * len(overlap.places) for overlap, steps in blueprints for _, _, runs in steps))
    columns: list[Ints] = [np.empty((7, 0), dtype=np.int64)]
    for overlap, steps in blueprints:
        at = np.array(overlap.places, dtype=np.int64)
        for local_step, peer_step, runs in steps:
            part = np.empty((7, len(at), len(runs)), dtype=np.int64)
            part[0] = at[:, 0, None]
            part[1] = at[:, 1, None] + runs.here
            part[2] = local_step
            part[3] = at[:, 2, None]
            part[4] = at[:, 3, None] + runs.there
            part[5] = peer_step
            part[6] = runs.length
            columns.append(grid(part, 7, len(at) * len(runs)))
    return SliceTable(pairing, *_join_places(np.concatenate(columns, axis=1)))


def _join_places(table: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Join rows that lie in the same two regions with the same steps and touch on both sides."""
    order = np.lexsort((table[1], table[3], table[0]))
    table = table[:, order]
    region, offset, step, peer_region, peer_offset, peer_step, length = table
    starts = np.ones(table.shape[1], dtype=np.bool_)
    starts[1:] = (
        (np.diff(region) != 0)
        | (np.diff(peer_region) != 0)
        | (np.diff(step) != 0)
        | (np.diff(peer_step) != 0)
        | (offset[1:] != offset[:-1] + length[:-1])
        | (peer_offset[1:] != peer_offset[:-1] + length[:-1])
    )
    first = np.flatnonzero(starts)
    joined = table[:, first]
    joined[6] = np.add.reduceat(length, first)
    return joined[0], joined[1], joined[2], joined[3], joined[4], joined[5], joined[6]
