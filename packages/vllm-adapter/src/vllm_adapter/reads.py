"""The consumer's part of a worker: peers, plans and reads, all on the transfer thread.

A ticket is a client's word, so engines are told apart by all of it: name, address and sizes. A lying ticket can fail its own
request, it cannot lend its engine to an honest one.

One engine is known through a record that is wiring (its handshake runs), ready (planned, prepared, wired up), or draining
(something is wrong with it: its reads in flight may end, new orders wait, then it is forgotten and met anew). An order that
reaches a wiring or draining engine waits in that record and nowhere else, so no other engine's reads wait with it.

A request's read is one transfer per producer rank. It ends once: when the last of them has ended and no peer can write
into its pages any more. After the first failure nothing more is posted for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.peer_geometry import PeerGeometry
    from vllm_adapter.ports import (
        HandshakeClient,
        HandshakeOutcome,
        HeartbeatOrder,
        Indices,
        PeerMetadata,
        PeerPlan,
        Planner,
        ReadOrder,
        TransferResult,
        TransferThread,
        WireCodec,
    )

__all__ = ["ReadCoordinator", "ReadEnd", "ReadLimits", "ReadObserver"]

Rank = tuple[int, int]
Address = tuple[str, str, int, int, int, int]
_FAULTS_OF_THE_READ = frozenset({"fence-rejected", "timed-out", "cancelled"})


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The one end of a request's read, for the engine thread."""

    order: ReadOrder
    code: str
    message: str

    @property
    def is_ok(self) -> bool:
        """Whether every page arrived and the lease held."""
        return not self.code


@dataclass(frozen=True, slots=True)
class ReadObserver:
    """Where the coordinator reports; all callables are cheap and thread-safe."""

    ended: Callable[[ReadEnd], None]
    transferred: Callable[[TransferResult], None]
    count: Callable[[str], None]
    observe: Callable[[str, float], None]
    log: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Durations, and the connector version assumed of peers that do not say theirs."""

    read_timeout_s: float
    lease_s: float
    engine_ttl_s: float
    handshake_s: float
    dialect: int


@dataclass(slots=True)
class _Engine:
    """What is known of one peer engine."""

    engine_id: str
    address: Address
    phase: Literal["wiring", "ready", "draining"] = "wiring"
    waiting: list[ReadOrder] = field(default_factory=list["ReadOrder"])
    plan: PeerPlan | None = None
    is_fenced: bool = False
    generation: int | None = None
    reads_in_flight: int = 0
    last_used_s: float = 0.0


@dataclass(slots=True)
class _Read:
    """One request's read in progress."""

    order: ReadOrder
    engine: _Engine
    open_transfers: set[str]
    unquiet: set[str]
    trusted_until_s: float
    code: str = ""
    message: str = ""


