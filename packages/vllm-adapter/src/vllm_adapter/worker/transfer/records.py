"""Records of the consumer side: one read in progress, one peer engine, and checks of a read's ticket against its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from vllm_adapter.steps import ReadEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm_adapter.config import Settings
    from vllm_adapter.observe.answers import Entry
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import (
        AgentMetadata,
        Codec,
        HandshakeClient,
        PageNumbers,
        PeerAddress,
        PeerPlan,
        PeerSpec,
        ReadOrder,
        StagedRegion,
        StreamOrder,
        TransferResult,
        TransferThread,
    )
    from vllm_adapter.steps import Rank, ReadTimes

__all__ = [
    "PeerEngine",
    "Read",
    "TransferParts",
    "is_peer_at_fault",
    "lacks_nonce",
    "may_be_mended",
    "may_retry",
    "note_quarantine",
    "refusal",
    "refused_retry",
]


@final
@dataclass(frozen=True, slots=True)
class TransferParts:
    """Parts that all coordinators use.

    Attributes:
        thread: The transfer thread; its `agent` may be used, because all coordinators run on it.
        handshakes: Client of the side channel.
        codec: Encodes and decodes notifications.
        recorder: Records observations and log lines.
        now_s: Monotonic clock.
        engine_id: This engine's id, as its completions state it.
        peer_spec: Class of the value that describes a peer rank to the agent.
        settings: The connector's configuration.
        dialect: Connector version of peers whose tickets announce none.
    """

    thread: TransferThread
    handshakes: HandshakeClient
    codec: Codec
    recorder: Recorder
    now_s: Callable[[], float]
    engine_id: str
    peer_spec: type[PeerSpec]
    settings: Settings
    dialect: int


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
        waiting_since_s: Time since which it waits for its engine; None while it does not.
        engine: Engine that the read was posted to; None before.
        attempt: Number of the current attempt; 0 before the first post.
        deadline_s: Time at which the read is given up, across both attempts.
        trusted_until_s: Time until which the peer's lease certainly has not ended.
        transfers: Transfers that have not ended, by id.
        unquiet: Transfers that ended but may still write into the pages.
        done_ranks: Ranks whose part has arrived with its fence verified, and whose "read complete" has been sent.
        staged: Regions whose pages must be permuted once all of them have arrived, with the numbers of the pages.
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
    waiting_since_s: float | None = None
    engine: PeerEngine | None = None
    attempt: int = 0
    deadline_s: float = 0.0
    trusted_until_s: float = 0.0
    transfers: dict[str, Rank] = field(default_factory=dict[str, "Rank"])
    unquiet: set[str] = field(default_factory=set[str])
    done_ranks: set[Rank] = field(default_factory=set["Rank"])
    staged: Sequence[tuple[StagedRegion, PageNumbers]] = ()
    code: str = ""
    message: str = ""
    may_retry: bool = True
    is_ended: bool = False
    was_met: bool = True
    is_cancelled: bool = False
    is_passed_on: bool = False

    def begin_attempt(self, engine: PeerEngine, ranks: Iterable[Rank], now_s: float, settings: Settings) -> None:
        """Name the transfers of an attempt, e.g. `r1/0.1`, and `r1/0.1+` at the second one; the first sets the deadlines."""
        if not self.attempt:
            self.times.posted_s = now_s
            self.deadline_s = now_s + settings.read_timeout_s
            self.trusted_until_s = now_s + (self.order.ticket.lease_s or settings.kv_lease_duration)
        self.attempt += 1
        self.engine = engine
        mark = "+" * (self.attempt - 1)
        self.transfers = {f"{self.order.request_id}/{pp}.{tp}{mark}": (pp, tp) for pp, tp in ranks}

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

    def ended(self, now_s: float) -> ReadEnd:
        """Return its end as of now."""
        staged = () if self.code else self.staged
        return ReadEnd(self.order, self.code, self.message, self.times, now_s, self.was_met, staged)

    def describe(self, now_s: float) -> Entry:
        """Return an operator's view."""
        order = self.order
        stage = "in quarantine" if self.unquiet else "on the wire"
        entry: Entry = {
            "request_id": order.request_id,
            "peer_request_id": order.ticket.peer_request_id,
            "peer_engine_id": order.ticket.peer.engine_id,
            "tokens": order.tokens,
            "stage": stage if self.transfers else "waits for its peer",
            "age_s": now_s - self.times.ordered_s,
            "attempt": self.attempt,
            "transfers_left": len(self.transfers),
        }
        if self.attempt:
            entry["deadline_in_s"] = self.deadline_s - now_s
        if self.code:
            entry["code"], entry["message"] = self.code, self.message
        return entry


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
        one = self.address
        return (
            (peer.generation is None or peer.generation in {one.generation, self.generation})
            and peer.engine_id == one.engine_id
            and (peer.host, peer.port) == (one.host, one.port)
            and (peer.tp, peer.pp, peer.dcp) == (one.tp, one.pp, one.dcp)
        )

    def describe(self, now_s: float) -> Entry:
        """Return an operator's view."""
        address, plan = self.address, self.plan
        return {
            "engine_id": self.engine_id,
            "side_channel": f"{address.host}:{address.port}",
            "phase": self.phase,
            "ranks_read": [f"{pp}.{tp}" for pp, tp in plan.producer_ranks] if plan is not None else [],
            "bytes_per_token": plan.bytes_per_token if plan is not None else None,
            "is_fenced": self.is_fenced,
            "reads_in_flight": self.reads_in_flight,
            "reads_waiting": len(self.waiting),
            "unused_s": now_s - self.last_used_s,
            "silent_s": now_s - self.last_answer_s,
            "silent_probes": self.silent_probes,
        }


