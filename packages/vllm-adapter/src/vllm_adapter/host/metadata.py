"""What travels between the scheduler's and the workers' processes of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.host.vllm import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.observe.trace_links import TraceLink
    from vllm_adapter.ports import StepPlan
    from vllm_adapter.scheduler.served_registration import RankRegistration

__all__ = ["RankEnvelope", "RegistrationReport", "StepMetadata"]


@final
class StepMetadata(KVConnectorMetadata):
    """One step's plan, scheduler to workers; vLLM pickles it.

    Attributes:
        plan: Orders for the workers.
        orphans: Requests that the host parked for a read that nobody will make; the workers report them as failed.
        complete: Requests whose prompt is computed with this step and must then be in the mirror (host-buffer mode).
        links: Traces that the reads of this step belong to, by request; empty without tracing.
        restarted: Requests whose prompt is computed from the beginning again.
        void_reads: Requests whose read was ordered before the cache was reset; it must end, and end badly.
        question: Number of the question what this rank has registered; 0 if nobody asks.
    """

    def __init__(
        self,
        plan: StepPlan,
        orphans: tuple[str, ...] = (),
        complete: tuple[str, ...] = (),
        links: Mapping[str, TraceLink] | None = None,
        *,
        restarted: tuple[str, ...] = (),
        void_reads: tuple[str, ...] = (),
        question: int = 0,
    ) -> None:
        self.plan = plan
        self.orphans = orphans
        self.complete = complete
        self.links = links or {}
        self.restarted = restarted
        self.void_reads = void_reads
        self.question = question


@final
class RankEnvelope(KVConnectorHandshakeMetadata):
    """One rank's side-channel envelope, worker to scheduler, where the listener serves it."""

    def __init__(self, envelope: bytes) -> None:
        self.envelope = envelope


@final
class RegistrationReport(KVConnectorWorkerMetadata):
    """What ranks have registered, workers to scheduler, by (pp rank, tp rank); vLLM adds the ranks' reports up."""

    def __init__(self, ranks: Mapping[tuple[int, int], RankRegistration]) -> None:
        self.ranks = dict(ranks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RegistrationReport:
        """Return what both say; nothing else is ever added to a report of this connector."""
        return RegistrationReport({**self.ranks, **other.ranks}) if isinstance(other, RegistrationReport) else self
