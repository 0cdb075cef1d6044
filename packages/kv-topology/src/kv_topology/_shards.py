"""Who holds what: even shards of an axis, replicas, and interleaved tokens.

Theory of operation. An axis of `size` parts split over `tp_size` ranks gives rank r the interval
[r*size//tp, (r+1)*size//tp). When there are more ranks than parts, each rank holds one part and neighbouring ranks
share it: rank r holds part r*size//tp. Under context parallelism the tokens are dealt out instead: runs of
`interleave` tokens go to the ranks in turn, and each rank packs its runs densely. Both rules are pure arithmetic, so
every rank can tell what every other rank holds without asking.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from kv_topology._arrays import Bools, Ints

__all__ = ["TokenDeal", "common_unit_tokens", "even_interval", "home_ranks", "tokens_meet"]


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


def home_ranks(consumer_tp: int, consumer_rank: int, producer_tp: int) -> range:
    """Return the producer ranks that lie across from a consumer rank when both engines fill the same line.

    For divisible sizes these are the ranks that vLLM's own connector pairs: one rank when the consumer has at least
    as many ranks, otherwise a run of producer_tp // consumer_tp ranks.
    """
    start = consumer_rank * producer_tp // consumer_tp
    stop = -(-(consumer_rank + 1) * producer_tp // consumer_tp)
    return range(start, stop)


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


def common_unit_tokens(local_page_tokens: int, peer_page_tokens: int, local: TokenDeal, peer: TokenDeal) -> int:
    """Return the largest run of tokens that never crosses a page or a turn on either side."""
    unit = gcd(local_page_tokens, peer_page_tokens)
    for deal in (local, peer):
        if deal.size > 1:
            unit = gcd(unit, deal.interleave_tokens)
    return unit


def tokens_meet(local: TokenDeal, peer: TokenDeal) -> float:
    """Return the share of all tokens that both ranks hold, 0.0 when they never meet.

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
