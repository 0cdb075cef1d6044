"""What travels between the scheduler's and the workers' processes of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter._host import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.ports import StepPlan
    from vllm_adapter.trace_links import TraceLink

__all__ = ["RankEnvelope", "StepMetadata"]


@final
class StepMetadata(KVConnectorMetadata):
    """One step's plan, scheduler to workers; vLLM pickles it.

    Attributes:
        plan: Orders for the workers.
        orphans: Requests that the host parked for a read that nobody will make; the workers report them as failed.
        complete: Requests whose prompt is computed with this step and must then be in the mirror (host-buffer mode).
        links: Traces that the reads of this step belong to, by request; empty without tracing.
    """

    def __init__(
        self,
        plan: StepPlan,
        orphans: tuple[str, ...] = (),
        complete: tuple[str, ...] = (),
        links: Mapping[str, TraceLink] | None = None,
    ) -> None:
        self.plan = plan
        self.orphans = orphans
        self.complete = complete
        self.links = links or {}


@final
class RankEnvelope(KVConnectorHandshakeMetadata):
    """One rank's side-channel envelope, worker to scheduler, where the listener serves it."""

    def __init__(self, envelope: bytes) -> None:
        self.envelope = envelope
