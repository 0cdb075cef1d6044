"""Peer engines of one worker: set up, notified, probed and dropped. Transfer thread only.

Connecting to an engine takes a handshake, a plan and prepared lists.

Tickets come through clients, so an engine is identified by everything that a ticket says of it: id, host, port, sizes and
generation. A false ticket gets a record of its own. It can fail its own request; no other ticket is read through its record.

A read whose engine is not ready waits in that engine's record and nowhere else, so it does not delay the reads of other engines.
No read waits longer than a handshake may take. An engine whose handshake fails is forgotten at once: the client of the side
channel remembers the failure, answers the next request for that engine immediately, and asks the engine again in the background.

An engine that is not being read from is probed. If it is gone, its agents and prepared lists are released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.cache.vllm_peer import peer_memory_kind
from vllm_adapter.errors import code_of, message_of
from vllm_adapter.worker.transfer.records import PeerEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm_adapter.cache.vllm_peer import PeerPlanner, PeerRank
    from vllm_adapter.ports import AgentMetadata, HeartbeatOrder, Outcome, PeerAddress, PeerPlan, TransferResult
    from vllm_adapter.steps import Rank
    from vllm_adapter.worker.transfer.records import Read, TransferParts

__all__ = ["PeerDirectory"]

_NO_FENCE = (
    "without fences, as vLLM's own connector does not offer them: its reads are trusted by their leases alone, its factors "
    "cannot be compared, so that other weights or settings under one model name are not detected, and a restart of it is found "
    "by a failed read"
)
_NOT_BOUND = "its tickets are not bound to their prompts: a ticket that reaches the wrong prompt is not noticed"
_PIPELINE_RANKS_SINCE = 5
"""First dialect whose queries have three fields."""
_MOST_PROBE_S = 10.0
_SILENT_PROBES = 2
_PROBE_DEADLINE_S = 2.0


@final
class PeerDirectory:
    """Sets up engines for reads, and passes each submitted read on exactly once.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        planner: Plans against peers.
        ready: Called with reads and their engine, once that is ready; must not raise.
        failed: Called with a read whose engine cannot be read from, the code and the message; must not raise.

    Attributes:
        engines: The engines that are ready, draining or being set up, by address.
    """

    def __init__(
        self,
        parts: TransferParts,
        planner: PeerPlanner,
        *,
        ready: Callable[[Sequence[Read], PeerEngine], None],
        failed: Callable[[Read, str, str], None],
    ) -> None:
        self._parts = parts
        self._planner = planner
        settings = parts.settings
        # Longest wait of a read for its engine.
        self._wait_s = settings.handshake_timeout_s * (settings.handshake_attempts + 1)
        self._probe_s = min(_MOST_PROBE_S, settings.kv_lease_duration / 3)
        # Under seals all peers are of our kind; else those that announce this connector's capabilities.
        self._only_ours = settings.requires_seals
        self._ready = ready
        self._failed = failed
        self.engines: dict[PeerAddress, PeerEngine] = {}
        # The same under the id that a ticket names first: an engine has a record per address and generation.
        self._by_id: dict[str, list[PeerEngine]] = {}
        self._probes: dict[str, PeerEngine] = {}
        self._probe_count = 0

    # ---------------------------------------------------------------------------------------------- reads

    def submit(self, read: Read) -> None:
        """Pass a read on to `ready`, now or when its engine is ready."""
        engine = self.admit(read)
        if engine is not None:
            self._ready([read], engine)

    def admit(self, read: Read) -> PeerEngine | None:
        """Return the engine of a read if it is ready; else the read waits, and is passed on to `ready` later."""
        peer, now_s = read.order.ticket.peer, self._parts.now_s()
        engine = self.engines.get(peer) or self._known_as(peer)
        if engine is not None and engine.phase == "ready":
            if all(map(self._parts.thread.agent.has_peer, engine.keys.values())):
                engine.last_used_s, read.waiting_since_s = now_s, 0.0
                return engine
            self._drain(engine, "another engine has proved that its agents' names are its own")
            engine = self._known_as(peer)
        read.waiting_since_s = read.waiting_since_s or now_s
        if engine is None:
            self._connect(peer, [read])
        else:
            engine.waiting.append(read)
        return None

    def is_ready(self, peer: PeerAddress) -> bool:
        """Return whether an engine can be read from at once; any thread."""
        engine = self.engines.get(peer)
        return engine is not None and engine.phase == "ready"

    def take_waiting(self) -> list[Read]:
        """Return all reads that wait for an engine, and stop their waiting."""
        return [read for engine in self.engines.values() for read in _take(engine)]

    # ---------------------------------------------------------------------------------------------- notifications

    def read_complete(self, read: Read, plan: PeerPlan, rank: Rank) -> bytes:
        """Return the "read complete" notification for one rank of the producer."""
        ticket, count = read.order.ticket, plan.reader_count(rank)
        consumer = self._parts.engine_id if ticket.nonce else ""
        return self._parts.codec.read_complete(ticket.peer_request_id, count, nonce=ticket.nonce, consumer=consumer)

    def release(self, read: Read, engine: PeerEngine) -> None:
        """Notify the ranks whose completion has not been sent that this request needs nothing more from them."""
        is_refused = "nonce" in engine.capabilities and not read.order.ticket.nonce
        if read.is_passed_on or is_refused:
            return
        with self._parts.recorder.guarded("notification of a producer"):
            for rank in engine.keys:
                if rank not in read.done_ranks:
                    self._notify(engine, rank, self.read_complete(read, engine.plan, rank))

    def renew(self, order: HeartbeatOrder) -> tuple[PeerEngine | None, frozenset[str]]:
        """Send heartbeats; return the engine, and the ids of the requests whose leases they renew.

        Nothing is sent to an engine that is not ready (None, and no ids); the set-up of an unknown engine is started.
        """
        engine = self._known_as(order.peer)
        if engine is None:
            self._connect(order.peer, [])
        if engine is None or engine.phase != "ready":
            self._parts.recorder.count("num_unsent_heartbeats")
            return None, frozenset()
        engine.last_used_s = self._parts.now_s()
        readers = [reader for reader in order.readers if reader[1] or "nonce" not in engine.capabilities]
        payloads = self._parts.codec.heartbeats(readers) if readers else ()
        for rank in engine.keys:
            for payload in payloads:
                self._notify(engine, rank, payload)
        return engine, frozenset(request_id for request_id, _ in readers)

    def _notify(self, engine: PeerEngine, rank: Rank, payload: bytes) -> None:
        """Send a notification to one rank and count a failure; raises nothing, even if the agent is being closed."""
        try:
            is_sent = self._parts.thread.agent.send_notification(engine.keys[rank], payload)
        except Exception as error:  # noqa: BLE001  (what it would interrupt is the end of a request)
            self._parts.recorder.info("not-notified", f"{engine.text} could not be notified: {error}")
            is_sent = False
        if not is_sent:
            self._parts.recorder.count("num_failed_notifications")

    # ---------------------------------------------------------------------------------------------- connecting

    def _known_as(self, peer: PeerAddress) -> PeerEngine | None:
        """Return the engine that a ticket means, if need be under another address."""
        if peer in self.engines:
            return self.engines[peer]
        return next((engine for engine in self._by_id.get(peer.engine_id, ()) if engine.is_meant_by(peer)), None)

    def _connect(self, peer: PeerAddress, waiting: list[Read]) -> None:
        """Query the ranks that a ticket names; without seals, rank (0, 0) first, whose metadata may disprove the ticket.

        vLLM's own listener terminates on a query for a rank that it does not have. Every engine has rank (0, 0), and the
        length of its pages says how many heads a rank holds. Example: pages of 8 heads of 8 belong to tp 1; a ticket that
        says tp 2 is refused (`page-bytes-differ`) before rank (0, 1) is queried. Every later attempt is checked too, in case
        the engine has restarted.
        """
        now_s = self._parts.now_s()
        engine = self.engines[peer] = PeerEngine(peer, last_used_s=now_s, last_answer_s=now_s, waiting=waiting)
        self._by_id.setdefault(peer.engine_id, []).append(engine)
        lies: list[Exception] = []

        def check_first(first: AgentMetadata) -> None:
            """Raise if the engine's sizes differ from the ticket's; runs on the thread of the side channel's client."""
            try:
                self._planner.check_sizes(peer, first)
            except Exception as error:
                lies[:] = [error]
                raise

        try:
            ranks = self._planner.target_ranks(peer)
            is_sure = self._only_ours or set(ranks) == {(0, 0)}
            self._parts.handshakes.request(
                host=peer.host,
                port=peer.port,
                ranks=ranks,
                engine_id=peer.engine_id,
                dialect=self._dialect_for(peer),
                generation=peer.generation,
                on_done=lambda outcome: self._parts.thread.call_soon(
                    lambda: self._handshake_ended(engine, outcome, lies)
                ),
                check_first=None if is_sure else check_first,
            )
        except Exception as error:  # noqa: BLE001  (any refusal of a ticket's numbers ends its requests, never this thread)
            self._fail(engine, code_of(error), message_of(error))

    def _dialect_for(self, peer: PeerAddress) -> int:
        """Return the dialect to query in: the ticket's, unless its queries have another shape than the configured one's.

        vLLM's own listener terminates on a query of the wrong shape, and a ticket is only a client's claim. Our own listeners
        answer both shapes. Example: with dialect 14 configured, a ticket that says 13 is queried in 13, a ticket that says 4
        in 14.
        """
        claimed = peer.dialect or self._parts.dialect
        is_same_shape = (claimed >= _PIPELINE_RANKS_SINCE) == (self._parts.dialect >= _PIPELINE_RANKS_SINCE)
        return claimed if is_same_shape else self._parts.dialect

    def _handshake_ended(self, engine: PeerEngine, outcome: Outcome, lies: Sequence[Exception]) -> None:
        if self.engines.get(engine.address) is not engine:
            return
        connected_s = self._parts.now_s()
        # A remembered failure sent no query, and many zeros would hide how long a handshake takes.
        was_asked = outcome.code != "recently-failed"
        if was_asked:
            self._parts.recorder.observe("handshake_duration", outcome.elapsed_s)
        if not outcome.is_ok:
            self._parts.recorder.count("num_failed_handshakes" if was_asked else "num_unasked_engines")
            if outcome.code == "first-rank-refused" and lies:
                message = f"{engine.text} is not asked for further ranks: {message_of(lies[0])}"
                self._fail(engine, code_of(lies[0]), message)
            else:  # a remembered failure has its cause in `last_code`
                self._fail(engine, str(outcome.context.get("last_code", outcome.code)), outcome.message)
            return
        self._go_on(engine, self._set_up(engine, outcome.peers), connected_s)

    def _go_on(self, engine: PeerEngine, steps: Iterator[None], connected_s: float) -> None:
        """Take the next step of an engine's set-up; the thread does other work in between."""
        if self.engines.get(engine.address) is not engine:
            return
        try:
            for _ in steps:
                self._parts.thread.call_soon(lambda: self._go_on(engine, steps, connected_s))
                return
        except Exception as error:  # noqa: BLE001  (whatever a peer's metadata provokes ends its requests, never this thread)
            self._parts.recorder.count("num_failed_handshakes")
            self._forget_ranks(engine)
            self._fail(engine, code_of(error), f"{engine.text} cannot be read from: {message_of(error)}")
            return
        engine.phase = "ready"
        engine.last_answer_s = self._parts.now_s()
        reads = _take(engine)
        for read in reads:
            read.times.connected_s, read.times.planned_s, read.waiting_since_s = connected_s, engine.last_answer_s, 0.0
        self._ready(reads, engine)

    def _set_up(self, engine: PeerEngine, metadata: Mapping[Rank, AgentMetadata]) -> Iterator[None]:
        """Read the geometry of a peer's ranks, one a step, then plan and prepare the ranks; raises coded errors."""
        ranks: list[PeerRank] = []
        for found in self._planner.read(engine.address, metadata):
            ranks.append(found)
            yield
        plan = self._planner.plan(engine.address, ranks)
        self._forget_aliases(engine)
        engine.set_ready(plan, metadata)
        # A peer whose groups cannot be compared can be read from as a whole all the same.
        with self._parts.recorder.guarded("comparison of cache groups"):
            engine.has_our_blocks = self._planner.has_our_blocks(ranks, plan)
        # The peer's table lists blocks by its own groups. Example: blocks of 16 tokens here and of 32 there do not become
        # complete together, so such a peer is read once its prompts are finished.
        have_words = all(metadata[rank].streams is not None for rank in plan.producer_ranks)
        engine.can_stream = engine.has_our_blocks and have_words and not plan.is_staged
        for rank, key in engine.keys.items():
            is_ours = self._only_ours or metadata[rank].capabilities
            self._parts.thread.agent.add_peer(
                self._parts.peer_spec(
                    key,
                    metadata[rank].agent_metadata,
                    plan.local_rows(rank),
                    plan.peer_rows(rank),
                    memory_kind=peer_memory_kind(metadata[rank]),
                    local_kind=self._planner.local_kind,
                    fence=metadata[rank].fence,
                    # The id of its engine, so that no listener can serve another's agent.
                    agent_prefix=f"{engine.engine_id}/" if is_ours else "",
                    streams=metadata[rank].streams,
                )
            )
        fences = "fenced" if engine.is_fenced else _NO_FENCE
        binding = "" if "prompt-digest" in engine.capabilities else f"; {_NOT_BOUND}"
        self._parts.recorder.info(
            "engine-ready",
            f"{engine.text} is ready: reads from ranks {list(plan.producer_ranks)}, "
            f"{plan.bytes_per_token:g} bytes a token, {fences}{binding}",
        )

    def _forget_aliases(self, engine: PeerEngine) -> None:
        """Forget idle records of the same engine under another address: NIXL knows an agent only once."""
        for other in list(self._by_id[engine.engine_id]):
            if other is not engine and other.phase == "ready" and not other.reads:
                self._drain(other, f"{engine.text} has this name now")

    # ---------------------------------------------------------------------------------------------- leaving

    def _fail(self, engine: PeerEngine, code: str, message: str) -> None:
        """Forget an engine that could not be set up, and fail the reads that wait for it."""
        self._forget(engine)
        for read in _take(engine):
            read.was_connected = False
            self._failed(read, code, message)

    def drop(self, engine: PeerEngine, reason: str) -> None:
        """Stop using a failing engine; it is set up again once its reads in flight have ended."""
        if engine.phase != "draining":
            self._parts.recorder.count("num_dropped_engines")
            self._parts.recorder.warning(
                "engine-dropped", f"{engine.text}: {reason}; connection closed, the next read connects again"
            )
        self._drain(engine, "")

    def _drain(self, engine: PeerEngine, reason: str) -> None:
        if reason:
            self._parts.recorder.info("engine-let-go", f"{engine.text}: {reason}; connection closed")
        engine.phase = "draining"
        self._forget_when_idle(engine)

    def read_ended(self, read: Read, engine: PeerEngine) -> None:
        """Note that one of the engine's reads in flight has ended."""
        engine.reads.discard(read)
        if engine.phase == "draining":
            self._forget_when_idle(engine)

    def _forget_when_idle(self, engine: PeerEngine) -> None:
        if engine.reads or self.engines.get(engine.address) is not engine:
            return
        self._forget_ranks(engine)
        self._forget(engine)
        for read in _take(engine):
            self.submit(read)

    def _forget(self, engine: PeerEngine) -> None:
        if self.engines.get(engine.address) is engine:
            del self.engines[engine.address]
            self._by_id[engine.engine_id].remove(engine)
            if not self._by_id[engine.engine_id]:
                del self._by_id[engine.engine_id]

    def _forget_ranks(self, engine: PeerEngine) -> None:
        for key in engine.keys.values():
            with self._parts.recorder.guarded("removal of a peer"):
                if self._parts.thread.agent.has_peer(key):
                    self._parts.thread.agent.remove_peer(key)

    # ---------------------------------------------------------------------------------------------- upkeep

    def maintain(self) -> None:
        """End waits that are too long, probe engines that are not being read from, and drop unused ones."""
        now_s, wait_s = self._parts.now_s(), self._wait_s
        for engine in list(self.engines.values()):
            if engine.phase == "ready":
                self._maintain_idle(engine, now_s)
            elif engine.phase == "wiring" and now_s - engine.last_used_s > wait_s:
                # The handshake's own end comes later and is ignored.
                self._parts.recorder.count("num_failed_handshakes")
                self._fail(engine, *self._overdue(engine))
            else:
                # These reads wait for an engine that is draining, or is set up only now because it drained.
                for read in list(engine.waiting):
                    if now_s - read.waiting_since_s > wait_s:
                        engine.waiting.remove(read)
                        read.was_connected = engine.phase == "draining"
                        self._failed(read, *self._overdue(engine))

    def _overdue(self, engine: PeerEngine) -> tuple[str, str]:
        """Return the code and message of a read that has waited too long."""
        wait = f"within {self._wait_s:g} s"
        if engine.phase != "draining":
            return "handshake-overdue", f"{engine.text} has not answered the handshake {wait}"
        return "peer-draining", (
            f"no new connection to {engine.text} {wait}: earlier reads from it are still on the wire or in "
            f"quarantine ({len(engine.reads)}); check whether it is stopped"
        )

    def _maintain_idle(self, engine: PeerEngine, now_s: float) -> None:
        if engine.reads:
            return
        is_silent = engine.silent_probes or now_s - engine.last_answer_s > self._probe_s
        ttl_s = self._parts.settings.engine_ttl  # 0: engines are never forgotten, as in vLLM's own connector
        if ttl_s and now_s - engine.last_used_s > ttl_s:
            self._drain(engine, f"unused for {ttl_s:g} s")
        elif is_silent and not engine.is_probed and engine.plan.producer_ranks:
            self._probe(engine, engine.plan.producer_ranks[0])

    def _probe(self, engine: PeerEngine, rank: Rank) -> None:
        # A request's transfers are named "<request>/<rank>", so no transfer has the name of a probe.
        self._probe_count += 1
        probe_id = f"probe {self._probe_count}"
        try:
            self._parts.thread.agent.probe(probe_id, engine.keys[rank], deadline_s=_PROBE_DEADLINE_S)
            self._probes[probe_id], engine.is_probed = engine, True
        except Exception as error:  # noqa: BLE001  (a peer that cannot be probed is let go by its age)
            engine.last_answer_s = self._parts.now_s()
            self._parts.recorder.trouble("probe of an idle engine", error)

    def probe_ended(self, result: TransferResult) -> None:
        """Process the end of a probe; results of other transfers are ignored."""
        engine = self._probes.pop(result.transfer_id, None)
        if engine is None:
            return
        engine.is_probed = False
        if result.outcome == "done":
            engine.silent_probes, engine.last_answer_s = 0, self._parts.now_s()
            return
        if result.outcome == "cancelled" or result.fault == "local" or engine.phase != "ready":
            return  # the result says nothing about the engine, which is probed again
        engine.silent_probes += 1
        is_gone = result.code == "peer-disconnected"
        if is_gone or engine.silent_probes >= _SILENT_PROBES:
            reason = "its process is gone" if is_gone else f"{engine.silent_probes} probes had no answer"
            self.drop(engine, f"{reason}: {result.message} ({result.code})")


def _take(engine: PeerEngine) -> list[Read]:
    taken, engine.waiting = engine.waiting, []
    return taken
