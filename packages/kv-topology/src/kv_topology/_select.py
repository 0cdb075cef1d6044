"""Choice of producer ranks: from which rank each part of a field is read, and which rank notifies one without readers.

Theory of operation. Along its split axis a field falls into pieces at the borders of all producer ranks; every rank
that holds a piece is a candidate for it, separately for each context-parallel share of the tokens. The m consumer ranks
that need a piece are spread evenly over its n candidates: the k-th of them reads candidate k * n // m. Divisible pairs
thereby get exactly the ranks that vLLM's own connector reads. A producer rank without readers still waits for a
completion, so the consumer rank across from it notifies it. The rules need no message: every rank computes every
other rank's choice, and so knows how many readers a producer rank has. Validation holds every geometry to the shards
that they assume.

Worked example. Two KV heads, 4 consumer ranks, 6 producer ranks. Producer ranks 0, 1, 2 hold head 0 and 3, 4, 5 head 1;
consumer ranks 0, 1 need head 0 and 2, 3 head 1. So m = 2 and n = 3: consumers 0 and 1 read candidates 0 * 3 // 2 = 0
and 1 * 3 // 2 = 1, and consumers 2 and 3 read ranks 3 and 4. Ranks 2 and 5 are notified by consumers 2 * 4 // 6 = 1 and
5 * 4 // 6 = 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import final

from kv_topology._errors import UnsupportedTopology
from kv_topology._shards import TokenDeal, even_interval, holders, tokens_meet

__all__ = ["FieldClass", "Piece", "choose_pieces", "notify_home", "ranks_read"]


@final
@dataclass(frozen=True, slots=True)
class FieldClass:
    """Everything that the choice of a producer depends on: fields of one class are read from the same ranks.

    Attributes:
        parts: Size of the split axis, 1 when every rank holds the whole field.
        consumer_context: Context-parallel size of the consumer's group.
        consumer_interleave: Its tokens per turn.
        producer_context: The same of the producer's group.
        producer_interleave: Its tokens per turn; 0 when it is not known yet, so that any two shares may meet.
    """

    parts: int
    consumer_context: int
    consumer_interleave: int
    producer_context: int
    producer_interleave: int

    def meets(self, consumer_rank: int, share: int) -> bool:
        """Return whether a consumer rank needs tokens of one context-parallel share of the producer."""
        if not self.producer_interleave:
            return True
        mine = TokenDeal(self.consumer_context, consumer_rank % self.consumer_context, self.consumer_interleave)
        return tokens_meet(mine, TokenDeal(self.producer_context, share, self.producer_interleave)) > 0.0


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """An interval of the split axis and the producer rank to read it from."""

    producer: int
    start: int
    stop: int


def _borders(parts: int, tp_size: int, start: int, stop: int) -> list[int]:
    """Return the cut points of [start, stop) at the borders of all ranks' intervals."""
    first, last = holders(parts, tp_size, start), holders(parts, tp_size, stop - 1)
    inner = {even_interval(parts, tp_size, rank)[0] for rank in range(first[-1] + 1, last[-1] + 1)}
    return [start, *sorted(border for border in inner if start < border < stop), stop]


@lru_cache(maxsize=1 << 14)
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
    shares = [share for share in range(kind.producer_context) if kind.meets(consumer_rank, share)]
    chosen: list[Piece] = []
    for low, high in pairwise(_borders(kind.parts, producer_tp, start, stop)):
        sharers, holding = holders(kind.parts, consumer_tp, low), holders(kind.parts, producer_tp, low)
        for share in shares:
            offset = (share - holding.start) % kind.producer_context
            candidates = holding[offset :: kind.producer_context]
            if not candidates:
                raise UnsupportedTopology(
                    f"No producer rank of {producer_tp} holds parts [{low}, {high}) of {kind.parts} for share {share} "
                    f"of {kind.producer_context} of the tokens; its context parallelism exceeds its replicas.",
                    code="no-producer-holds",
                    fault="peer",
                    context={"start": low, "stop": high, "share": share, "producer_tp": producer_tp},
                )
            place = (consumer_rank - sharers.start) * len(candidates) // len(sharers)
            chosen.append(Piece(candidates[place], low, high))
    return tuple(sorted(chosen, key=lambda piece: (piece.producer, piece.start)))


def ranks_read(kinds: frozenset[FieldClass], consumer_tp: int, consumer_rank: int, producer_tp: int) -> frozenset[int]:
    """Return the producer ranks that a consumer rank reads for fields of any of these classes."""
    return frozenset(
        piece.producer for kind in kinds for piece in choose_pieces(kind, consumer_tp, consumer_rank, producer_tp)
    )


def notify_home(consumer_size: int, producer_size: int, producer_rank: int) -> int:
    """Return the consumer rank (or stage) across from a producer rank (or stage), which notifies it if it has no readers."""
    return producer_rank * consumer_size // producer_size
