"""Records of the consumer side: one read in progress, and one peer engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm_adapter.ports import AgentMetadata, PeerAddress, PeerPlan, ReadOrder, StreamOrder, TransferResult
    from vllm_adapter.steps import Rank, ReadTimes
    from vllm_adapter.worker.pages import ConversionStep
    from vllm_adapter.worker.transfer.parts import ReadLimits

__all__ = ["PeerEngine", "Read", "is_peer_at_fault", "is_same_place", "may_be_mended"]


def is_peer_at_fault(result: TransferResult) -> bool:
    """Return whether the peer is to blame for a failed transfer; its engine is then set up again before its next read.

    Failures that come from this rank's own agent (`queue-full`, `bad-indices`) say nothing about the peer.
    """
    return result.outcome == "failed" and result.fault != "local"


def may_be_mended(result: TransferResult) -> bool:
    """Return whether a failed transfer may succeed once its engine has been set up again.

    This includes peers that the agent has removed (`peer-removed`), as when another engine proved that the name is its own.
    """
    return is_peer_at_fault(result) or result.code == "peer-removed"


@final
@dataclass(slots=True, eq=False)
class Read:
    """A read from its order to its single end: one transfer per producer rank, in up to two attempts.

    Attributes:
        order: Order that the read carries out.
        times: Timestamps of its stages.
        stream: Order of the stream that it waits to begin; None for a plain read, and once the stream has begun or ended.
        engine: Engine that the read was posted to; None before.
        attempt: Number of the current attempt; 0 before the first post.
        deadline_s: Time at which the read is given up, across both attempts.
        trusted_until_s: Time until which the peer's lease certainly has not ended.
        transfers: Transfers that have not ended, by id.
        unquiet: Transfers that ended but may still write into the pages.
        done_ranks: Ranks whose part has arrived with its fence verified, and whose "read complete" has been sent.
        conversion: Steps that permute its pages once all of them have arrived.
        code: Code of its failure; empty if it has not failed.
        message: The failure as a sentence.
        may_retry: Whether a second attempt may repair all failures so far.
        is_ended: Whether its end has been reported.
        was_met: Whether no handshake for it has failed.
        is_cancelled: Whether its request has ended: what becomes of its transfers from then on is no failure.
        is_passed_on: Whether another request reads the same hand-over, so that the producer must not be notified of this end.
    """

    order: ReadOrder
    times: ReadTimes
    stream: StreamOrder | None = None
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
    is_cancelled: bool = False
    is_passed_on: bool = False

    def transfer_id(self, rank: Rank) -> str:
        """Return the name of one rank's transfer, e.g. `r1/0.1`, and `r1/0.1+` at the second attempt."""
        return f"{self.order.request_id}/{rank[0]}.{rank[1]}" + "+" * (self.attempt - 1)

    def begin_attempt(self, engine: PeerEngine, ranks: Iterable[Rank], now_s: float, limits: ReadLimits) -> None:
        """Name the transfers of an attempt; the first attempt sets the deadlines."""
        if not self.attempt:
            self.times.posted_s = now_s
            self.deadline_s = now_s + limits.read_timeout_s
            self.trusted_until_s = now_s + (self.order.ticket.lease_s or limits.lease_s)
        self.attempt += 1
        self.engine = engine
        self.transfers = {self.transfer_id(rank): rank for rank in ranks}

    def note_arrived(self, result: TransferResult, now_s: float) -> None:
        """Note that one rank's part has arrived, with its fence verified."""
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
    """Known state of one peer engine.

    Attributes:
        address: The engine as tickets name it: id, host, port, sizes and generation.
        phase: `wiring` (its handshake is in progress), `ready` (planned, prepared, connected) or `draining` (reads in flight may
            end and new ones wait; then the engine is forgotten and set up again).
        waiting: Reads that wait for it.
        plan: Plan for reading from it; None until it is ready.
        is_fenced: Whether all ranks that are read from have a fence array.
        can_stream: Whether its prompts can be read in parts while it computes them.
        has_our_blocks: Whether its cache groups have blocks of as many tokens as ours.
        capabilities: Capabilities that all its ranks announce.
        generation: Generation of its memory registration; None if it announces none.
        reads_in_flight: Reads posted to it that have not ended.
        last_used_s: Time at which an order last named it.
        last_answer_s: Time of its last answer to a handshake, a read or a probe.
        silent_probes: Number of consecutive probes without an answer.
        is_probed: Whether a probe is in progress.
    """

    address: PeerAddress
    last_used_s: float
    last_answer_s: float
    phase: Literal["wiring", "ready", "draining"] = "wiring"
    waiting: list[Read] = field(default_factory=list["Read"])
    plan: PeerPlan | None = None
    is_fenced: bool = False
    can_stream: bool = False
    has_our_blocks: bool = True
    capabilities: frozenset[str] = frozenset()
    generation: int | None = None
    reads_in_flight: int = 0
    silent_probes: int = 0
    is_probed: bool = False

    @property
    def engine_id(self) -> str:
        """Engine id of the peer."""
        return self.address.engine_id

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks that are notified: first those that are read from, then those that only get notifications."""
        return (*self.plan.producer_ranks, *self.plan.notify_only_ranks) if self.plan is not None else ()

    def key(self, rank: Rank) -> str:
        """Return the name of one rank on the transfer thread, e.g. `P@10.0.0.1:5600/2.1.1/0.1#7f` (tp 2, tp rank 1)."""
        peer = self.address
        life = "" if peer.generation is None else f"#{peer.generation:x}"
        return f"{peer.engine_id}@{peer.host}:{peer.port}/{peer.tp}.{peer.pp}.{peer.dcp}/{rank[0]}.{rank[1]}{life}"

    def set_ready(self, plan: PeerPlan, metadata: Mapping[Rank, AgentMetadata]) -> None:
        """Store the plan and the metadata from the handshake."""
        self.plan = plan
        self.generation = next((m.generation for m in metadata.values() if m.generation is not None), None)
        self.is_fenced = all(metadata[rank].fence is not None for rank in plan.producer_ranks)
        announced = [frozenset(m.capabilities) for m in metadata.values()]
        self.capabilities = announced[0].intersection(*announced[1:]) if announced else frozenset()

    def is_meant_by(self, peer: PeerAddress) -> bool:
        """Return whether a ticket's address means this engine: the generations are equal, or one side announces none."""
        if peer.generation is None or peer.generation in {self.address.generation, self.generation}:
            return is_same_place(peer, self.address)
        return False


def is_same_place(one: PeerAddress, other: PeerAddress) -> bool:
    """Return whether two addresses differ at most in generation and dialect."""
    return (
        one.engine_id == other.engine_id
        and (one.host, one.port) == (other.host, other.port)
        and (one.tp, one.pp, one.dcp) == (other.tp, other.pp, other.dcp)
    )
