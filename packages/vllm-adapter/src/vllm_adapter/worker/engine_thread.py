"""The connector in a worker's process: the engine thread's half.

The engine thread passes immutable orders on and collects finished results; what touches NIXL, a peer or the network happens in
turns of the transfer thread (`registration.py`, `transfer/`). A step that waits for its own short reads makes these turns itself
(`_ran_here`, ADR 0020).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.cache.geometry import local_document, with_stages
from vllm_adapter.steps import ASLEEP, DEAD, MOST_READS, SHORT_REST_S, RankRegistration, ReadFailure, StepReport
from vllm_adapter.worker.ends import Ends
from vllm_adapter.worker.pages import HostMirror, ReadCompletion, page_ranges
from vllm_adapter.worker.registration import RankCaches, RegistrationEvents
from vllm_adapter.worker.streams import RankStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import EndReport, ReadOrder, StepPlan, WorkerState
    from vllm_adapter.steps import ReadEnd, StepOrders, TraceLink
    from vllm_adapter.worker.pages import MirrorMemory, PageConverter
    from vllm_adapter.worker.registration import Registration
    from vllm_adapter.worker.streams import DeviceMarks

__all__ = ["WorkerSide"]

_logger = logging.getLogger("vllm.vllm_adapter")
_VOID_GENERATION = 0
"""Fence word that no ticket ever carries."""
_CHECK_EVERY_S = 0.1
"""Time between two looks at the transfer thread's health where nothing ends; its figures are as old."""
_NOTHING = StepReport()
_RESET = "the cache was reset after this read had been ordered"


