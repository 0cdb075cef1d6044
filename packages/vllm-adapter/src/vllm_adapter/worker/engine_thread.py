"""The connector in a worker's process: the engine thread's half.

The engine thread only hands immutable orders over and takes finished results away; everything that touches NIXL, a peer or
the network happens on the transfer thread (`registration.py`, `reads.py`, `holds.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cache.geometry import local_document
from vllm_adapter.observe.recorder import StatsBuffer
from vllm_adapter.scheduler.served_registration import RankRegistration
from vllm_adapter.worker.announced import Announced, fail_reads, unusable
from vllm_adapter.worker.host_mirror import HostMirror
from vllm_adapter.worker.registration import Registration, open_registration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.observe.trace_links import TraceLink
    from vllm_adapter.ports import StepPlan
    from vllm_adapter.wiring import WorkerParts
    from vllm_adapter.worker.conversion import ConversionStep, PageConverter
    from vllm_adapter.worker.host_mirror import MirrorMemory
    from vllm_adapter.worker.transfer.reads import ReadEnd

__all__ = ["StepResults", "WorkerSide"]

# A child of the host's logger, so that its format and level apply.
_logger = logging.getLogger("vllm.vllm_adapter")
_VOID_GENERATION = 0
"""A fence word that no ticket ever carries."""
_RESET = "the cache was reset after this read had been ordered"
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
        parts: WorkerParts,
        *,
        read_ended: Callable[[ReadEnd], None] | None = None,
        trace: Callable[[TraceLink, ReadEnd], None] | None = None,
    ) -> None:
        self._facts = facts
        self._parts = parts
        self._read_ended = read_ended
        self._trace = trace
        self._links: dict[str, TraceLink] = {}
        self._stats = StatsBuffer(ucx_tls=parts.ucx_tls)
        self._ends: deque[ReadEnd] = deque()
        self._sent: deque[str] = deque()
        self._orphans: list[str] = []
        self._registration: Registration | None = None
        self._ending: Registration | None = None
        self._caches: Sequence[LayerCache] = ()
        self._converter: PageConverter | None = None
        self._mirror: HostMirror | None = None
        self._announced = Announced()
        self._void_reads: set[str] = set()
        self._generation = facts.generation
        self._is_asleep = False
        self._answer = 0
        self._is_report_due = False
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
        self._caches, self._converter = tuple(caches), converter
        if mirror is not None:
            self._mirror = HostMirror(mirror, local_document(self._facts, caches))
        self._registration = self._open(self._generation)

    def _open(self, generation: int) -> Registration:
        return open_registration(
            self._parts,
            self._caches,
            generation=generation,
            can_convert=self._converter is not None,
            stats=self._stats,
            read_ended=self._ends.append,
            sent=self._sent.append,
        )

    def unregister(self) -> None:
        """End all reads and leases and give the cache's memory back, before the host unmaps it; idempotent.

        Raises:
            AdapterError: `memory-in-use`: the memory must stay mapped.
        """
        if self._registration is not None:
            self._ending, self._registration = self._registration, None
            self._is_report_due = True
            if self._mirror is not None:
                self._mirror.settle_all()
        if self._ending is None:
            return
        try:
            self._ending.end()
        finally:
            for _ in range(len(self._ends)):
                self._ends.append(unusable(self._ends.popleft()))
        self._ending, self._is_asleep = None, True
        _logger.info("engine %s rank %d: asleep, nothing is registered", self._facts.engine_id, self._facts.tp_rank)

    def restore(self) -> None:
        """Register the cache anew after `unregister`: the same addresses, their content lost; else do nothing.

        Raises:
            Exception: What the transfer library raises; nothing is registered then, and it may be tried again.
        """
        if not self._is_asleep:
            return
        registration = self._open(self._generation + 1)
        self._generation += 1
        self._registration, self._is_asleep, self._is_report_due = registration, False, True
        self._announced.lose()
        waiting = self._announced.ids
        registration.agent.call_soon(lambda: registration.holds.expect(waiting))

    def take_report(self) -> RankRegistration | None:
        """Return what is registered if the scheduler asked or it has changed, else None."""
        is_due, self._is_report_due = self._is_report_due, False
        return RankRegistration(self._generation, self.envelope, self._answer) if is_due else None

    def close(self) -> None:
        """Stop both threads and give registrations back; idempotent."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()
        if self._mirror is not None:
            self._mirror.close()

    @property
    def rank(self) -> tuple[int, int]:
        """(pp rank, tp rank)."""
        return self._facts.pp_rank, self._facts.tp_rank

    @property
    def envelope(self) -> bytes | None:
        """What the side channel serves for this rank; None before registration."""
        return self._registration.envelope if self._registration is not None else None

    # ---------------------------------------------------------------------------------------------- every step

    def start_step(
        self,
        plan: StepPlan,
        orphans: Sequence[str] = (),
        links: Mapping[str, TraceLink] | None = None,
        *,
        restarted: Sequence[str] = (),
        void_reads: Sequence[str] = (),
        question: int = 0,
    ) -> None:
        """Hand a step's orders to the transfer thread and return at once.

        Args:
            plan: The orders.
            orphans: Requests to report as failed reads.
            links: Traces that the step's reads belong to, by request.
            restarted: Requests whose prompt is computed from the beginning again.
            void_reads: Requests whose read, ordered by now, must end badly: the cache was reset.
            question: What the next report answers; 0 for nothing.
        """
        self._orphans += orphans
        if links and self._trace is not None:
            self._links.update(links)
        if question:
            self._answer, self._is_report_due = question, True
        self._void_reads.difference_update(order.request_id for order in plan.reads)
        self._void_reads.update(void_reads)
        words = self._announced.start_again(restarted)
        void_grants = () if plan.is_empty else self._announced.apply(plan)
        registration = self._registration
        if registration is None:
            self._sent += [grant.request_id for grant in plan.grants]
            self._ends += fail_reads(plan, time.monotonic())
            return
        if self._mirror is not None:
            self._prepare_mirror(self._mirror, plan)
        # At once, on this thread: the words must be there before the step's end can make the tickets known.
        for slot, generation in (*words, *((fence.slot, fence.generation) for fence in plan.fences)):
            registration.agent.write_fence(slot, generation)
        if not plan.is_empty or void_reads:
            registration.agent.call_soon(lambda: registration.perform(plan, void_grants, void_reads))

    def _prepare_mirror(self, mirror: HostMirror, plan: StepPlan) -> None:
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
        mirror, registration = self._mirror, self._registration
        if mirror is None or registration is None or not (plan.saves or complete):
            return
        began_s = time.perf_counter()
        mirror.save(plan.saves)
        failed = mirror.settle(complete)
        self._stats.observe("mirror_save_duration", time.perf_counter() - began_s)
        for request_id in complete:
            if request_id not in failed:
                continue
            slot = self._announced.slot(request_id)
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
                registration.agent.write_fence(slot, _VOID_GENERATION)

    def take_results(self) -> StepResults:
        """Return what ended since the last step: sent, received, and which of those failed."""
        results = StepResults()
        while self._sent:
            results.sent.add(self._sent.popleft())
        while self._ends:
            end = self._completed(self._confirmed(self._ends.popleft()))
            if not end.is_ok:
                self._tell_failed(end)
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

    def _tell_failed(self, end: ReadEnd) -> None:
        """Count and log, once, that a read failed or that a producer could not be told of blocks that nobody reads."""
        order = end.order
        peer = (order.peer_request_id, order.peer_engine_id, order.peer_host, order.peer_port)
        if order.is_reported:
            self._stats.observe("read_failure_codes", end.code)
            _logger.error(
                "request %s: its KV was not taken over from request %s of engine %s at %s:%d: %s (%s); kv_load_failure_policy "
                "decides what becomes of it",
                order.request_id,
                *peer,
                end.message,
                end.code,
            )
        else:
            self._stats.count("num_failed_notifications")
            _logger.warning(
                "request %s: nobody reads request %s of engine %s at %s:%d, which could not be told and keeps its blocks until "
                "their lease ends: %s (%s)",
                order.request_id,
                *peer,
                end.message,
                end.code,
            )

    def _confirmed(self, end: ReadEnd) -> ReadEnd:
        """Return the end as a failure if the cache was reset since its read was ordered."""
        request_id = end.order.request_id
        if request_id not in self._void_reads:
            return end
        self._void_reads.discard(request_id)
        return replace(end, code="cache-reset", message=_RESET, conversion=())

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
        registration = self._registration
        if registration is not None and not registration.agent.is_alive and not self._is_death_reported:
            self._is_death_reported = True
            _logger.error("the transfer thread of engine %s has died; restart this engine", self._facts.engine_id)

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations of the last interval by key, None for none."""
        held = self._registration.agent.quarantine() if self._registration is not None else ()
        quarantined = sum(entry.bytes_at_risk for entry in held)
        if quarantined != self._quarantined_bytes:
            self._stats.observe("quarantined_bytes", quarantined - self._quarantined_bytes)
            self._quarantined_bytes = quarantined
        return self._stats.take()
