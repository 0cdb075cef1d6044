"""Pure arithmetic: the even split of an axis, replicas, interleaved tokens, and the runs of strided boxes.

Theory of operation. An axis of `size` parts split over `tp_size` ranks gives rank r the interval
[r*size//tp, (r+1)*size//tp). When there are more ranks than parts, each rank holds one part and neighbouring ranks
share it: rank r holds part r*size//tp. Under context parallelism the tokens are dealt out instead: runs of
`interleave` tokens go to the ranks in turn, and each rank packs its runs densely. Both rules are pure arithmetic, so
every rank can tell what every other rank holds without asking.

A box has axes (count, stride here, stride there). Starting from one element, an axis whose stride equals the run on *both*
sides makes the run `count` times longer; what cannot be absorbed is enumerated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Bools",
    "BoxAxis",
    "Indices",
    "Ints",
    "Rows",
    "Runs",
    "TokenDeal",
    "box_runs",
    "count_up",
    "even_interval",
    "flat_outer_sum",
    "holders",
    "ints",
    "run_count",
    "tokens_meet",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]


def ints(values: Sequence[int]) -> Ints:
    """Return values as int64 (n,)."""
    return np.array(values, dtype=np.int64)


def count_up(count: int) -> Ints:
    """Return 0, 1, ... count-1 as int64 (n,)."""
    return np.arange(count, dtype=np.int64)


def flat_outer_sum(rows: Ints, columns: Ints) -> Ints:
    """Return all sums as int64 (len(rows) * len(columns),), row by row."""
    return (rows[:, None] + columns[None, :]).ravel()


def even_interval(size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return the half-open interval of an axis that one rank holds.

    Args:
        size: Parts of the whole axis (heads, channels, ...), at least 1.
        tp_size: Ranks that share the axis, at least 1.
        tp_rank: The rank asked about, 0 <= tp_rank < tp_size.

    Returns:
        (start, stop); ranks beyond `size` share parts, so the intervals of different ranks may be equal.
    """
    start = tp_rank * size // tp_size
    return start, max(start + 1, (tp_rank + 1) * size // tp_size)


def holders(size: int, tp_size: int, part: int) -> range:
    """Return the ranks whose `even_interval` holds one part of an axis.

    Example: 2 heads over 5 ranks give the intervals [0,1) [0,1) [0,1) [1,2) [1,2), so head 1 is held by ranks 3 and 4;
    8 heads over 4 ranks give head 5 to rank 2 alone.
    """
    if size >= tp_size:
        rank = ((part + 1) * tp_size - 1) // size
        return range(rank, rank + 1)
    return range(-(-part * tp_size // size), -(-(part + 1) * tp_size // size))


@final
@dataclass(frozen=True, slots=True)
class TokenDeal:
    """How a token sequence is dealt over the ranks of a context-parallel group.

    Attributes:
        size: Ranks in the group; 1 means that every rank has every token.
        rank: This rank's place in it.
        interleave_tokens: Tokens per turn.
    """

    size: int = 1
    rank: int = 0
    interleave_tokens: int = 1

    def spread(self, packed: Ints, unit_tokens: int) -> Ints:
        """Return the global unit numbers of places in this rank's own dense sequence of units; undoes `packed`."""
        if self.size == 1:
            return packed
        turn = self.interleave_tokens // unit_tokens
        return (packed // turn) * (turn * self.size) + self.rank * turn + packed % turn

    def owned(self, units: Ints, unit_tokens: int) -> Bools:
        """Return which of the unit numbers (units of `unit_tokens` global tokens) this rank holds."""
        if self.size == 1:
            return np.ones(units.shape, dtype=np.bool_)
        turn = self.interleave_tokens // unit_tokens
        return np.equal((units // turn) % self.size, self.rank)

    def packed(self, units: Ints, unit_tokens: int) -> Ints:
        """Return the place of owned global units in this rank's own dense sequence of units."""
        if self.size == 1:
            return units
        turn = self.interleave_tokens // unit_tokens
        return (units // (turn * self.size)) * turn + units % turn


def tokens_meet(local: TokenDeal, peer: TokenDeal) -> float:
    """Return the share of all tokens that both ranks hold, 0.0 when they share none.

    Worked out without counting tokens: a peer may claim turns of any length.
    """
    turn, peer_turn = local.interleave_tokens, peer.interleave_tokens
    cycle, peer_cycle = turn * local.size, peer_turn * peer.size
    grain = gcd(cycle, peer_cycle)
    # Over both cycles, a turn here begins at every distance from the peer's that is `shift` modulo `grain`, each once.
    # So of every token of the peer's turn it holds `whole` copies, and one more of those within `rest` of the shift.
    shift = (local.rank * turn - peer.rank * peer_turn) % grain
    whole, rest = divmod(turn, grain)
    peer_whole, peer_rest = divmod(peer_turn, grain)
    both = sum(max(0, min(peer_rest, start + rest) - max(0, start)) for start in (shift, shift - grain))
    return (whole * peer_turn + rest * peer_whole + both) / lcm(cycle, peer_cycle)


BoxAxis = tuple[int, int, int]
"""(count, stride in bytes here, stride in bytes there)."""


class Runs(NamedTuple):
    """Columns of equal-length arrays: one contiguous run of bytes per row, here and there.

    Attributes:
        here: int64 (n,), offset of the run on this side.
        there: int64 (n,), offset on the other side.
        length: int64 (n,), bytes.
    """

    here: Ints
    there: Ints
    length: Ints


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
