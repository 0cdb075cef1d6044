"""Peer engines as one worker knows them: met, planned against, used, dropped. Transfer thread only.

A ticket is a client's word, so engines are told apart by all of it: name, address, sizes and generation. A lying ticket can
fail its own request, it cannot lend its engine to an honest one.

One engine is known through a record that is wiring (its handshake runs), ready (planned, prepared, wired up), or draining
(something is wrong with it: its reads in flight may end, new orders wait, then it is forgotten and met anew). An order that
reaches a wiring or draining engine waits in that record and nowhere else, so no other engine's reads wait with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_adapter.cache.peer_geometry import PeerGeometry
    from vllm_adapter.ports import (
        HandshakeClient,
        HandshakeOutcome,
        HeartbeatOrder,
        PeerMetadata,
        PeerOrder,
        PeerPlan,
        Planner,
        ReadOrder,
        TransferThread,
    )

__all__ = ["PeerDirectory", "PeerEngine", "PeerLimits", "PeerObserver", "Rank", "code_of"]

_NO_FENCE = (
    "without fences, as vLLM's own connector does not offer them: its reads are trusted by their leases alone, its factors "
    "cannot be compared and a restart of it is found by a failed read"
)
Rank = tuple[int, int]
Address = tuple[str, str, int, int, int, int, int | None]


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Durations, and the connector version assumed of peers that do not say theirs."""

    handshake_s: float
    engine_ttl_s: float
    dialect: int


@dataclass(frozen=True, slots=True)
class PeerObserver:
    """Where the directory reports; all callables are cheap."""

    ready: Callable[[ReadOrder, PeerEngine], None]
    """An order's engine is ready for it."""
    failed: Callable[[ReadOrder, str, str], None]
    """An order's engine cannot be read from: code and message."""
    count: Callable[[str], None]
    observe: Callable[[str, float], None]
    log: Callable[[str], None]


