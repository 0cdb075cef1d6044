"""Which producer rank each part of a field is read from, and who notifies whom.

Theory of operation. Along its split axis a field falls into pieces at the borders of all producer ranks; every rank
that holds a piece is a candidate for it, separately for each context-parallel share of the tokens. Of the candidates a
consumer takes the first one across from it (`home_ranks`), or else the nearest; so replicas are shared out evenly, and
divisible pairs get exactly the ranks that vLLM's own connector reads. A producer rank that nobody reads is notified by
the consumer across from it, because it waits for a completion all the same. The rules need no message: every rank
computes every other rank's choice, and so knows how many readers a producer rank has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import final

from kv_topology._errors import UnsupportedTopology
from kv_topology._shards import TokenDeal, even_interval, home_ranks, tokens_meet

__all__ = ["FieldClass", "Piece", "choose_pieces", "notify_home", "ranks_read"]


@final
@dataclass(frozen=True, slots=True)
class FieldClass:
    """All that the choice of a producer depends on: fields of one class are read alike.

    Attributes:
        parts: Size of the split axis, 1 when every rank holds the whole field.
        consumer_context: Context-parallel size of the consumer's group.
        consumer_interleave: Its tokens per turn.
        producer_context: The same of the producer's group.
        producer_interleave: Its tokens per turn.
    """

    parts: int
    consumer_context: int
    consumer_interleave: int
    producer_context: int
    producer_interleave: int


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of the split axis and the producer rank to read it from."""

    producer: int
    start: int
    stop: int


def _borders(parts: int, tp_size: int, start: int, stop: int) -> list[int]:
    """Return the cut points of [start, stop) at the borders of all ranks' intervals."""
    inner = (even_interval(parts, tp_size, rank)[0] for rank in range(tp_size))
    return [start, *sorted({border for border in inner if start < border < stop}), stop]


def _pick(candidates: list[int], home: range) -> int:
    """Return the first candidate across from the consumer, else the one nearest to it."""
    across = [rank for rank in candidates if rank in home]
    return across[0] if across else min(candidates, key=lambda rank: (abs(2 * rank - home[0] - home[-1]), rank))


@lru_cache(maxsize=4096)
def choose_pieces(kind: FieldClass, consumer_tp: int, consumer_rank: int, producer_tp: int) -> tuple[Piece, ...]:
    """Return the pieces that one consumer rank reads, sorted by producer, then by interval.

    With context parallelism on the producer's side a piece is repeated per share of the tokens, each with its own rank.

    Args:
        kind: The field's class.
        consumer_tp: Tensor-parallel size of the consumer.
        consumer_rank: The consumer's rank.
        producer_tp: Tensor-parallel size of the producer.

    Raises:
        UnsupportedTopology: `no-producer-holds` when context parallelism leaves a share of the tokens without a rank.
    """
    start, stop = even_interval(kind.parts, consumer_tp, consumer_rank)
    home = home_ranks(consumer_tp, consumer_rank, producer_tp)
    mine = TokenDeal(kind.consumer_context, consumer_rank % kind.consumer_context, kind.consumer_interleave)
    chosen: list[Piece] = []
    borders = _borders(kind.parts, producer_tp, start, stop)
    for low, high in pairwise(borders):
        for share in range(kind.producer_context):
            theirs = TokenDeal(kind.producer_context, share, kind.producer_interleave)
            if tokens_meet(mine, theirs) == 0.0:
                continue
            candidates = [
                rank
                for rank in range(share, producer_tp, kind.producer_context)
                if _covers(even_interval(kind.parts, producer_tp, rank), low, high)
            ]
            if not candidates:
                raise UnsupportedTopology(
                    f"No producer rank of {producer_tp} holds parts [{low}, {high}) of {kind.parts} for share {share} "
                    f"of {kind.producer_context} of the tokens; its context parallelism exceeds its replicas.",
                    code="no-producer-holds",
                    fault="peer",
                    context={"start": low, "stop": high, "share": share, "producer_tp": producer_tp},
                )
            chosen.append(Piece(_pick(candidates, home), low, high))
    return tuple(sorted(chosen, key=lambda piece: (piece.producer, piece.start)))


def _covers(held: tuple[int, int], low: int, high: int) -> bool:
    return held[0] <= low and high <= held[1]


def ranks_read(kinds: frozenset[FieldClass], consumer_tp: int, consumer_rank: int, producer_tp: int) -> frozenset[int]:
    """Return the producer ranks that a consumer rank reads for fields of any of these classes."""
    return frozenset(
        piece.producer for kind in kinds for piece in choose_pieces(kind, consumer_tp, consumer_rank, producer_tp)
    )


def notify_home(consumer_tp: int, producer_tp: int, producer_rank: int) -> int:
    """Return the consumer rank that notifies a producer rank which nobody reads."""
    return producer_rank * consumer_tp // producer_tp