@final
class ReadCoordinator:
    """Turns read orders into transfers and their results into one end per request. Transfer thread only."""

    def __init__(
        self,
        geometry: Mapping[str, object],
        peer_geometry: PeerGeometry,
        planner: Planner,
        codec: WireCodec,
        observer: ReadObserver,
        limits: ReadLimits,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._geometry = geometry
        self._peer_geometry = peer_geometry
        self._planner = planner
        self._codec = codec
        self._observer = observer
        self._now_s = now_s
        self._limits = limits
        self._engines: dict[Address, _Engine] = {}
        self._reads: dict[str, _Read] = {}
        self._agent: TransferThread | None = None
        self._handshakes: HandshakeClient | None = None

    def attach(self, agent: TransferThread, handshakes: HandshakeClient) -> None:
        """Connect the two threads that this coordinator stands between; before the first order."""
        self._agent, self._handshakes = agent, handshakes

    # ---------------------------------------------------------------------------------------------- orders

    def read(self, order: ReadOrder) -> None:
        """Start a request's read, or let it wait for its engine."""
        engine = self._engines.get(_address(order))
        if (
            engine is not None
            and engine.phase == "ready"
            and _is_other_generation(engine.generation, order.peer_generation)
        ):
            self._drain(engine, f"its registration changed (generation {engine.generation} -> {order.peer_generation})")
            engine = self._engines.get(_address(order))
        if engine is None:
            self._meet(order, [order])
        elif engine.phase == "ready":
            engine.last_used_s = self._now_s()
            self._post(order, engine)
        else:
            engine.waiting.append(order)

    def cancel(self, request_id: str) -> None:
        """Give up a read that nobody wants any more; it still ends, once, when its pages are quiet."""
        assert self._agent is not None  # noqa: S101
        for transfer_id, read in list(self._reads.items()):
            if read.order.request_id == request_id:
                self._agent.cancel(transfer_id)
        for engine in self._engines.values():
            for order in [order for order in engine.waiting if order.request_id == request_id]:
                engine.waiting.remove(order)
                self._end(order, "cancelled", "the request was aborted before its read began")

    def heartbeat(self, order: HeartbeatOrder) -> None:
        """Renew leases at a peer engine; an engine that is not known yet is met first."""
        engine = self._engines.get(_address(order))
        if engine is None:
            self._meet(order, [])
            return
        if engine.phase != "ready" or engine.plan is None:
            return
        now_s = self._now_s()
        engine.last_used_s = now_s
        for rank in _all_ranks(engine.plan):
            for payload in self._codec.heartbeats(order.peer_request_ids):
                self._notify(engine, rank, payload)
        renewed = set(order.peer_request_ids)
        for read in self._reads.values():
            if read.engine is engine and read.order.peer_request_id in renewed:
                # A lease is renewed to two thirds of its length from now. Source: vLLM's lease renewal.
                read.trusted_until_s = max(read.trusted_until_s, now_s + 2 / 3 * self._limits.lease_s)

    # ---------------------------------------------------------------------------------------------- meeting engines

    def _meet(self, order: ReadOrder | HeartbeatOrder, waiting: list[ReadOrder]) -> None:
        agent, handshakes = self._agent, self._handshakes
        assert agent is not None and handshakes is not None, "attach() comes before the first order"  # noqa: S101, PT018
        engine = _Engine(order.peer_engine_id, _address(order), waiting=waiting, last_used_s=self._now_s())
        self._engines[engine.address] = engine
        try:
            ranks = self._planner.target_ranks(
                self._geometry, peer_tp=order.peer_tp, peer_pp=order.peer_pp, peer_dcp=order.peer_dcp
            )
            handshakes.request(
                host=order.peer_host,
                port=order.peer_port,
                ranks=ranks,
                engine_id=engine.engine_id,
                dialect=order.peer_dialect or self._limits.dialect,
                on_done=lambda outcome: agent.call_soon(lambda: self._handshake_ended(engine, order, outcome)),
            )
        except Exception as error:  # noqa: BLE001  (any refusal of a ticket's numbers ends its requests, never this thread)
            self._fail_engine(engine, _code_of(error), str(error))

    def _handshake_ended(self, engine: _Engine, order: ReadOrder | HeartbeatOrder, outcome: HandshakeOutcome) -> None:
        if self._engines.get(engine.address) is not engine:
            return
        self._observer.observe("handshake_duration", outcome.elapsed_s)
        if not outcome.is_ok:
            self._observer.count("num_failed_handshakes")
            self._fail_engine(engine, outcome.code, outcome.message)
            return
        try:
            self._wire_up(engine, order, outcome.peers)
        except Exception as error:  # noqa: BLE001  (whatever a peer's metadata provokes ends its requests, never this thread)
            self._observer.count("num_failed_handshakes")
            self._forget_ranks(engine)
            self._fail_engine(engine, _code_of(error), f"engine {engine.engine_id} cannot be read from: {error}")
            return
        engine.phase = "ready"
        waiting, engine.waiting = engine.waiting, []
        for waiting_order in waiting:
            self._post(waiting_order, engine)

    def _wire_up(self, engine: _Engine, order: ReadOrder | HeartbeatOrder, peers: Mapping[Rank, PeerMetadata]) -> None:
        """Plan against the peer's geometry and prepare its ranks; raises coded errors."""
        assert self._agent is not None  # noqa: S101
        documents = {
            rank: self._peer_geometry.document(self._geometry, metadata, rank, order)
            for rank, metadata in peers.items()
        }
        plan = self._planner.plan(self._geometry, documents, peer_tp=order.peer_tp)
        self._yield_names(engine)
        engine.plan = plan
        engine.generation = next((m.generation for m in peers.values() if m.generation is not None), None)
        engine.is_fenced = all(peers[rank].fence is not None for rank in plan.producer_ranks)
        for rank in _all_ranks(plan):
            metadata = peers[rank]
            self._agent.add_peer(
                _peer_key(engine, rank),
                metadata.agent_metadata,
                local_rows=plan.local_rows(rank),
                peer_rows=plan.peer_rows(rank),
                memory_kind=self._peer_geometry.memory_kind(metadata),
                fence=metadata.fence,
            )
        self._observer.log(
            f"engine {engine.engine_id} is ready: reads from ranks {list(plan.producer_ranks)}, "
            f"{plan.bytes_per_token:g} bytes a token, fence {'verified' if engine.is_fenced else 'not offered by this peer'}"
        )

    def _yield_names(self, engine: _Engine) -> None:
        """Forget idle records of the same engine under another address: NIXL knows an agent once."""
        for other in list(self._engines.values()):
            is_alias = other is not engine and other.engine_id == engine.engine_id
            if is_alias and other.phase == "ready" and other.reads_in_flight == 0:
                self._drain(other, f"it is now known as {_peer_key(engine, (0, 0))}")

    def _fail_engine(self, engine: _Engine, code: str, message: str) -> None:
        """Forget an engine that could not be met, and fail what waited for it."""
        if self._engines.get(engine.address) is engine:
            del self._engines[engine.address]
        waiting, engine.waiting = engine.waiting, []
        for order in waiting:
            self._end(order, code, message)

    def _drain(self, engine: _Engine, why: str) -> None:
        """Stop using an engine's present agents; it is met anew once its reads in flight have ended."""
        if engine.phase != "draining":
            self._observer.log(f"engine {engine.engine_id} is dropped and will be met anew: {why}")
            engine.phase = "draining"
        if engine.reads_in_flight == 0:
            self._forget_ranks(engine)
            waiting, engine.waiting = engine.waiting, []
            if self._engines.get(engine.address) is engine:
                del self._engines[engine.address]
            for order in waiting:
                self.read(order)

    def _forget_ranks(self, engine: _Engine) -> None:
        assert self._agent is not None  # noqa: S101
        if engine.plan is not None:
            for rank in _all_ranks(engine.plan):
                if self._agent.has_peer(_peer_key(engine, rank)):
                    self._agent.remove_peer(_peer_key(engine, rank))

    def look_after_engines(self) -> None:
        """Give up engines whose handshake never ended, and forget unused ones; never one with reads in flight."""
        overdue_s = self._now_s() - self._limits.handshake_s
        for engine in list(self._engines.values()):
            if engine.phase == "wiring" and engine.last_used_s < overdue_s:
                message = (
                    f"the handshake with engine {engine.engine_id} did not end within {self._limits.handshake_s:g} s"
                )
                self._fail_engine(engine, "handshake-overdue", message)
        limit_s = self._now_s() - self._limits.engine_ttl_s
        for engine in list(self._engines.values()):
            if engine.phase == "ready" and engine.reads_in_flight == 0 and engine.last_used_s < limit_s:
                self._drain(engine, f"unused for {self._limits.engine_ttl_s:g} s")

    # ---------------------------------------------------------------------------------------------- reads

    def _post(self, order: ReadOrder, engine: _Engine) -> None:
        plan = engine.plan
        assert plan is not None and self._agent is not None  # noqa: S101, PT018
        if not any(len(group) for group in order.local_block_ids):
            self._release_at_peer(order, engine, plan, _all_ranks(plan))
            self._end(order, "", "")
            return
        try:
            # All ranks' indices come first: nothing is posted for a request that a later rank would refuse.
            indices = {r: plan.indices(r, order.local_block_ids, order.peer_block_ids) for r in plan.producer_ranks}
        except Exception as error:  # noqa: BLE001  (block ids come from the client)
            self._release_at_peer(order, engine, plan, _all_ranks(plan))
            self._end(order, _code_of(error), str(error))
            return
        transfers = {f"{order.request_id}/{rank[0]}.{rank[1]}": rank for rank in plan.producer_ranks}
        trusted_until_s = self._now_s() + (order.lease_s or self._limits.lease_s)
        read = _Read(order, engine, set(transfers), set(), trusted_until_s)
        for transfer_id in transfers:
            self._reads[transfer_id] = read
        engine.reads_in_flight += 1
        for transfer_id, rank in transfers.items():
            self._post_one(read, transfer_id, rank, indices[rank])

    def _post_one(self, read: _Read, transfer_id: str, rank: Rank, indices: tuple[Indices, Indices]) -> None:
        plan = read.engine.plan
        assert plan is not None and self._agent is not None  # noqa: S101, PT018
        if read.code:
            self._close_transfer(read, transfer_id)
            return
        try:
            self._agent.post_read(
                transfer_id,
                _peer_key(read.engine, rank),
                *indices,
                notification=self._codec.read_complete(read.order.peer_request_id, plan.reader_count(rank)),
                deadline_s=self._limits.read_timeout_s,
                fence=read.order.fence if read.engine.is_fenced else None,
            )
        except Exception as error:  # noqa: BLE001  (posting is refused: the request fails, the thread goes on)
            self._note_failure(read, _code_of(error), str(error))
            self._close_transfer(read, transfer_id)

    def transfer_ended(self, result: TransferResult) -> None:
        """Take in the end of one rank's transfer."""
        read = self._reads.get(result.transfer_id)
        if read is None:
            return
        if result.outcome == "done":
            self._observer.transferred(result)
        else:
            self._note_failure(read, result.code, result.message)
            if result.outcome == "fence-rejected":
                self._observer.count("num_fence_rejections")
            elif result.outcome not in _FAULTS_OF_THE_READ and read.engine.phase == "ready":
                self._drain(read.engine, f"a read failed ({result.code}: {result.message})")
        if result.is_memory_quiet:
            self._close_transfer(read, result.transfer_id)
        else:
            read.unquiet.add(result.transfer_id)
            self._observer.count("num_quarantined_reads")
            self._observer.log(
                f"request {read.order.request_id}: its pages stay quarantined until the transfer from engine "
                f"{read.engine.engine_id} is known to be over ({result.code})"
            )

    def memory_quiet(self, transfer_id: str) -> None:
        """Take in that nothing can write into the pages of an ended transfer any more."""
        read = self._reads.get(transfer_id)
        if read is not None and transfer_id in read.unquiet:
            self._close_transfer(read, transfer_id)

    def _note_failure(self, read: _Read, code: str, message: str) -> None:
        if not read.code:
            read.code, read.message = code or "transfer-failed", message
            self._observer.count("num_failed_transfers")

    def _close_transfer(self, read: _Read, transfer_id: str) -> None:
        read.open_transfers.discard(transfer_id)
        self._reads.pop(transfer_id, None)
        if read.open_transfers:
            return
        engine, order = read.engine, read.order
        engine.reads_in_flight -= 1
        late_s = self._now_s() - read.trusted_until_s
        if not read.code and not (engine.is_fenced and order.fence is not None) and late_s > 0:
            # Without a fence the only proof that the pages were still this prompt's is that the lease had not ended.
            self._note_failure(
                read, "read-after-expiry", f"the read ended {late_s:.1f} s after the peer's lease on the pages"
            )
        if engine.plan is not None and engine.phase == "ready":
            ranks = engine.plan.notify_only_ranks if not read.code else _all_ranks(engine.plan)
            self._release_at_peer(order, engine, engine.plan, ranks)
        self._end(order, read.code, read.message)
        if engine.phase == "draining":
            self._drain(engine, "")

    def _release_at_peer(self, order: ReadOrder, engine: _Engine, plan: PeerPlan, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            self._notify(engine, rank, self._codec.read_complete(order.peer_request_id, plan.reader_count(rank)))

    def _notify(self, engine: _Engine, rank: Rank, payload: bytes) -> None:
        assert self._agent is not None  # noqa: S101
        if not self._agent.send_notification(_peer_key(engine, rank), payload):
            self._observer.count("num_failed_notifications")

    def _end(self, order: ReadOrder, code: str, message: str) -> None:
        if order.is_reported or code:
            self._observer.ended(ReadEnd(order, code, message))

    def snapshot(self) -> dict[str, int]:
        """Return how many engines and reads there are, for diagnosis."""
        return {"engines": len(self._engines), "transfers": len(self._reads)}


def _all_ranks(plan: PeerPlan) -> tuple[Rank, ...]:
    return (*plan.producer_ranks, *plan.notify_only_ranks)


def _address(order: ReadOrder | HeartbeatOrder) -> Address:
    return (
        order.peer_engine_id,
        order.peer_host,
        order.peer_port,
        order.peer_tp,
        order.peer_pp,
        order.peer_dcp,
    )


def _peer_key(engine: _Engine, rank: Rank) -> str:
    _, host, port, tp, pp, dcp = engine.address
    return f"{engine.engine_id}@{host}:{port}/{tp}.{pp}.{dcp}/{rank[0]}.{rank[1]}"


def _is_other_generation(known: int | None, announced: int | None) -> bool:
    return known is not None and announced is not None and known != announced


def _code_of(error: Exception) -> str:
    code: object = getattr(error, "code", None)
    return code if isinstance(code, str) else type(error).__name__
