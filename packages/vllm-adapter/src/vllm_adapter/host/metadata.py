"""Pickle shells: the host's message classes around the values of `steps.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.host.vllm import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.steps import RankRegistration, StepOrders

__all__ = ["RankEnvelope", "RegistrationReport", "StepMetadata"]


@final
class StepMetadata(KVConnectorMetadata):
    """The orders of one step, scheduler to workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


@final
class RankEnvelope(KVConnectorHandshakeMetadata):
    """A rank's side-channel envelope, worker to scheduler, where the listener serves it."""

    def __init__(self, envelope: bytes) -> None:
        self.envelope = envelope


@final
class RegistrationReport(KVConnectorWorkerMetadata):
    """Registrations of ranks, workers to scheduler, by (pp rank, tp rank); vLLM adds the ranks' reports up."""

    def __init__(self, ranks: Mapping[tuple[int, int], RankRegistration]) -> None:
        self.ranks = dict(ranks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RegistrationReport:
        """Return the registrations of both; nothing else is ever added to a report of this connector."""
        return RegistrationReport({**self.ranks, **other.ranks}) if isinstance(other, RegistrationReport) else self
