"""Who reads and who notifies every producer rank, worked out by each consumer rank on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_topology._boxes import field_class
from kv_topology._errors import GeometryMismatch, UnsupportedTopology
from kv_topology._model import Group
from kv_topology._select import FieldClass, notify_home, ranks_read
from kv_topology._shards import TokenDeal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_topology._model import RankGeometry

    Rank = tuple[int, int]

__all__ = ["Readers", "required_ranks", "target_ranks"]


@final
class Readers:
    """The two engines' ranks, and for each pair of them whether one reports to the other.

    A producer stage is read by the consumer stages that have one of its layers; a stage without any is notified by the
    consumer stage across from it.
    """

    def __init__(self, local: RankGeometry, peers: Mapping[Rank, RankGeometry]) -> None:
        any_peer = next(iter(peers.values()))
        self._tp = (local.tp_size, any_peer.tp_size)
        self._pp = (local.pp_size, any_peer.pp_size)
        self._local = local
        self._peers = peers
        self._classes = self._stage_classes()
        self.notify_only = self._notify_only()

    def _stage_classes(self) -> dict[tuple[int, int], frozenset[FieldClass]]:
        """Return the field classes that each (consumer stage, producer stage) pair moves."""
        mine, group_of = self._layers_by_stage(), self._consumer_groups()
        found: dict[tuple[int, int], set[FieldClass]] = {}
        representatives: dict[int, RankGeometry] = {}
        for (stage, _), peer in self._peers.items():
            representatives.setdefault(stage, peer)
        for producer_stage, peer in representatives.items():
            seen: dict[tuple[int, int, int], frozenset[FieldClass]] = {}
            for layer, placed in peer.placements.items():
                stages = mine.get(layer, ())
                for _, member in placed if stages else ():
                    producer = peer.groups[member.group]
                    consumer = group_of.get(layer, next(iter(group_of.values())))
                    key = (id(member.layout), id(consumer), member.group)
                    if key not in seen:
                        seen[key] = frozenset(field_class(f, consumer, producer) for f in member.layout.fields)
                    for stage in stages:
                        found.setdefault((stage, producer_stage), set()).update(seen[key])
        return {pair: frozenset(kinds) for pair, kinds in found.items()}

    def _consumer_groups(self) -> dict[str, Group]:
        return {layer: self._local.groups[placed[0][1].group] for layer, placed in self._local.placements.items()}

    def _layers_by_stage(self) -> dict[str, tuple[int, ...]]:
        local = self._local
        if local.pp_size == 1:
            return dict.fromkeys(local.layers, (0,))
        if not local.stage_layers:
            raise UnsupportedTopology(
                f"The consumer has {local.pp_size} pipeline stages but its geometry has no `stage_layers`, so the "
                "readers of a producer rank cannot be counted.",
                code="stage-layers-missing",
                context={"pp_size": local.pp_size},
            )
        stages: dict[str, tuple[int, ...]] = {}
        for number, layers in enumerate(local.stage_layers):
            for layer in layers:
                stages[layer] = (*stages.get(layer, ()), number)
        return stages

    def reads(self, consumer: Rank, producer_stage: int) -> frozenset[int]:
        """Return the tp ranks of a producer stage that a consumer rank (pp, tp) reads."""
        kinds = self._classes.get((consumer[0], producer_stage), frozenset())
        return ranks_read(kinds, self._tp[0], consumer[1], self._tp[1])

    def readers(self, producer: Rank) -> list[Rank]:
        """Return the consumer ranks (pp, tp) that read a producer rank."""
        return [
            (stage, rank)
            for stage in range(self._pp[0])
            for rank in range(self._tp[0])
            if producer[1] in self.reads((stage, rank), producer[0])
        ]

    def count(self, producer: Rank) -> int:
        """Return how many consumer ranks report to a producer rank: its readers, or the one that notifies it."""
        return max(1, len(self.readers(producer)))

    def _notify_only(self) -> tuple[Rank, ...]:
        found: list[Rank] = []
        me = (self._local.pp_rank, self._local.tp_rank)
        read = {
            (stage, rank)
            for stage in range(self._pp[1])
            for consumer_stage in range(self._pp[0])
            for consumer in range(self._tp[0])
            for rank in self.reads((consumer_stage, consumer), stage)
        }
        for stage in range(self._pp[1]):
            for rank in range(self._tp[1]):
                home = (notify_home(*self._pp, stage), notify_home(*self._tp, rank))
                if home == me and (stage, rank) not in read:
                    found.append((stage, rank))
        return tuple(found)


def required_ranks(readers: Readers, local: RankGeometry, peers: Mapping[Rank, RankGeometry]) -> list[Rank]:
    """Return the producer ranks to read, all of them in `peers`, after checking that every local layer is held.

    Raises:
        UnsupportedTopology: `layer-not-held` or `peer-missing`.
    """
    stages = sorted({stage for stage, _ in peers})
    held = {
        stage: {layer for (s, _), peer in peers.items() if s == stage for layer in peer.placements} for stage in stages
    }
    for layer in local.placements:
        if not any(layer in layers for layers in held.values()):
            raise GeometryMismatch(
                f"No producer rank in {sorted(peers)} holds layer {layer!r}.",
                code="layer-not-held",
                fault="peer",
                context={"layer": layer, "ranks": sorted(peers)},
            )
    me = (local.pp_rank, local.tp_rank)
    needed = [(stage, rank) for stage in stages for rank in sorted(readers.reads(me, stage))]
    missing = [rank for rank in needed if rank not in peers]
    if missing:
        raise UnsupportedTopology(
            f"The plan reads from producer ranks {needed}, but there is no geometry of {missing}.",
            code="peer-missing",
            fault="peer",
            context={"needed": needed, "missing": missing},
        )
    return needed


def target_ranks(local: RankGeometry, *, peer_tp: int, peer_pp: int = 1, peer_dcp: int = 1) -> tuple[Rank, ...]:
    """Return the (pp, tp) producer ranks whose metadata a consumer rank needs before it can plan.

    These are the ranks that it will read or notify, in every pipeline stage, because which stage holds which layer is
    only known from the metadata itself.

    Args:
        local: This rank.
        peer_tp: Tensor-parallel size of the producer.
        peer_pp: Pipeline stages of the producer.
        peer_dcp: Context-parallel size of the producer's attention.
    """
    kinds: set[FieldClass] = set()
    for layer, placed in local.placements.items():
        group = local.groups[placed[0][1].group]
        context = 1 if group.is_state else peer_dcp
        producer = Group(
            group.kind, group.block_tokens, deal=TokenDeal(context, interleave_tokens=group.deal.interleave_tokens)
        )
        for _, member in local.placements[layer]:
            kinds.update(field_class(field, group, producer) for field in member.layout.fields)
    chosen = frozenset(kinds)
    everyone = {p for c in range(local.tp_size) for p in ranks_read(chosen, local.tp_size, c, peer_tp)}
    mine = set(ranks_read(chosen, local.tp_size, local.tp_rank, peer_tp))
    mine |= {p for p in range(peer_tp) if p not in everyone and notify_home(local.tp_size, peer_tp, p) == local.tp_rank}
    return tuple((stage, rank) for stage in range(peer_pp) for rank in sorted(mine))
