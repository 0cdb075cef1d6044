"""All plans of a dry run, and what they say about the pair of engines: loads, sizes, times and warnings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_topology._estimate import bytes_per_token
from kv_topology._plan import plan_transfer
from kv_topology._tools._engine import build_engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._model import RankGeometry
    from kv_topology._plan import TransferPlan
    from kv_topology._tools._spec import DryRun

    Rank = tuple[int, int]

__all__ = ["Survey", "survey"]

TINY_BYTES = 4096
"""Slices below this cost more per descriptor than per byte. Source: NIXL over UCX, 2 to 3.5 us per descriptor."""


@final
@dataclass(frozen=True)
class Survey:
    """Every consumer rank's plan.

    Attributes:
        run: The dry run.
        consumers: Geometry of the consumer's ranks.
        producers: Geometry of the producer's ranks.
        plans: Plan of each consumer rank, staged where that is cheaper.
    """

    run: DryRun
    consumers: Mapping[Rank, RankGeometry]
    producers: Mapping[Rank, RankGeometry]
    plans: Mapping[Rank, TransferPlan]

    def bytes_from(self, consumer: Rank, producer: Rank) -> float:
        """Return the bytes per token of the prompt, or of states per request, that one rank reads from another."""
        return sum(bytes_per_token(table) for table in self.plans[consumer].slices(producer))

    def descriptors_per_token(self, plan: TransferPlan) -> float:
        """Return descriptors per token of the kind of plan that was chosen."""
        staged = plan.estimate.staged_descriptors_per_token
        return staged if plan.is_staged and staged is not None else plan.estimate.direct_descriptors_per_token

    def transfer_ms(self, plan: TransferPlan) -> float:
        """Return the estimated time of the cost model's prompt."""
        staged = plan.estimate.staged_us
        return (staged if plan.is_staged and staged is not None else plan.estimate.direct_us) / 1e3

    def warnings(self) -> list[str]:
        """Return the warnings that a person should read before running this pair."""
        checks = (self._tiny_slices, self._unread_replicas, self._unequal_load, self._replicated_reads, self._staged)
        return [warning for check in checks if (warning := check())]

    def _read_ranks(self) -> list[Rank]:
        return sorted({rank for plan in self.plans.values() for rank in plan.producer_ranks})

    def _tiny_slices(self) -> str:
        tables = [table for plan in self.plans.values() for rank in plan.producer_ranks for table in plan.slices(rank)]
        least = min((int(table.columns.length.min()) for table in tables), default=TINY_BYTES)
        if least >= TINY_BYTES:
            return ""
        return f"tiny descriptors: slices as small as {least} bytes; larger blocks or equal layouts help"

    def _unread_replicas(self) -> str:
        idle = sorted(set(self.producers) - set(self._read_ranks()))
        return f"replicas that nobody reads, only notified: {_ranks(idle)}" if idle else ""

    def _unequal_load(self) -> str:
        loads = [self._load(rank) for rank in self._read_ranks()]
        if not loads or max(loads) <= 1.05 * min(loads):
            return ""
        return f"unequal load: producer ranks send {min(loads):.0f} to {max(loads):.0f} bytes per token"

    def _replicated_reads(self) -> str:
        unique = self.unique_bytes()
        copies = sum(map(self._load, self._read_ranks())) / unique if unique else 1.0
        return (
            f"replicated reads: every byte is read {copies:.2f} times, by ranks that share it" if copies > 1.01 else ""
        )

    def _staged(self) -> str:
        staged = [rank for rank, plan in self.plans.items() if plan.is_staged]
        return f"staged: consumer ranks {_ranks(staged)} permute pages after the read" if staged else ""

    def _load(self, producer: Rank) -> float:
        """Return the bytes per token that a producer rank sends to all consumer ranks."""
        return sum(
            self.bytes_from(consumer, producer)
            for consumer, plan in self.plans.items()
            if producer in plan.producer_ranks
        )

    def unique_bytes(self) -> float:
        """Return the bytes per token of the whole model's cache without replicas; states count once per request."""
        model = self.run.model
        attention = sum(kind in {"attention", "sliding"} for kind in model.kinds)
        latent = sum(kind == "latent" for kind in model.kinds)
        per_token = attention * 2 * model.kv_heads * model.head_dim * model.element_bytes
        per_token += latent * (model.latent_dim * model.element_bytes + model.index_dim)
        states = sum(
            field.held_bytes * axis.size / geometry.tp_size / axis.count
            for geometry in self.producers.values()
            for region in geometry.regions
            for member in region.members
            if geometry.groups[member.group].is_state
            for field in member.layout.fields
            if (axis := field.split_axis) is not None
        )
        return per_token + states


def _ranks(ranks: Sequence[Rank]) -> str:
    shown = ", ".join(f"pp{pp}/tp{tp}" if pp else f"tp{tp}" for pp, tp in ranks[:6])
    return shown + (f" and {len(ranks) - 6} more" if len(ranks) > 6 else "")


def survey(run: DryRun) -> Survey:
    """Return the plans of all consumer ranks of a dry run."""
    consumers, producers = build_engine(run.model, run.consumer), build_engine(run.model, run.producer)
    plans = {rank: plan_transfer(local, producers, staging="auto", cost=run.cost) for rank, local in consumers.items()}
    return Survey(run, consumers, producers, plans)
