"""Contiguous byte runs of a box that lies in memory twice, with different strides.

Theory of operation. A box has axes (count, stride here, stride there). Starting from one element, an axis whose stride
equals the run on *both* sides makes the run `count` times longer; what cannot be absorbed is enumerated. Afterwards,
runs of different boxes that are neighbours on both sides are joined, so a whole page that agrees becomes one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import count_up, flat_outer_sum, ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Ints

__all__ = ["BoxAxis", "Runs", "box_runs", "join_runs", "run_count"]

BoxAxis = tuple[int, int, int]
"""(count, stride in bytes here, stride in bytes there)."""


@final
class Runs:
    """Columns of equal-length arrays: one contiguous run of bytes per row, here and there.

    Attributes:
        here: int64 (n,), offset of the run on this side.
        there: int64 (n,), offset on the other side.
        length: int64 (n,), bytes.
    """

    __slots__ = ("here", "length", "there")

    def __init__(self, here: Ints, there: Ints, length: Ints) -> None:
        self.here = here
        self.there = there
        self.length = length

    def __len__(self) -> int:
        return len(self.here)


def _coalesce(axes: Sequence[BoxAxis], element_bytes: int) -> tuple[int, list[BoxAxis]]:
    """Absorb axes into one run; return its bytes and the axes left to enumerate, in their given order."""
    run_bytes = element_bytes
    rest = [axis for axis in axes if axis[0] != 1]
    while True:
        found = next((axis for axis in rest if axis[1] == run_bytes and axis[2] == run_bytes), None)
        if found is None:
            return run_bytes, rest
        rest.remove(found)
        run_bytes *= found[0]


def run_count(axes: Sequence[BoxAxis], element_bytes: int) -> int:
    """Return how many runs a box has, without building them."""
    count = 1
    for axis in _coalesce(axes, element_bytes)[1]:
        count *= axis[0]
    return count


def box_runs(axes: Sequence[BoxAxis], element_bytes: int, here: int, there: int) -> Runs:
    """Return the runs of one box in the order of its axes, the first axis outermost.

    Args:
        axes: Axes of the box.
        element_bytes: Size of one element.
        here: Offset of the first element on this side.
        there: Offset of the first element on the other side.
    """
    run_bytes, rest = _coalesce(axes, element_bytes)
    here_offsets, there_offsets = ints([here]), ints([there])
    for count, here_stride, there_stride in rest:
        here_offsets = flat_outer_sum(here_offsets, count_up(count) * here_stride)
        there_offsets = flat_outer_sum(there_offsets, count_up(count) * there_stride)
    return Runs(here_offsets, there_offsets, np.full(len(here_offsets), run_bytes, dtype=np.int64))


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
