"""Records of the consumer's part: one read in progress, and one peer engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_adapter.ports import PeerAddress, PeerMetadata, PeerPlan, ReadOrder, TransferResult
    from vllm_adapter.steps import Rank, ReadEnd, ReadTimes
    from vllm_adapter.worker.conversion import ConversionStep
    from vllm_adapter.worker.transfer.limits import ReadLimits

__all__ = ["FinishedRead", "PeerEngine", "Read", "is_peer_at_fault", "is_same_place", "may_be_mended"]


def is_peer_at_fault(result: TransferResult) -> bool:
    """Return whether a transfer failed in a way that speaks against its peer: then the peer is met anew before its next read.

    What this rank's own agent refuses (`queue-full`, `bad-indices`) says nothing about the peer.
    """
    return result.outcome == "failed" and result.fault != "local"


def may_be_mended(result: TransferResult) -> bool:
    """Return whether a transfer that failed may go well once its peer has been met anew.

    It may also where the agent has let the peer go (`peer-removed`), as when another engine proved that the name is its own.
    """
    return is_peer_at_fault(result) or result.code == "peer-removed"


@final
@dataclass(frozen=True, slots=True)
class FinishedRead:
    """The end of a read, and what the engine thread must still do to the pages of a good one."""

    end: ReadEnd
    conversion: tuple[ConversionStep, ...] = ()


@final
@dataclass(slots=True, eq=False)
class Read:
    """A read from its order to its one end: a transfer per producer rank, perhaps in two attempts.

    Attributes:
        order: Order that the read carries out.
        times: When its stages were reached.
        engine: The engine that it was posted to; None before.
        attempt: Number of the attempt under way; 0 before the first post.
        deadline_s: Time at which the read is given up, over both attempts.
        trusted_until_s: Time until which the peer's lease has not ended for certain.
        transfers: Transfers that are not over, by id.
        unquiet: Those of them that ended but may still write into the pages.
        done_ranks: Ranks whose part has arrived, fence verified; their completion has left.
        conversion: Steps that put its pages in order once all are there.
        code: Why it fails; empty so far.
        message: The same as a sentence.
        may_retry: Whether all failures so far are of a kind that a second attempt may mend.
        is_ended: Whether its end was reported.
        was_met: Whether no handshake for it has failed.
        is_passed_on: Whether another request reads the same hand-over, so that the producer must not be told of an end.
    """

    order: ReadOrder
    times: ReadTimes
    engine: PeerEngine | None = None
    attempt: int = 0
    deadline_s: float = 0.0
    trusted_until_s: float = 0.0
    transfers: dict[str, Rank] = field(default_factory=dict[str, "Rank"])
    unquiet: set[str] = field(default_factory=set[str])
    done_ranks: set[Rank] = field(default_factory=set["Rank"])
    conversion: tuple[ConversionStep, ...] = ()
    code: str = ""
    message: str = ""
    may_retry: bool = True
    is_ended: bool = False
    was_met: bool = True
    is_passed_on: bool = False

    def transfer_id(self, rank: Rank) -> str:
        """Name of one rank's transfer, e.g. `r1/0.1`, and `r1/0.1+` at the second attempt."""
        return f"{self.order.request_id}/{rank[0]}.{rank[1]}" + "+" * (self.attempt - 1)

    def begin_attempt(self, engine: PeerEngine, ranks: Iterable[Rank], now_s: float, limits: ReadLimits) -> None:
        """Name the transfers of an attempt; the first one sets the times by which all is over."""
        if not self.attempt:
            self.times.posted_s = now_s
            self.deadline_s = now_s + limits.read_timeout_s
            self.trusted_until_s = now_s + (self.order.lease_s or limits.lease_s)
        self.attempt += 1
        self.engine = engine
        self.transfers = {self.transfer_id(rank): rank for rank in ranks}

    def note_arrived(self, result: TransferResult, now_s: float) -> None:
        """Note that one rank's part is there, its fence verified."""
        self.times.data_s = now_s - result.fence_s
        self.times.queue_s = result.queue_s
        self.times.fence_s = max(self.times.fence_s, result.fence_s)
        self.times.bytes_moved += result.bytes_moved
        self.done_ranks.add(self.transfers[result.transfer_id])

    def fail(self, code: str, message: str, *, may_retry: bool = False) -> bool:
        """Note a failure; return whether it is the first."""
        self.may_retry = self.may_retry and may_retry
        is_first = not self.code
        if is_first:
            self.code, self.message = code or "transfer-failed", message
        return is_first

    def begin_again(self) -> None:
        """Forget the first attempt's failure, for a second attempt on the ranks that are not done."""
        self.code = self.message = ""
        self.engine = None


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
        can_stream: Whether prompts can be read from it in parts, while they are computed.
        capabilities: Capabilities that all its ranks announce.
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
    can_stream: bool = False
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