def notices_restart(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a peer's restart would be noticed: by its fence words, or by the generation in the ticket."""
    return (engine.is_fenced and order.ticket.fence is not None) or order.ticket.peer.generation is not None


def refusal(order: ReadOrder, engine: PeerEngine) -> tuple[str, str] | None:
    """Return why a ticket contradicts its engine's announcements and must be refused; None if it does not."""
    if engine.is_fenced and order.ticket.fence is None:
        return "fence-missing", f"engine {engine.engine_id} has fences, but the ticket names none"
    if "prompt-digest" in engine.capabilities and not order.ticket.prompt:
        return "prompt-missing", f"engine {engine.engine_id} binds tickets to prompts, but the ticket has no digest"
    if not engine.has_our_blocks and "prompt-digest" not in engine.capabilities and _is_placed_by_size(order):
        sizes = f"blocks of engine {engine.engine_id} hold other numbers of tokens than ours"
        return "peer-blocks-unplaced", f"{sizes}, and its ticket does not say where its block lists begin"
    if lacks_nonce(order, engine):
        return "nonce-missing", f"engine {engine.engine_id} gives each ticket a nonce, but this one has none"
    return None


def _is_placed_by_size(order: ReadOrder) -> bool:
    """Return whether a block list does not begin with the prompt's first block: such tickets do not say where it begins instead.

    Tickets of vLLM's own connector, and of version 0.1 of this one, contain only ids. The scheduler, which does not know the
    peer's block size, placed them as if it were ours.
    """
    return any(
        blocks.first_token or (blocks.null is not None and blocks.null in blocks.ids)
        for blocks in order.ticket.peer_blocks
    )


def lacks_nonce(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a ticket lacks the nonce although its engine gives every ticket one.

    Request ids are no secrets, so such a ticket may be forged. The producer would count a "read complete" in the request's name,
    and end the lease while the holder of the real ticket still reads.
    """
    return "nonce" in engine.capabilities and not order.ticket.nonce


def may_retry(read: Read, now_s: float, settings: Settings) -> bool:
    """Return whether to retry a read that has failed: its peer caused the failure, and time and attempts remain.

    Both attempts share one deadline. A rank whose part has arrived is neither read nor notified again, so a second attempt is
    made only where a restart of the peer would be noticed, and only while the peer keeps its pages as before.
    """
    if not read.may_retry or read.attempt > settings.read_retries or read.engine is None:
        return False
    is_in_time = now_s < min(read.deadline_s, read.trusted_until_s)
    return is_in_time and notices_restart(read.order, read.engine)


def refused_retry(
    read: Read, plan: PeerPlan, engine: PeerEngine, now_s: float, settings: Settings
) -> tuple[str, str] | None:
    """Return why a second attempt cannot continue where the first one ended, as (code, message); None if it can."""
    if now_s >= read.deadline_s:
        return "transfer-timed-out", f"the engine was met anew only after {settings.read_timeout_s:g} s"
    is_same_plan = read.done_ranks <= set(plan.producer_ranks) and bool(read.staged) == plan.is_staged
    if not is_same_plan or not notices_restart(read.order, engine):
        return "peer-changed", "the engine that was met anew keeps its pages in another way than before"
    return None


def note_quarantine(parts: TransferParts, read: Read, result: TransferResult) -> None:
    """Count an ended transfer that may still write into its read's pages; the first one of a read is logged."""
    is_first = not read.unquiet
    read.unquiet.add(result.transfer_id)
    parts.recorder.count("num_quarantined_reads")
    if is_first:
        parts.recorder.warn(
            "quarantine",
            f"request {read.order.request_id}: its pages stay quarantined until the transfers from engine "
            f"{read.order.ticket.peer.engine_id} are known to be over ({result.code})",
        )
