"""Picklable shells: the host's message classes around the values of `steps.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.host.vllm import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.steps import RankRegistration, ReadFailure, StepOrders

__all__ = ["RankEnvelope", "StepMetadata", "WorkerReport"]


@final
class StepMetadata(KVConnectorMetadata):
    """The orders of one step, scheduler to workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


@final
class RankEnvelope(KVConnectorHandshakeMetadata):
    """A rank's side-channel envelope, from the worker to the scheduler, where the listener serves it."""

    def __init__(self, envelope: bytes) -> None:
        self.envelope = envelope


@final
class WorkerReport(KVConnectorWorkerMetadata):
    """Reports of the workers for the scheduler half alone, by (pp rank, tp rank); vLLM merges the ranks' reports.

    Attributes:
        ranks: Registrations of ranks that were asked for theirs, or have a new one.
        reasons: Why reads failed, by request and rank.
        stream_ends: (request, rank, whether its fence held) of streams that ended.
    """

    def __init__(
        self,
        ranks: Mapping[tuple[int, int], RankRegistration],
        reasons: Mapping[str, Mapping[tuple[int, int], ReadFailure]] | None = None,
        stream_ends: Sequence[tuple[str, tuple[int, int], bool]] = (),
    ) -> None:
        self.ranks = dict(ranks)
        self.reasons = dict(reasons or {})
        self.stream_ends = tuple(stream_ends)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return both reports merged; vLLM only ever passes reports of this connector."""
        if not isinstance(other, WorkerReport):
            return self
        reasons = {
            key: {**self.reasons.get(key, {}), **other.reasons.get(key, {})} for key in {*self.reasons, *other.reasons}
        }
        return WorkerReport({**self.ranks, **other.ranks}, reasons, (*self.stream_ends, *other.stream_ends))
