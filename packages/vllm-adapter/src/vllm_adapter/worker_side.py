"""The connector in a worker's process: the engine thread's half.

The engine thread only hands immutable orders over and takes finished results away; everything that touches NIXL, a peer or
the network happens on the transfer thread (`reads.py`, `holds.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.geometry import local_document, registration_ranges
from vllm_adapter.holds import HoldCoordinator, HoldObserver
from vllm_adapter.host_mirror import HostMirror
from vllm_adapter.observations import StatsBuffer
from vllm_adapter.peers import PeerLimits
from vllm_adapter.reads import ReadCoordinator, ReadEnd, ReadLimits, ReadObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.config import Settings
    from vllm_adapter.conversion import ConversionStep, PageConverter
    from vllm_adapter.facts import EngineFacts, LayerCache
    from vllm_adapter.host_mirror import MirrorMemory
    from vllm_adapter.ports import HandshakeClient, StepPlan, TransferThread
    from vllm_adapter.trace_links import TraceLink
    from vllm_adapter.wiring import WorkerParts

__all__ = ["StepResults", "WorkerSide"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
_TICK_S = 0.05
_LOOK_AFTER_S = 1.0
_VOID_GENERATION = 0
"""A fence word that no ticket ever carries."""
_COMPLETIONS = {
    "conversion": ("conversion-failed", "num_failed_conversions"),
    "mirror_restore": ("mirror-copy-failed", "num_failed_mirror_copies"),
}
"""What completes a read -> (code, statistic) of its failure."""


@dataclass(frozen=True, slots=True)
class StepResults:
    """Ids of requests whose hand-over ended since the last step; `failed` is part of `received`."""

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])


@final
class WorkerSide:
    """One rank: registers its cache, starts reads, keeps leases, reports ends."""

    def __init__(
        self,
        facts: EngineFacts,
        settings: Settings,
        parts: WorkerParts,
        *,
        read_ended: Callable[[ReadEnd], None] | None = None,
        trace: Callable[[TraceLink, ReadEnd], None] | None = None,
    ) -> None:
        self._facts = facts
        self._settings = settings
        self._parts = parts
        self._read_ended = read_ended
        self._trace = trace
        self._links: dict[str, TraceLink] = {}
        self._stats = StatsBuffer(ucx_tls=parts.ucx_tls)
        self._ends: deque[ReadEnd] = deque()
        self._sent: deque[str] = deque()
        self._orphans: list[str] = []
        self._agent: TransferThread | None = None
        self._handshakes: HandshakeClient | None = None
        self._reads: ReadCoordinator | None = None
        self._holds: HoldCoordinator | None = None
        self._envelope: bytes | None = None
        self._converter: PageConverter | None = None
        self._mirror: HostMirror | None = None
        self._fence_slots: dict[str, int] = {}
        self._quarantined_bytes = 0
        self._is_death_reported = False

    # ---------------------------------------------------------------------------------------------- start and stop

    def register(
        self,
        caches: Sequence[LayerCache],
        converter: PageConverter | None = None,
        mirror: MirrorMemory | None = None,
    ) -> None:
        """Register the cache, start the transfer thread and make this rank's side-channel envelope.

        Args:
            caches: This rank's layers, as peers are to read and write them.
            converter: Puts received pages in order; without one, peers whose pages would need that are read piece by piece.
            mirror: The device's memory, if `caches` are only its mirror.
        """
        facts, settings, parts = self._facts, self._settings, self._parts
        self._converter = converter
        document = local_document(facts, caches)
        self._mirror = HostMirror(mirror, document) if mirror is not None else None
        self._reads = ReadCoordinator(
            document,
            parts.peer_geometry,
            parts.make_planner(caches[0].memory_kind, can_convert=converter is not None),
            parts.codec,
            ReadObserver(self._ends.append, self._stats.transfer, self._stats.count, self._stats.observe, _logger.info),
            ReadLimits(
                read_timeout_s=settings.read_timeout_s,
                lease_s=settings.kv_lease_duration,
                peers=PeerLimits(
                    handshake_s=settings.handshake_timeout_s * (settings.handshake_attempts + 1),
                    engine_ttl_s=settings.engine_ttl,
                    dialect=settings.ticket_dialect or facts.connector_version,
                ),
                whole_block_tokens=facts.whole_block_tokens,
            ),
            now_s=time.monotonic,
        )
        self._holds = HoldCoordinator(
            parts.make_lease_table(),
            parts.codec,
            HoldObserver(self._sent.append, self._stats.count, self._stats.observe, _logger.info),
            heartbeat_s=settings.heartbeat_s,
            now_s=time.monotonic,
        )
        agent = parts.make_transfer_thread(
            registration_ranges(caches),
            on_result=self._reads.transfer_ended,
            on_quiet=self._reads.memory_quiet,
            on_notification=self._holds.notified,
        )
        self._agent = agent
        self._handshakes = parts.make_handshake_client()
        self._reads.attach(agent, self._handshakes)
        self._holds.attach(agent)
        agent.start()
        agent.call_every(_TICK_S, self._holds.tick)
        agent.call_every(_LOOK_AFTER_S, self._reads.look_after_engines)
        self._envelope = parts.encode_envelope(caches, document, agent)
        _logger.info(
            "engine %s rank %d: %d layers registered for hand-over, fence of %d words",
            facts.engine_id,
            facts.tp_rank,
            len(caches),
            agent.fence[2],
        )

    def close(self) -> None:
        """Stop both threads and give registrations back; idempotent."""
        handshakes, self._handshakes = self._handshakes, None
        agent, self._agent = self._agent, None
        if handshakes is not None:
            handshakes.close()
        if agent is not None:
            agent.close()
        if self._mirror is not None:
            self._mirror.close()

    @property
    def envelope(self) -> bytes | None:
        """What the side channel serves for this rank; None before registration."""
        return self._envelope

    # ---------------------------------------------------------------------------------------------- every step

    def start_step(
        self, plan: StepPlan, orphans: Sequence[str] = (), links: Mapping[str, TraceLink] | None = None
    ) -> None:
        """Hand a step's orders to the transfer thread and return at once.

        Args:
            plan: The orders.
            orphans: Requests to report as failed reads.
            links: Traces that the step's reads belong to, by request.
        """
        self._orphans += orphans
        if links and self._trace is not None:
            self._links.update(links)
        agent = self._agent
        if agent is None or plan.is_empty:
            return
        if self._mirror is not None:
            self._prepare_mirror(self._mirror, plan)
        # At once, on this thread: the words must be there before the step's end can make the tickets known.
        for fence in plan.fences:
            agent.write_fence(fence.slot, fence.generation)
        agent.call_soon(lambda: self._perform(plan))

    def _perform(self, plan: StepPlan) -> None:
        reads, holds = self._reads, self._holds
        if reads is None or holds is None:
            return
        holds.apply(plan)
        for order in plan.reads:
            reads.read(order)
        for request_id in plan.cancels:
            reads.cancel(request_id)
        for heartbeat in plan.heartbeats:
            reads.heartbeat(heartbeat)

    def _prepare_mirror(self, mirror: HostMirror, plan: StepPlan) -> None:
        self._fence_slots.update((fence.request_id, fence.slot) for fence in plan.fences)
        for request_id in (*plan.releases, *(grant.request_id for grant in plan.grants)):
            self._fence_slots.pop(request_id, None)
        mirror.forget(plan.releases)
        if plan.reads:
            mirror.settle_all()

    def save(self, plan: StepPlan, complete: Sequence[str]) -> None:
        """Copy what the step computed to the mirror, if there is one, after the forward pass.

        Args:
            plan: The step's orders.
            complete: Requests that can be handed over from now on: their blocks are there when this returns, or their
                fence is void.
        """
        mirror, agent = self._mirror, self._agent
        if mirror is None or agent is None or not (plan.saves or complete):
            return
        began_s = time.perf_counter()
        mirror.save(plan.saves)
        failed = mirror.settle(complete)
        self._stats.observe("mirror_save_duration", time.perf_counter() - began_s)
        for request_id in complete:
            if request_id not in failed:
                continue
            slot = self._fence_slots.get(request_id)
            self._stats.count("num_failed_mirror_copies")
            _logger.error(
                "request %s: its blocks could not be copied to host memory (%s)%s",
                request_id,
                failed[request_id],
                "; whoever reads them will find its fence void"
                if slot is not None
                else ". It has no fence: whoever reads them GETS WRONG DATA",
            )
            if slot is not None:
                agent.write_fence(slot, _VOID_GENERATION)

    def take_results(self) -> StepResults:
        """Return what ended since the last step: sent, received, and which of those failed."""
        results = StepResults()
        while self._sent:
            results.sent.add(self._sent.popleft())
        while self._ends:
            end = self._completed(self._ends.popleft())
            if not end.is_ok:
                self._stats.observe("read_failure_codes", end.code)
                _logger.error(
                    "request %s: its KV was not taken over from request %s of engine %s at %s:%d: %s (%s)%s",
                    end.order.request_id,
                    end.order.peer_request_id,
                    end.order.peer_engine_id,
                    end.order.peer_host,
                    end.order.peer_port,
                    end.message,
                    end.code,
                    "; kv_load_failure_policy decides what becomes of it" if end.order.is_reported else "",
                )
            link = self._links.pop(end.order.request_id, None)
            if link is not None and self._trace is not None:
                self._trace(link, end)
            if end.order.is_reported:
                if end.is_ok and self._read_ended is not None:
                    self._read_ended(end)
                results.received.add(end.order.request_id)
                if not end.is_ok:
                    results.failed.add(end.order.request_id)
        results.received.update(self._orphans)
        results.failed.update(self._orphans)
        self._orphans.clear()
        self._check_alive()
        return results

    def _completed(self, end: ReadEnd) -> ReadEnd:
        """Put the pages of a good read in order and where the device wants them; the read ends badly if that fails."""
        if end.is_ok and end.conversion:
            end = self._attempt(end, "conversion", lambda: self._convert(end.conversion))
        mirror = self._mirror
        if end.is_ok and mirror is not None and end.order.is_reported:
            end = self._attempt(end, "mirror_restore", lambda: mirror.restore(end.order.local_block_ids))
        return end

    def _convert(self, steps: Sequence[ConversionStep]) -> None:
        assert self._converter is not None, "staged plans are only made with a converter"  # noqa: S101
        self._converter.convert(steps)

    def _attempt(self, end: ReadEnd, what: str, action: Callable[[], None]) -> ReadEnd:
        """Do what completes a read, timed; return its end, bad if that raised."""
        code, counter = _COMPLETIONS[what]
        began_s = time.perf_counter()
        try:
            action()
        except Exception as error:
            _logger.exception("request %s: what was read could not be made use of", end.order.request_id)
            self._stats.count(counter)
            return replace(end, code=code, message=f"{type(error).__name__}: {error}")
        self._stats.observe(f"{what}_duration", time.perf_counter() - began_s)
        return end

    def _check_alive(self) -> None:
        agent = self._agent
        if agent is not None and not agent.is_alive and not self._is_death_reported:
            self._is_death_reported = True
            _logger.error("the transfer thread of engine %s has died; restart this engine", self._facts.engine_id)

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations of the last interval by key, None for none."""
        quarantined = sum(entry.bytes_at_risk for entry in self._agent.quarantine()) if self._agent is not None else 0
        if quarantined != self._quarantined_bytes:
            self._stats.observe("quarantined_bytes", quarantined - self._quarantined_bytes)
            self._quarantined_bytes = quarantined
        return self._stats.take()
