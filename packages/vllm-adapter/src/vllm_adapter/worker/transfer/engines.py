"""The record of one peer engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.ports import PeerAddress, PeerMetadata, PeerPlan
    from vllm_adapter.worker.transfer.parts import Rank
    from vllm_adapter.worker.transfer.read import Read

__all__ = ["PeerEngine", "is_same_place"]


@final
@dataclass(slots=True)
class PeerEngine:
    """Everything that is known of one peer engine.

    Attributes:
        address: The engine as tickets name it: id, host, port, sizes and generation.
        phase: `wiring` (its handshake runs), `ready` (planned, prepared, connected) or `draining` (its reads in flight may
            end, new ones wait, then it is forgotten and met anew).
        waiting: Reads that wait for it.
        plan: How it is read from; None until it is ready.
        is_fenced: Whether all ranks that are read from have a fence array.
        capabilities: What all its ranks announce that they can do.
        generation: Incarnation of its memory registration; None if it does not say.
        reads_in_flight: Reads posted to it that have not ended.
        last_used_s: Time at which an order last named it.
        last_answer_s: Time at which it last answered: a handshake, a read or a probe.
        silent_probes: Probes in a row that it has not answered.
        is_probed: Whether a probe is under way.
    """

    address: PeerAddress
    last_used_s: float
    last_answer_s: float
    phase: Literal["wiring", "ready", "draining"] = "wiring"
    waiting: list[Read] = field(default_factory=list["Read"])
    plan: PeerPlan | None = None
    is_fenced: bool = False
    capabilities: frozenset[str] = frozenset()
    generation: int | None = None
    reads_in_flight: int = 0
    silent_probes: int = 0
    is_probed: bool = False

    @property
    def engine_id(self) -> str:
        """The engine's name."""
        return self.address.engine_id

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks that are notified: those that are read from, then those that only wait for a notification."""
        return (*self.plan.producer_ranks, *self.plan.notify_only_ranks) if self.plan is not None else ()

    def key(self, rank: Rank) -> str:
        """Name of one rank on the transfer thread, e.g. `P@10.0.0.1:5600/2.1.1/0.1#7f` (tp 2, tp rank 1)."""
        peer = self.address
        life = "" if peer.generation is None else f"#{peer.generation:x}"
        return f"{peer.engine_id}@{peer.host}:{peer.port}/{peer.tp}.{peer.pp}.{peer.dcp}/{rank[0]}.{rank[1]}{life}"

    def set_ready(self, plan: PeerPlan, metadata: Mapping[Rank, PeerMetadata]) -> None:
        """Take over what the handshake brought."""
        self.plan = plan
        self.generation = next((m.generation for m in metadata.values() if m.generation is not None), None)
        self.is_fenced = all(metadata[rank].fence is not None for rank in plan.producer_ranks)
        announced = [frozenset(m.capabilities) for m in metadata.values()]
        self.capabilities = announced[0].intersection(*announced[1:]) if announced else frozenset()

    def is_meant_by(self, peer: PeerAddress) -> bool:
        """Tell whether a ticket's address means this engine: of its generation, or where one of the two does not say."""
        if peer.generation is None or peer.generation in {self.address.generation, self.generation}:
            return is_same_place(peer, self.address)
        return False


def is_same_place(one: PeerAddress, other: PeerAddress) -> bool:
    """Tell whether two addresses differ in nothing but generation and dialect."""
    return (
        one.engine_id == other.engine_id
        and (one.host, one.port) == (other.host, other.port)
        and (one.tp, one.pp, one.dcp) == (other.tp, other.pp, other.dcp)
    )