@dataclass(slots=True)
class PeerEngine:
    """What is known of one peer engine.

    Attributes:
        engine_id: Its name.
        address: All by which tickets tell engines apart: name, host, port, tp, pp and dcp sizes, generation.
        phase: See the module.
        waiting: Orders that wait for it.
        plan: How it is read from; None until it is ready.
        is_fenced: Whether all ranks that are read from have a fence array.
        generation: Incarnation of its memory registration, None if it does not say.
        reads_in_flight: Requests that are being read from it.
        last_used_s: When an order last named it.
    """

    engine_id: str
    address: Address
    phase: Literal["wiring", "ready", "draining"] = "wiring"
    waiting: list[ReadOrder] = field(default_factory=list["ReadOrder"])
    plan: PeerPlan | None = None
    is_fenced: bool = False
    generation: int | None = None
    reads_in_flight: int = 0
    last_used_s: float = 0.0

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks that hear from us: those that are read from, then those that are only notified."""
        return (*self.plan.producer_ranks, *self.plan.notify_only_ranks) if self.plan is not None else ()

    def key(self, rank: Rank) -> str:
        """Name of one rank on the transfer thread."""
        _, host, port, tp, pp, dcp, generation = self.address
        life = "" if generation is None else f"#{generation:x}"
        return f"{self.engine_id}@{host}:{port}/{tp}.{pp}.{dcp}/{rank[0]}.{rank[1]}{life}"


@final
class PeerDirectory:
    """Meets engines for orders, and hands each order on exactly once: to `ready` or to `failed`."""

    def __init__(
        self,
        geometry: Mapping[str, object],
        peer_geometry: PeerGeometry,
        planner: Planner,
        observer: PeerObserver,
        limits: PeerLimits,
        *,
        now_s: Callable[[], float],
    ) -> None:
        self._geometry = geometry
        self._peer_geometry = peer_geometry
        self._planner = planner
        self._observer = observer
        self._limits = limits
        self._now_s = now_s
        self._engines: dict[Address, PeerEngine] = {}
        self._threads: tuple[TransferThread, HandshakeClient] | None = None

    def attach(self, agent: TransferThread, handshakes: HandshakeClient) -> None:
        """Connect the two threads that this directory stands between; before the first order."""
        self._threads = (agent, handshakes)

    @property
    def _agent(self) -> TransferThread:
        assert self._threads is not None, "attach() comes before the first order"  # noqa: S101
        return self._threads[0]

    def __len__(self) -> int:
        return len(self._engines)

    # ---------------------------------------------------------------------------------------------- orders

    def submit(self, order: ReadOrder) -> None:
        """Pass an order on to `ready`, now or when its engine is."""
        engine = self._find(order)
        if engine is None:
            self._meet(order, [order])
        elif engine.phase == "ready":
            engine.last_used_s = self._now_s()
            self._observer.ready(order, engine)
        else:
            engine.waiting.append(order)

    def waiting(self, request_id: str) -> list[ReadOrder]:
        """Return a request's orders whose engine is not ready yet."""
        return [o for engine in self._engines.values() for o in engine.waiting if o.request_id == request_id]

    def take_waiting(self) -> list[ReadOrder]:
        """Return all orders that wait for an engine; none of them waits any longer."""
        taken: list[ReadOrder] = []
        for engine in self._engines.values():
            taken += engine.waiting
            engine.waiting = []
        return taken

    def find_or_meet(self, order: HeartbeatOrder) -> PeerEngine | None:
        """Return the engine if it is ready; one that is not known yet is met meanwhile."""
        engine = self._find(order)
        if engine is None:
            self._meet(order, [])
            return None
        if engine.phase != "ready":
            return None
        engine.last_used_s = self._now_s()
        return engine

    def notify(self, engine: PeerEngine, rank: Rank, payload: bytes) -> None:
        """Send a notification to one rank, counting a failure; nothing is raised, also by an agent that is being closed."""
        try:
            is_sent = self._agent.send_notification(engine.key(rank), payload)
        except Exception as error:  # noqa: BLE001  (what it would interrupt is the end of a request)
            self._observer.log(f"engine {engine.engine_id} could not be notified: {error}")
            is_sent = False
        if not is_sent:
            self._observer.count("num_failed_notifications")

    # ---------------------------------------------------------------------------------------------- meeting

    def _find(self, order: PeerOrder) -> PeerEngine | None:
        """Return the record that an order means: of its generation, or of any where one of the two does not say."""
        address = _address(order)
        found = self._engines.get(address)
        if found is not None:
            return found
        wanted = order.peer_generation
        for engine in self._engines.values():
            if engine.address[:-1] == address[:-1] and (wanted is None or engine.generation == wanted):
                return engine
        return None

    def _meet(self, order: PeerOrder, waiting: list[ReadOrder]) -> None:
        assert self._threads is not None, "attach() comes before the first order"  # noqa: S101
        agent, handshakes = self._threads
        engine = PeerEngine(order.peer_engine_id, _address(order), waiting=waiting, last_used_s=self._now_s())
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
                generation=order.peer_generation,
                on_done=lambda outcome: agent.call_soon(lambda: self._handshake_ended(engine, order, outcome)),
            )
        except Exception as error:  # noqa: BLE001  (any refusal of a ticket's numbers ends its requests, never this thread)
            self._fail(engine, code_of(error), str(error))

    def _handshake_ended(self, engine: PeerEngine, order: PeerOrder, outcome: HandshakeOutcome) -> None:
        if self._engines.get(engine.address) is not engine:
            return
        self._observer.observe("handshake_duration", outcome.elapsed_s)
        if not outcome.is_ok:
            self._observer.count("num_failed_handshakes")
            self._fail(engine, outcome.code, outcome.message)
            return
        try:
            self._wire_up(engine, order, outcome.peers)
        except Exception as error:  # noqa: BLE001  (whatever a peer's metadata provokes ends its requests, never this thread)
            self._observer.count("num_failed_handshakes")
            self._forget_ranks(engine)
            self._fail(engine, code_of(error), f"engine {engine.engine_id} cannot be read from: {error}")
            return
        engine.phase = "ready"
        waiting, engine.waiting = engine.waiting, []
        for waiting_order in waiting:
            self._observer.ready(waiting_order, engine)

    def _wire_up(self, engine: PeerEngine, order: PeerOrder, peers: Mapping[Rank, PeerMetadata]) -> None:
        """Plan against the peer's geometry and prepare its ranks; raises coded errors."""
        documents = {
            rank: self._peer_geometry.document(self._geometry, metadata, rank, order)
            for rank, metadata in peers.items()
        }
        plan = self._planner.plan(self._geometry, documents, peer_tp=order.peer_tp)
        self._yield_names(engine)
        engine.plan = plan
        engine.generation = next((m.generation for m in peers.values() if m.generation is not None), None)
        engine.is_fenced = all(peers[rank].fence is not None for rank in plan.producer_ranks)
        for rank in engine.ranks:
            metadata = peers[rank]
            self._agent.add_peer(
                engine.key(rank),
                metadata.agent_metadata,
                local_rows=plan.local_rows(rank),
                peer_rows=plan.peer_rows(rank),
                memory_kind=self._peer_geometry.memory_kind(metadata),
                fence=metadata.fence,
            )
        self._observer.log(
            f"engine {engine.engine_id} is ready: reads from ranks {list(plan.producer_ranks)}, "
            f"{plan.bytes_per_token:g} bytes a token, {'fenced' if engine.is_fenced else _NO_FENCE}"
        )

    def _yield_names(self, engine: PeerEngine) -> None:
        """Forget idle records of the same engine under another address: NIXL knows an agent once."""
        for other in list(self._engines.values()):
            is_alias = other is not engine and other.engine_id == engine.engine_id
            if is_alias and other.phase == "ready" and other.reads_in_flight == 0:
                self.drop(other, f"it is now known as {engine.key((0, 0))}")

    # ---------------------------------------------------------------------------------------------- parting

    def _fail(self, engine: PeerEngine, code: str, message: str) -> None:
        """Forget an engine that could not be met, and fail what waited for it."""
        if self._engines.get(engine.address) is engine:
            del self._engines[engine.address]
        waiting, engine.waiting = engine.waiting, []
        for order in waiting:
            self._observer.failed(order, code, message)

    def drop(self, engine: PeerEngine, why: str) -> None:
        """Stop using an engine's present agents; it is met anew once its reads in flight have ended."""
        if engine.phase != "draining":
            self._observer.log(f"engine {engine.engine_id} is dropped and will be met anew: {why}")
            engine.phase = "draining"
        self._part_when_idle(engine)

    def read_ended(self, engine: PeerEngine) -> None:
        """Note that one of the engine's reads in flight is over."""
        engine.reads_in_flight -= 1
        if engine.phase == "draining":
            self._part_when_idle(engine)

    def _part_when_idle(self, engine: PeerEngine) -> None:
        if engine.reads_in_flight or self._engines.get(engine.address) is not engine:
            return
        self._forget_ranks(engine)
        del self._engines[engine.address]
        waiting, engine.waiting = engine.waiting, []
        for order in waiting:
            self.submit(order)

    def _forget_ranks(self, engine: PeerEngine) -> None:
        for rank in engine.ranks:
            if self._agent.has_peer(engine.key(rank)):
                self._agent.remove_peer(engine.key(rank))

    def look_after(self) -> None:
        """Give up engines whose handshake never ended, and drop unused ones; never one with reads in flight."""
        now_s = self._now_s()
        for engine in list(self._engines.values()):
            idle_s = now_s - engine.last_used_s
            if engine.phase == "wiring" and idle_s > self._limits.handshake_s:
                message = (
                    f"the handshake with engine {engine.engine_id} did not end within {self._limits.handshake_s:g} s"
                )
                self._fail(engine, "handshake-overdue", message)
            elif engine.phase == "ready" and not engine.reads_in_flight and idle_s > self._limits.engine_ttl_s:
                self.drop(engine, f"unused for {self._limits.engine_ttl_s:g} s")


def code_of(error: Exception) -> str:
    """Return the code of a coded error, or the name of any other."""
    code: object = getattr(error, "code", None)
    return code if isinstance(code, str) else type(error).__name__


def _address(order: PeerOrder) -> Address:
    return (
        order.peer_engine_id,
        order.peer_host,
        order.peer_port,
        order.peer_tp,
        order.peer_pp,
        order.peer_dcp,
        order.peer_generation,
    )
