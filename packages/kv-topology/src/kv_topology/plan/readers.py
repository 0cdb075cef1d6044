"""Choice of producer ranks, and the readers and notifiers of each, worked out by every consumer rank on its own.

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

Worked example of readers. Latent attention, consumer tp 2, producer tp 4: every rank holds everything, consumer ranks 0
and 1 read producer ranks 0 and 2. Producer ranks 1 and 3 have no reader; the ranks across from them, 1 * 2 // 4 = 0 and
3 * 2 // 4 = 1, notify them. So every producer rank gets one report, and `count` is 1 for each.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, final

from kv_topology.arithmetic import TokenDeal, even_interval, holders, tokens_meet
from kv_topology.checks import LIMITS
from kv_topology.errors import GeometryMismatch, UnsupportedTopology, demand, shown, shown_ranks
from kv_topology.geometry import RankGeometry, check_names_match

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kv_topology.model import FieldLayout, Group, StageLayer

    Rank = tuple[int, int]

__all__ = ["FieldClass", "Readers", "choose_pieces", "field_class", "target_ranks"]


class FieldClass(NamedTuple):
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


class Piece(NamedTuple):
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
                    "no-producer-holds",
                    f"No producer rank of {producer_tp} holds parts [{low}, {high}) of {kind.parts} for share {share} "
                    f"of {kind.producer_context} of the tokens; its context parallelism exceeds its replicas.",
                    {"start": low, "stop": high, "share": share, "producer_tp": producer_tp},
                    fault="peer",
                )
            place = (consumer_rank - sharers.start) * len(candidates) // len(sharers)
            chosen.append(Piece(candidates[place], low, high))
    return tuple(sorted(chosen))


def ranks_read(kinds: frozenset[FieldClass], consumer_tp: int, consumer_rank: int, producer_tp: int) -> frozenset[int]:
    """Return the producer ranks that a consumer rank reads for fields of any of these classes."""
    return frozenset(
        piece.producer for kind in kinds for piece in choose_pieces(kind, consumer_tp, consumer_rank, producer_tp)
    )


def notify_home(consumer_size: int, producer_size: int, producer_rank: int) -> int:
    """Return the consumer rank (or stage) across from a producer rank (or stage), which notifies it if it has no readers."""
    return producer_rank * consumer_size // producer_size


def field_class(field: FieldLayout, consumer: Group, producer: Group) -> FieldClass:
    """Return the class that decides from which producer ranks a field is read."""
    axis = field.split_axis
    return FieldClass(
        axis.size if axis is not None else 1,
        consumer.deal.size,
        consumer.deal.interleave_tokens,
        producer.deal.size,
        producer.deal.interleave_tokens,
    )


def _notified(local: RankGeometry, peer_size: tuple[int, int], read: Iterable[Rank]) -> Iterator[Rank]:
    """Return the producer ranks (pp, tp) across from this rank that no consumer rank is known to read.

    Args:
        local: This rank.
        peer_size: Pipeline stages and tensor-parallel ranks of the producer.
        read: Producer ranks that some consumer rank is known to read.
    """
    taken = set(read)
    for stage in range(peer_size[0]):
        if notify_home(local.pp_size, peer_size[0], stage) == local.pp_rank:
            for rank in range(peer_size[1]):
                is_across = notify_home(local.tp_size, peer_size[1], rank) == local.tp_rank
                if is_across and (stage, rank) not in taken:
                    yield stage, rank


@final
class Readers:
    """The two engines' ranks, and for each pair of them whether one reports to the other.

    A layer is read from the first producer stage that holds it, by the consumer stages that have it. A producer rank
    without readers is notified by the consumer rank across from it.

    Args:
        local: This rank.
        peers: Geometry of producer ranks by (pp, tp), at least one of every stage.

    Raises:
        UnsupportedTopology: `peer-missing`, `stage-layers-missing`.
        GeometryMismatch: `layer-not-held`, `field-missing`.
    """

    def __init__(self, local: RankGeometry, peers: Mapping[Rank, RankGeometry]) -> None:
        any_peer = next(iter(peers.values()))
        self._local = local
        self._peers = peers
        self._tp = (local.tp_size, any_peer.tp_size)
        self._pp = (local.pp_size, any_peer.pp_size)
        self._stages = self._one_of_every_stage()
        # A layer is read from the first producer stage that holds it.
        self._owners: dict[str, int] = {}
        for stage, peer in self._stages.items():
            for layer in peer.placements:
                self._owners.setdefault(layer, stage)
        self._classes = self._stage_classes()

    def _one_of_every_stage(self) -> dict[int, RankGeometry]:
        found: dict[int, RankGeometry] = {}
        for stage, rank in sorted(self._peers):
            found.setdefault(stage, self._peers[stage, rank])
        if len(found) != self._pp[1]:
            missing = next(stage for stage in range(len(found) + 1) if stage not in found)
            raise UnsupportedTopology(
                "peer-missing",
                f"The producer has {self._pp[1]} pipeline stages, but there is no geometry of stage {missing}.",
                {"stages": self._pp[1], "missing": [(missing, 0)]},
                fault="peer",
            )
        return found

    def layers_of(self, stage: int) -> frozenset[str]:
        """Return the layers that are read from a producer stage."""
        return frozenset(layer for layer, owner in self._owners.items() if owner == stage)

    def _stage_classes(self) -> dict[tuple[int, int], frozenset[FieldClass]]:
        """Return the field classes that each (consumer stage, producer stage) pair moves."""
        found: dict[tuple[int, int], set[FieldClass]] = {}
        seen: dict[tuple[object, ...], frozenset[FieldClass]] = {}
        for consumer_stage, entry in self._consumer_layers():
            stage = self._owners.get(entry.layer)
            if stage is None:
                continue
            consumer = self._local.groups[entry.group]
            for _, member in self._stages[stage].placements[entry.layer]:
                producer = self._stages[stage].groups[member.group]
                key = (member.layout, consumer, producer, entry.fields)
                if key not in seen:
                    fields = [f for f in member.layout.fields if f.name in entry.fields]
                    seen[key] = frozenset(field_class(field, consumer, producer) for field in fields)
                found.setdefault((consumer_stage, stage), set()).update(seen[key])
        return {pair: frozenset(kinds) for pair, kinds in found.items()}

    def _consumer_layers(self) -> Iterator[tuple[int, StageLayer]]:
        """Return (stage, layer) of all consumer stages."""
        local = self._local
        if local.pp_size == 1:
            yield from ((0, entry) for entry in local.own_layers)
            return
        if not local.stage_layers:
            raise UnsupportedTopology(
                "stage-layers-missing",
                f"The consumer has {local.pp_size} pipeline stages but its geometry has no `stage_layers`, so the "
                "readers of a producer rank cannot be counted.",
                {"pp_size": local.pp_size},
            )
        for number, layers in enumerate(local.stage_layers):
            yield from ((number, entry) for entry in layers)

    def reads(self, consumer: Rank, producer_stage: int) -> frozenset[int]:
        """Return the tp ranks of a producer stage that a consumer rank (pp, tp) reads."""
        kinds = self._classes.get((consumer[0], producer_stage), frozenset())
        return ranks_read(kinds, self._tp[0], consumer[1], self._tp[1])

    @cached_property
    def _by_producer(self) -> Mapping[Rank, list[Rank]]:
        """Consumer ranks (pp, tp) that read each producer rank; a rank without readers is absent."""
        found: dict[Rank, list[Rank]] = {}
        for consumer_stage, stage in sorted(self._classes):
            for rank in range(self._tp[0]):
                for producer in self.reads((consumer_stage, rank), stage):
                    found.setdefault((stage, producer), []).append((consumer_stage, rank))
        return found

    def count(self, producer: Rank) -> int:
        """Return how many consumer ranks report to a producer rank: its readers, or the one that notifies it."""
        try:
            is_rank = all(0 <= n < most for n, most in zip(producer, (self._pp[1], self._tp[1]), strict=True))
        except (TypeError, ValueError):
            is_rank = False
        if not is_rank:
            size = f"{self._pp[1]} stages of {self._tp[1]} ranks"
            raise UnsupportedTopology("rank-not-read", f"The producer has {size}, and no rank {shown(producer)}.")
        return max(1, len(self._by_producer.get(producer, ())))

    def notify_only(self) -> tuple[Rank, ...]:
        """Producer ranks that this rank notifies without reading them."""
        return tuple(_notified(self._local, (self._pp[1], self._tp[1]), self._by_producer))

    def required(self) -> list[Rank]:
        """Return the producer ranks to read, after checking that every local layer is held and every rank is known."""
        for layer, placed in self._local.placements.items():
            if layer in self._owners:
                check_names_match(placed, self._stages[self._owners[layer]].placements[layer], layer)
            else:
                raise GeometryMismatch(
                    "layer-not-held",
                    f"No producer rank in {shown_ranks(sorted(self._peers))} holds layer {layer!r}.",
                    {"layer": layer},
                    fault="peer",
                )
        me = (self._local.pp_rank, self._local.tp_rank)
        needed = [(stage, rank) for stage in sorted(self._stages) for rank in sorted(self.reads(me, stage))]
        missing = [rank for rank in needed if rank not in self._peers]
        if missing:
            raise UnsupportedTopology(
                "peer-missing",
                f"The plan reads from {len(needed)} producer ranks, but there is no geometry of {shown_ranks(missing)}.",
                {"needed": len(needed), "missing": missing[:16]},
                fault="peer",
            )
        return needed


def target_ranks(local: RankGeometry, *, peer_tp: int, peer_pp: int = 1, peer_dcp: int = 1) -> tuple[Rank, ...]:
    """Return the (pp, tp) producer ranks whose metadata a consumer rank needs before it can plan.

    These are the ranks that it may have to read or notify: which stage holds which layer, how the producer deals out
    tokens, and which of its groups it does not deal out at all, is only known from the metadata itself.

    Args:
        local: This rank.
        peer_tp: Tensor-parallel size of the producer.
        peer_pp: Pipeline stages of the producer.
        peer_dcp: Context-parallel size of the producer's attention.

    Raises:
        UnsupportedTopology: `size-out-of-range`.
    """
    demand("local", local, RankGeometry)
    for what, size, most in (("tp", peer_tp, LIMITS["tp"]), ("pp", peer_pp, LIMITS["pp"]), ("dcp", peer_dcp, peer_tp)):
        if type(size) is not int or not 1 <= size <= most:
            raise UnsupportedTopology(
                "size-out-of-range",
                f"The producer's {what} size is {shown(size)}; it must lie in 1..{shown(most)}.",
                {"what": what, "most": most},
                fault="peer",
            )
    held: set[tuple[int, int, bool]] = set()
    for _, member in (each for placed in local.placements.values() for each in placed):
        group, axes = local.groups[member.group], [field.split_axis for field in member.layout.fields]
        held.update((axis.size if axis else 1, group.deal.size, group.is_state) for axis in axes)
    mine: set[int] = set()
    certain: set[int] = set()
    for parts, context, is_state in held:
        options = [FieldClass(parts, context, 1, size, 0) for size in {1, 1 if is_state else peer_dcp}]
        mine.update(*_readable(options, local.tp_size, local.tp_rank, peer_tp))
        if peer_pp == 1:
            for rank in range(local.tp_size):
                first, *others = _readable(options, local.tp_size, rank, peer_tp)
                certain.update(first.intersection(*others))
    found = {(stage, rank) for stage in range(peer_pp) for rank in mine}
    # A rank that is certain to be read needs no notification; a stage may turn out to hold none of our layers.
    found.update(_notified(local, (peer_pp, peer_tp), ((0, rank) for rank in certain)))
    return tuple(sorted(found))


def _readable(options: Sequence[FieldClass], tp_size: int, tp_rank: int, peer_tp: int) -> list[frozenset[int]]:
    """Return the ranks read under each way of dealing out tokens that can be read at all: not at all is always among them."""
    found: list[frozenset[int]] = []
    for option in options:
        with suppress(UnsupportedTopology):
            found.append(ranks_read(frozenset((option,)), tp_size, tp_rank, peer_tp))
    return found