@final
class WorkerSide:
    """Worker half of a rank: registers its cache, carries out a step's orders, and reports the ends of reads and leases.

    Args:
        facts: This engine and rank.
        recorder: Takes observations and log lines.
        open_registration: Registers the caches, see `wiring`.
        state: This rank's part of all hand-overs; it outlives registrations.
        is_streaming: Whether prompts are handed over while they are computed.
        trace: Called at the end of each traced read.

    Attributes:
        generation: Number of the latest registration.
    """

    def __init__(
        self,
        facts: EngineFacts,
        recorder: Recorder,
        open_registration: Callable[..., Registration],
        state: WorkerState,
        *,
        is_streaming: bool = False,
        trace: Callable[[TraceLink, ReadEnd], None] | None = None,
    ) -> None:
        self._recorder = recorder
        self._facts, self._name = facts, facts.name
        self._open, self._state, self._trace = open_registration, state, trace
        self._links: dict[str, TraceLink] = {}
        self._ends = Ends()
        self._unread: list[str] = []
        self._failures: list[ReadFailure] = []
        self._streams = RankStreams(state, recorder, self._ends.sent) if is_streaming else None
        self._registration: Registration | None = None
        # A registration that is no longer used and has not ended yet: its thread has died, or a sleep has not succeeded.
        self._left: Registration | None = None
        self._mirror: HostMirror | None = None
        self._completion: ReadCompletion | None = None
        # Plain reads whose end has not been collected yet, and those of them that must end as failed.
        self._due_reads: dict[str, ReadOrder] = {}
        self._void_reads: set[str] = set()
        self._ahead: set[str] = set()  # those that were ordered between two steps
        # Those that the current step ordered.
        self._ordered: set[str] = set()
        self._leases: set[str] = set()
        self._rest_s = 0.0
        self._is_asking = False
        # Steps that the host may still have built before it took in the latest report.
        self._steps_ahead = 0
        self._check_s = 0.0
        self.generation = facts.generation
        self._is_asleep = False
        self._answer = 0
        self._is_registration_due = False

    # ---------------------------------------------------------------------------------------------- start and stop

    def register(
        self,
        caches: Sequence[LayerCache],
        converter: PageConverter | None = None,
        mirror: MirrorMemory | None = None,
        *,
        select_device: Callable[[], None] | None = None,
        marks: DeviceMarks | None = None,
        all_stages: Callable[[GeometryDocument], Sequence[GeometryDocument]] = lambda own: (own,),
    ) -> None:
        """Register the cache, start the transfer thread and make this rank's side-channel envelope.

        Args:
            caches: This rank's layers, as peers will read and write them.
            converter: Permutes received pages; without one, peers whose pages would need that are read piece by piece.
            mirror: The device's memory, if `caches` are only its mirror.
            select_device: Makes the rank's device current for the calling thread; None where there is nothing to select.
            marks: Tells when the device has finished earlier work; None where calls return only when their work is done.
            all_stages: Returns the documents of all pipeline stages at this tensor-parallel rank.
        """
        document = local_document(self._facts, caches)
        stages = all_stages(document)
        document = with_stages(document, stages)
        if mirror is not None:
            self._mirror = HostMirror(mirror, document)
        if self._streams is not None:
            self._streams = RankStreams(self._state, self._recorder, self._ends.sent, marks, self._mirror)
        self._completion = ReadCompletion(converter, self._mirror, self._recorder, page_ranges(document))
        events = RegistrationEvents(self._ends.read_ended, self._ends.lease_ended, select_device)
        self._open = partial(
            self._open, RankCaches(tuple(caches), document, stages), events, can_convert=converter is not None
        )
        self._registration = self._register(self.generation)

    def _register(self, generation: int) -> Registration:
        registration = self._open(generation=generation)
        if self._streams is not None:
            self._streams.use(registration.leases.stream_worker)
        return registration

    def unregister(self) -> None:
        """End all reads and leases and deregister the cache's memory before the host unmaps it; idempotent.

        Raises:
            AdapterError: `memory-in-use`: the memory must stay mapped. The thread's reads and leases end once it has ended,
                even if the host does not try again.
        """
        if self._registration is not None:
            self._leave(self._registration)
        if self._left is None:
            return
        if self._mirror is not None:
            self._mirror.settle_device()
        try:
            self._left.end()
        finally:
            self._ends.fail_all(*ASLEEP)  # their pages are about to be lost
        self._left, self._is_asleep = None, True
        for level in ("quarantined_bytes", "stuck_threads"):
            self._recorder.level(level, 0)
        _logger.info("engine %s rank %d: asleep, nothing is registered", self._name, self._facts.tp_rank)

    def _leave(self, registration: Registration) -> None:
        """Use a registration no more, and let the scheduler half know, so that peers learn that there is nothing to read."""
        self._left, self._registration = registration, None
        self._is_registration_due = True
        if self._streams is not None:
            self._streams.use(None)

    def restore(self) -> None:
        """Register the cache again after `unregister`, at the same addresses with its content lost; else do nothing.

        Raises:
            Exception: Passed on from the transfer library; nothing is registered then, and the call may be repeated.
        """
        if not self._is_asleep:
            return
        registration, self.generation = self._register(self.generation + 1), self.generation + 1
        self._registration, self._is_asleep, self._is_registration_due = registration, False, True
        registration.agent.call_soon(partial(registration.apply, self._state.lose()))

    def close(self) -> None:
        """Stop both threads and deregister the memory; idempotent."""
        registration, self._registration, self._left = self._registration or self._left, None, None
        if self._streams is not None:
            self._streams.close()
        if registration is not None:
            registration.close()
        if self._mirror is not None:
            self._mirror.close()

    @property
    def rank(self) -> tuple[int, int]:
        """(pp rank, tp rank)."""
        return self._facts.pp_rank, self._facts.tp_rank

    @property
    def registration(self) -> RankRegistration:
        """This rank's registration; its envelope is None while nothing is registered."""
        envelope = self._registration.envelope if self._registration is not None else None
        return RankRegistration(self.generation, envelope, self._answer)

    # ---------------------------------------------------------------------------------------------- every step

    def before_forward(self, orders: StepOrders) -> None:
        """Write the progress and fence words of streams that must change before the step writes into any block."""
        if self._streams is not None:
            self._leave_if_dead()
            self._streams.before_forward(orders.plan)

    def apply(self, orders: StepOrders) -> None:
        """Hand a step's orders to the transfer thread, and wait only for short reads."""
        registration, streams = self._registration, self._streams
        if registration is None or not registration.agent.is_alive:
            self._leave_if_dead()
        if streams is not None:
            streams.catch_up(orders.plan)
        self._rest_s, self._is_asking = orders.rest_s, orders.is_asking
        self._links.update(orders.links)
        if orders.question:
            self._answer, self._is_registration_due = orders.question, True
        if orders.plan.is_empty:
            return
        plan = self._state.apply(orders.plan)
        self._unread += plan.failures
        if streams is not None:
            streams.apply(plan)
        self._leases.update(grant.request_id for grant in plan.grants)
        reads = {order.request_id: order for order in plan.reads if order.is_reported}
        self._ordered = set(reads)
        self._due_reads |= reads
        self._void_reads -= self._ordered
        # The scheduler may not know yet that one of these reads has ended.
        self._void_reads.update(request_id for request_id in plan.voids if request_id in self._due_reads)
        self._hand_over(plan)
        if streams is not None:
            streams.forget(grant.request_id for grant in plan.grants)

    def read_ahead(self, orders: StepOrders) -> None:
        """Make short reads between two steps; wait for them as a step does. `take_ends_ahead` returns their ends."""
        self._ahead.update(order.request_id for order in orders.plan.reads)
        self.apply(orders)
        self._ordered, self._rest_s = set(), 0.0

    def take_ends_ahead(self) -> StepReport:
        """Return the ends of such reads; no step reports them."""
        ends = map(self._take_end, self._ends.take_reads(self._ahead, is_ahead=True))
        received = {end.order.request_id for end in ends}
        self._ahead -= received
        failures, self._failures = tuple(self._failures), []
        return StepReport((), received, {failure.request_id for failure in failures}, failures=failures)

    def _hand_over(self, plan: StepPlan) -> None:
        """Write a step's fence words, and pass its orders to the transfer thread; answer them here if there is none."""
        registration, mirror = self._registration, self._mirror
        if mirror is not None:
            mirror.forget(plan.releases)
            if registration is not None and (plan.reads or plan.streams.watches):
                mirror.begin_reads()
        if registration is None:
            self._refuse(plan)
            return
        try:
            # Write at once, on this thread: the words must be in place before the step's end can make the tickets known.
            for order in plan.fences:
                registration.agent.write_fence(order.slot, order.generation)
            if not (plan.is_local or self._ran_here(registration, plan)):
                # The steps of a long prompt do not wake the transfer thread.
                registration.agent.call_soon(partial(registration.apply, plan))
        except Exception:
            if registration.agent.is_alive:
                raise
            # The requests of these grants are no longer among the announced ones.
            for grant in plan.grants:
                self._void(registration, grant.request_id, grant.fence[0] if grant.fence is not None else None)
            self._leave_if_dead()
            self._refuse(plan)

    def _ran_here(self, registration: Registration, plan: StepPlan) -> bool:
        """Read on this thread in a step that waits for its reads anyway: two changes of threads cost 0.5 ms."""
        if not (self._rest_s and self._ordered) or plan.streams.watches or plan.cancels or plan.voids or plan.grants:
            return False
        if len(plan.reads) > MOST_READS or not registration.reads.are_ready(plan.reads):
            return False
        call, began_s = partial(registration.apply, plan._replace(heartbeats=())), time.monotonic()
        if not registration.agent.run_here(call, partial(self._ends.are_there, self._ordered), self._rest_s):
            return False
        if plan.heartbeats:  # due at the first read after a pause; sending them takes as long as a post
            registration.agent.call_soon(partial(registration.renew, plan.heartbeats))
        self._rest_s = max(0.0, self._rest_s - (time.monotonic() - began_s))
        return True

    def _refuse(self, plan: StepPlan) -> None:
        """Answer a step's orders while nothing is registered: no fence word is valid, so no block is read."""
        is_dead = self._left is not None and not self._left.agent.is_alive
        code, message = DEAD if is_dead else ASLEEP
        self._ends.sent += [grant.request_id for grant in plan.grants]
        self._ends.fail(plan.reads, code, message)
        self._ends.fail([watch.read for watch in plan.streams.watches], code, message, is_streamed=True)

    def _leave_if_dead(self) -> None:
        """Stop using a dead transfer thread, and end its reads and leases once it has ended; never waits for it."""
        registration = self._registration
        if registration is not None and not registration.agent.is_alive:
            # Void the words here, because the thread may hang before it voids them itself.
            for request_id in self._state.announced:
                self._void(registration, request_id, self._state.fence_slot(request_id))
            self._leave(registration)
        left = self._left
        if left is not None and not left.ended.is_set() and left.agent.has_ended:
            left.end(DEAD)
            # A signal within a turn of this thread may have lost an end.
            self._ends.fail(self._due_reads.values(), *DEAD)

    def _void(self, registration: Registration, request_id: str, slot: int | None) -> None:
        """Overwrite a request's fence word, so that no reader trusts its data; closing an agent has already voided its words."""
        with self._recorder.guarded("voiding of a fence word"):
            is_streamed = self._streams is not None and self._streams.void(request_id)
            if not is_streamed and slot is not None:
                registration.agent.write_fence(slot, _VOID_GENERATION)

    def save(self, orders: StepOrders) -> None:
        """After the forward pass, copy the computed blocks to the mirror, if there is one, and show chunks of streams.

        When this returns, the blocks of `plan.completes` are in the mirror, or their fence is void. A chunk is shown once the
        device has finished it, or its copy to the mirror is done.
        """
        plan, registration, mirror = orders.plan, self._registration, self._mirror
        if mirror is not None and registration is not None and (plan.saves or plan.completes):
            began_s = time.perf_counter()
            mirror.save(plan.saves)
            failed = mirror.settle(plan.completes)
            self._recorder.observe("mirror_save_duration", time.perf_counter() - began_s)
            for request_id, reason in failed.items():
                self._recorder.count("num_failed_mirror_copies")
                self._void(registration, request_id, self._state.fence_slot(request_id))
                self._recorder.error(
                    "mirror-copy",
                    f"request {request_id}: its blocks could not be copied to host memory ({reason}); its readers will find "
                    "its fence void",
                )
        if self._streams is not None:
            self._streams.chunks_given(plan)

    def take_report(self) -> StepReport:
        """Return all ends since the last step, and this rank's registration if it was asked for or is new.

        This may wait for the end of a read or of a lease (`StepOrders.rest_s`).
        """
        self._rest()
        registration, streams = self._registration or self._left, self._streams
        ends = list(map(self._take_end, self._ends.take_reads(self._ahead, is_ahead=False)))
        streamed = self._take_streams(streams) if streams is not None else None
        if registration is not None and (ends or self._ends.sent or time.monotonic() >= self._check_s):
            # After the ends: the last of them may make the engine idle, and then these levels stay.
            registration.check(self._name)
            self._check_s = time.monotonic() + _CHECK_EVERY_S
        if not (self._ends.sent or ends or self._unread or self._is_registration_due or streamed):
            return _NOTHING
        # The host has at most one batch more in flight than there are stages, and takes this report in after it has built the
        # steps behind this one: a wait in one of them would delay it.
        self._steps_ahead = self._facts.pp
        sent = self._ends.take_sent()
        self._leases -= sent
        unread, self._unread = self._unread, []
        failures, self._failures = self._failures, []
        received = {end.order.request_id for end in ends if end.order.is_reported and not end.is_streamed}
        failed = {failure.request_id for failure in failures}
        is_due, self._is_registration_due = self._is_registration_due, False
        return StepReport(
            sent=sent,
            received=received.union(unread, streamed.received if streamed else ()),
            failed=failed.union(unread, streamed.failed if streamed else ()),
            registrations={self.rank: self.registration} if is_due else {},
            failures=tuple(failures),
            stream_ends=tuple([(name, self.rank, is_done) for name, is_done in (streamed.ends if streamed else ())]),
        )

    def _rest(self) -> None:
        """Wait, as long as this step may, until all reads that it ordered have ended, or else until this rank has any end.

        Without that the host takes a thousand empty steps a second. Reads that one step ordered are reported together, because
        the host begins a step of computation with the first of them. Other ranks may still wait when this one has nothing to wait
        for: the step lasts until all have reported, so this one must not delay theirs.
        """
        rest_s, self._rest_s = self._rest_s, 0.0
        ordered, self._ordered = self._ordered, set()
        if self._steps_ahead:
            self._steps_ahead -= 1
            rest_s *= bool(ordered)
        is_reading = self._due_reads or self._state.is_reading
        if not rest_s or not (is_reading or self._leases or self._is_asking):
            return
        registration, look = self._registration, None
        if registration is not None and self._leases and not is_reading and rest_s <= SHORT_REST_S:
            # The transfer thread looks for notifications every 0.5 ms, and 0.3 ms pass until this one has its news.
            look = partial(registration.agent.run_here, None, lambda: True, 0.0)
        self._ends.wait(ordered, rest_s, look)

    def _take_end(self, end: ReadEnd) -> ReadEnd:
        """Complete a read whose transfers have ended; it has failed if the cache was reset after it was ordered."""
        taken_s, order = time.monotonic(), end.order
        # The id of a mere notification may belong to the read of another request.
        if order.is_reported and not end.is_streamed:
            self._due_reads.pop(order.request_id, None)
            if order.request_id in self._void_reads:
                self._void_reads.discard(order.request_id)
                end = replace(end, code="cache-reset", message=_RESET, staged=())
        if end.is_ok and self._completion is not None and (end.staged or self._mirror is not None):
            end = self._completion.complete(end)
        if end.is_streamed and self._streams is not None:
            self._streams.ended(end)
            return end
        # After a failed handshake the log names the read that failed by it, and there is nothing to notify.
        if end.was_connected and not (order.is_reported or end.is_ok):
            self._recorder.count("num_failed_notifications")
            self._recorder.warning(
                end.code,
                f"could not notify {end.producer} that it is no longer needed: {end.message} ({end.code}); its blocks stay "
                "leased until the lease expires",
            )
        self._note_end(end, taken_s)
        return end

    def _take_streams(self, streams: RankStreams) -> EndReport | None:
        """Return what is to be reported of streams, and note their reads that have ended for good."""
        report, ends = streams.take()
        now_s = time.monotonic()
        for end in ends:
            self._note_end(end, now_s)
            if end.is_ok:
                self._recorder.observe("stream_bytes", end.times.bytes_moved)
                self._recorder.observe("stream_early_bytes", end.times.early_bytes or 0)
        return report if report.received or report.ends else None

    def _note_end(self, end: ReadEnd, taken_s: float) -> None:
        """Log the moments of a read, close its trace, and keep why it failed."""
        request_id = end.order.request_id
        link = self._links.pop(request_id, None)
        if link is not None and self._trace is not None:
            self._trace(link, end)
        if end.order.is_reported:
            self._recorder.hand_overs.read_ended(end, taken_s, time.monotonic())
            if not end.is_ok:
                # The scheduler counts and logs it once for all ranks.
                text = f"{end.producer}: {end.message} ({end.code})"
                self._failures.append(ReadFailure(request_id, self.rank, end.code, text))

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations of the last interval by key; None if there are none."""
        return self._recorder.take()

    def status(self) -> Answer:
        """Return this rank's current state as plain values; any thread."""
        registration = self._registration or self._left
        described: Answer = registration.describe() if registration is not None else {}
        return {"is_asleep": self._is_asleep, "is_registered": self._registration is not None, **described}

    def hand_overs(self) -> Answer:
        """Return the timestamps of this rank's latest hand-overs, as plain values; any thread."""
        return {"hand_overs": self._recorder.hand_overs.describe()}
