"""Records of the transfer thread: the parts that it shares, one read in progress, and one peer engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

from vllm_adapter.cache.names import channel_text, peer_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

__all__ = ["PeerEngine", "Read", "TransferParts"]


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

    def cancel(self, read: Read) -> None:
        """Cancel a read's transfers that are on the wire; each of them still ends."""
        for transfer_id in read.transfers:
            with self.recorder.guarded("cancellation"):
                self.thread.agent.cancel(transfer_id)


@final
@dataclass(slots=True, eq=False)
class Read:
    """A read from its order to its single end: one transfer per producer rank, in up to two attempts.

    Attributes:
        order: Order that the read carries out.
        times: Timestamps of its stages.
        stream: Order of the stream that it is; None for a plain read.
        open_ranks: Of a stream: names of its producer ranks that have not reported.
        whole_ranks: Of a stream: the reads from the ranks whose fence held.
        waiting_since_s: Time since which it waits for its engine; 0 while it does not.
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
        was_connected: Whether no handshake for it has failed.
        is_cancelled: Whether its request has ended: what becomes of its transfers from then on is no failure.
        is_passed_on: Whether another request reads the same hand-over, so that the producer must not be notified of this end.
    """

    order: ReadOrder
    times: ReadTimes
    stream: StreamOrder | None = None
    open_ranks: dict[Rank, str] = field(default_factory=dict["Rank", str])
    whole_ranks: list[TransferResult] = field(default_factory=list["TransferResult"])
    waiting_since_s: float = 0.0
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
    was_connected: bool = True
    is_cancelled: bool = False
    is_passed_on: bool = False

    def fail(self, code: str, message: str, *, may_retry: bool = False) -> bool:
        """Note a failure; return whether it is the first."""
        self.may_retry = self.may_retry and may_retry
        is_first = not self.code
        if is_first:
            self.code, self.message = code or "transfer-failed", message
        return is_first

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
@dataclass(slots=True, eq=False)
class PeerEngine:
    """Known state of one peer engine.

    Attributes:
        address: The engine as tickets name it: id, host, port, sizes and generation.
        phase: `wiring` (its handshake is in progress), `ready` (planned, prepared, connected) or `draining` (reads in flight may
            end and new ones wait; then the engine is forgotten and set up again).
        waiting: Reads that wait for it.
        plan: Plan for reading from it; unset while `wiring`.
        keys: Names on the transfer thread of all ranks that are notified, those that are read from first.
        is_fenced: Whether all ranks that are read from have a fence array.
        can_stream: Whether its prompts can be read in parts while it computes them.
        has_our_blocks: Whether its cache groups have blocks of as many tokens as ours.
        capabilities: Capabilities that all its ranks announce. With `nonce`, a ticket without one is not answered: request ids
            are not secret, so it may be forged, and a notification in the request's name would renew or end the lease of the
            real ticket's holder.
        generation: Generation of its memory registration; None if it announces none.
        reads: Reads posted to it that have not ended.
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
    plan: PeerPlan = field(init=False)
    keys: dict[Rank, str] = field(default_factory=dict["Rank", str])
    is_fenced: bool = False
    can_stream: bool = False
    has_our_blocks: bool = False
    capabilities: frozenset[str] = frozenset()
    generation: int | None = None
    reads: set[Read] = field(default_factory=set["Read"])
    silent_probes: int = 0
    is_probed: bool = False

    @property
    def engine_id(self) -> str:
        """Engine id of the peer."""
        return self.address.engine_id

    @property
    def text(self) -> str:
        """The engine as log lines name it."""
        return peer_text(self.address)

    def key(self, rank: Rank) -> str:
        """Return the name of one rank on the transfer thread, e.g. `P@10.0.0.1:5600/2.1.1/0.1#7f` (tp 2, tp rank 1)."""
        peer = self.address
        life = "" if peer.generation is None else f"#{peer.generation:x}"
        place = channel_text(peer.host, peer.port)
        return f"{peer.engine_id}@{place}/{peer.tp}.{peer.pp}.{peer.dcp}/{rank[0]}.{rank[1]}{life}"

    def set_ready(self, plan: PeerPlan, metadata: Mapping[Rank, AgentMetadata]) -> None:
        """Store the plan and the metadata from the handshake."""
        self.plan = plan
        self.keys = {rank: self.key(rank) for rank in (*plan.producer_ranks, *plan.notify_only_ranks)}
        self.generation = next((m.generation for m in metadata.values() if m.generation is not None), None)
        self.is_fenced = all(metadata[rank].fence is not None for rank in plan.producer_ranks)
        announced = [frozenset(m.capabilities) for m in metadata.values()]
        self.capabilities = announced[0].intersection(*announced[1:]) if announced else frozenset()

    def is_meant_by(self, peer: PeerAddress) -> bool:
        """Return whether a ticket's address means this engine: the generations are equal, or one side announces none."""
        known = self.address
        is_same = peer._replace(generation=known.generation, dialect=known.dialect) == known
        return is_same and (peer.generation is None or peer.generation in {known.generation, self.generation})

    def describe(self, now_s: float) -> Entry:
        """Return an operator's view."""
        address, plan = self.address, None if self.phase == "wiring" else self.plan
        return {
            "engine_id": self.engine_id,
            "side_channel": channel_text(address.host, address.port),
            "phase": self.phase,
            "ranks_read": [f"{pp}.{tp}" for pp, tp in plan.producer_ranks] if plan is not None else [],
            "bytes_per_token": plan.bytes_per_token if plan is not None else None,
            "is_fenced": self.is_fenced,
            "reads_in_flight": len(self.reads),
            "reads_waiting": len(self.waiting),
            "unused_s": now_s - self.last_used_s,
            "silent_s": now_s - self.last_answer_s,
            "silent_probes": self.silent_probes,
        }
