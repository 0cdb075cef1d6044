"""The connector in a worker's process: the engine thread's half.

The engine thread only passes immutable orders on and collects finished results; everything that touches NIXL, a peer or the
network happens on the transfer thread (`registration.py`, `transfer/`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, final

from vllm_adapter.cache.geometry import local_document
from vllm_adapter.errors import AdapterError
from vllm_adapter.observe.cause_log import CauseLog
from vllm_adapter.steps import ASLEEP, ASLEEP_MESSAGE, DEAD, DEAD_MESSAGE, RankRegistration, ReadFailure, StepReport
from vllm_adapter.worker.health import ThreadWatch, fail_reads, failed_instead, worker_status
from vllm_adapter.worker.pages import HostMirror, ReadCompletion
from vllm_adapter.worker.registration import Registration, RegistrationEvents
from vllm_adapter.worker.resting import Resting
from vllm_adapter.worker.streams import RankStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache
    from vllm_adapter.observe.answers import Answer
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import AnnouncedFences, EndReport, StepPlan, StreamEnds
    from vllm_adapter.steps import ReadEnd, StepOrders, TraceLink
    from vllm_adapter.worker.pages import FinishedRead, MirrorMemory, PageConverter
    from vllm_adapter.worker.streams import DeviceMarks

__all__ = ["WorkerSide"]

_logger = logging.getLogger("vllm.vllm_adapter")
_VOID_GENERATION = 0
"""Fence word that no ticket ever carries."""
_NOTHING = StepReport()
_Item = TypeVar("_Item")
_RESET = "the cache was reset after this read had been ordered"


def _drained(queue: deque[_Item]) -> Iterator[_Item]:
    """Remove and yield all items of a queue that another thread may still append to."""
    while queue:
        yield queue.popleft()


def _reported_ids(ends: Iterable[ReadEnd]) -> frozenset[str]:
    return frozenset(end.order.request_id for end in ends if end.order.is_reported)


def _producer(end: ReadEnd) -> str:
    ticket = end.order.ticket
    peer = ticket.peer
    return f"request {ticket.peer_request_id} of engine {peer.engine_id} at {peer.host}:{peer.port}"


def _write_words(registration: Registration, words: Iterable[tuple[int, int]]) -> None:
    for slot, generation in words:
        registration.agent.write_fence(slot, generation)


@final
class WorkerSide:
    """Worker half of a rank: registers its cache, carries out a step's orders, and reports the ends of reads and leases.

    Args:
        facts: This engine and rank.
        recorder: Takes observations and log lines.
        open_registration: Registers the caches; called as `wiring` does, with (caches, events, generation, can_convert).
        announced: An empty record of announced fence words.
        stream_ends: An empty record of streams that end here; None for an engine that does not stream.
        trace: Called at the end of each traced read.
    """

    def __init__(
        self,
        facts: EngineFacts,
        recorder: Recorder,
        open_registration: Callable[..., Registration],
        announced: AnnouncedFences,
        stream_ends: StreamEnds | None = None,
        *,
        trace: Callable[[TraceLink, ReadEnd], None] | None = None,
    ) -> None:
        self._facts = facts
        self._open_registration = open_registration
        self._trace = trace
        self._links: dict[str, TraceLink] = {}
        self._recorder = recorder
        self._log = CauseLog(time.monotonic, is_lead=self.rank == (0, 0))
        self._finished: deque[FinishedRead] = deque()
        self._sent: deque[str] = deque()
        self._failures: list[str] = []
        self._registration: Registration | None = None
        self._ending: Registration | None = None
        # Set when the transfer thread has died; its reads and leases are ended once the thread has closed its agent.
        self._dead: Registration | None = None
        self._is_dead_ended = False
        self._caches: Sequence[LayerCache] = ()
        self._can_convert = False
        self._select_device: Callable[[], None] | None = None
        self._mirror: HostMirror | None = None
        self._completion = ReadCompletion(None, None, self._recorder)
        self._watch = ThreadWatch(self._recorder, facts.engine_id)
        self._announced = announced
        self._streams = RankStreams(stream_ends, recorder) if stream_ends is not None else None
        self._begun: StepOrders | None = None
        self._are_words_late = False
        self._resting = Resting(facts.pp)
        # Reads whose end has not been collected yet, and the subset of them that must end as failed.
        self._due_reads: set[str] = set()
        self._void_reads: set[str] = set()
        self._generation = facts.generation
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
    ) -> None:
        """Register the cache, start the transfer thread and make this rank's side-channel envelope.

        Args:
            caches: This rank's layers, as peers will read and write them.
            converter: Permutes received pages; without one, peers whose pages would need that are read piece by piece.
            mirror: The device's memory, if `caches` are only its mirror.
            select_device: Makes the rank's device current for the calling thread; None where there is nothing to select.
            marks: Tells when the device has finished earlier work; None where calls return only when their work is done.
        """
        if self._streams is not None:
            self._streams.use_device(marks)
        self._select_device = select_device
        self._caches, self._can_convert = tuple(caches), converter is not None
        if mirror is not None:
            self._mirror = HostMirror(mirror, local_document(self._facts, caches))
        self._completion = ReadCompletion(converter, self._mirror, self._recorder)
        self._registration = self._open(self._generation)

    def _open(self, generation: int) -> Registration:
        events = RegistrationEvents(self._read_ended, self._lease_ended, self._stream_ended, self._select_device)
        registration = self._open_registration(
            self._caches, events, generation=generation, can_convert=self._can_convert
        )
        if self._streams is not None:
            self._streams.use(registration.stream_worker)
        return registration

    def _read_ended(self, finished: FinishedRead) -> None:
        self._finished.append(finished)
        self._resting.wake()

    def _lease_ended(self, request_id: str) -> None:
        self._sent.append(request_id)
        self._resting.wake()

    def _stream_ended(self, finished: FinishedRead) -> None:
        if self._streams is not None:
            self._streams.ended(finished)
        self._resting.wake()

    def unregister(self) -> None:
        """End all reads and leases and deregister the cache's memory before the host unmaps it; idempotent.

        Raises:
            AdapterError: `memory-in-use`: the memory must stay mapped.
        """
        if self._registration is not None or self._dead is not None:
            self._ending, self._registration, self._dead = self._registration or self._dead, None, None
            self._is_dead_ended = False
            self._is_registration_due = True
            if self._streams is not None:
                self._streams.use(None)
            if self._mirror is not None:
                self._mirror.settle_all()
                self._mirror.settle_device()
        if self._ending is None:
            return
        try:
            self._ending.end()
        except AdapterError:
            if (
                not self._ending.agent.is_alive
            ):  # its leases and reads end once the thread has ended, even if the host does not try again
                self._dead, self._ending = self._ending, None
            raise
        finally:
            for _ in range(len(self._finished)):
                self._finished.append(failed_instead(self._finished.popleft()))
            if self._streams is not None:
                self._streams.fail_finished(failed_instead)
        self._ending, self._is_asleep = None, True
        _logger.info("engine %s rank %d: asleep, nothing is registered", self._facts.engine_id, self._facts.tp_rank)

    def restore(self) -> None:
        """Register the cache again after `unregister`, at the same addresses with its content lost; else do nothing.

        Raises:
            Exception: Passed on from the transfer library; nothing is registered then, and the call may be repeated.
        """
        if not self._is_asleep:
            return
        registration = self._open(self._generation + 1)
        self._generation += 1
        self._registration, self._is_asleep, self._is_registration_due = registration, False, True
        self._announced.lose()
        waiting = tuple(self._announced.ids)
        registration.agent.call_soon(lambda: registration.leases.expect(waiting))

    def close(self) -> None:
        """Stop both threads and deregister the memory; idempotent."""
        registration, self._registration, self._dead = self._registration or self._dead, None, None
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
        return RankRegistration(self._generation, envelope, self._answer)

    # ---------------------------------------------------------------------------------------------- every step

    def before_forward(self, orders: StepOrders) -> None:
        """Write the fence and progress words that must change before the step writes into any block; per step, before `apply`."""
        self._begun = orders
        self._note_death()
        self._end_dead()
        if self._streams is not None:
            self._streams.before_forward(orders.plan, self._mirror)

    def apply(self, orders: StepOrders) -> None:
        """Hand a step's orders to the transfer thread and return at once."""
        if self._begun is not orders:
            self._tell_late_words(orders.plan)
            self.before_forward(orders)
        self._begun = None
        self._resting.begin(orders)
        plan, streams = orders.plan, self._streams
        self._failures += plan.failures if streams is None else streams.failures(plan.failures)
        if orders.links and self._trace is not None:
            self._links.update(orders.links)
        if orders.question:
            self._answer, self._is_registration_due = orders.question, True
        if plan.is_empty:
            return
        if streams is not None:
            plan = streams.apply(plan)
        self._due_reads.update(order.request_id for order in plan.reads if order.is_reported)
        # The scheduler may not know yet that one of these reads has ended.
        self._void_reads.update(self._due_reads.intersection(plan.voids))
        self._hand_over(plan)
        if streams is not None:
            streams.forget(grant.request_id for grant in plan.grants)

    def _hand_over(self, plan: StepPlan) -> None:
        """Write a step's fence words, and pass its orders to the transfer thread; answer them here if there is none."""
        words, void_grants = self._announced.apply(plan)
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
            _write_words(registration, words)
            registration.order(plan, void_grants)
        except Exception:
            if registration.agent.is_alive:
                raise
            self._void_grants(registration, plan)
            self._note_death()
            self._refuse(plan)

    def _tell_late_words(self, plan: StepPlan) -> None:
        """Log once that the host does not call the hook before the forward pass, or calls it with other orders."""
        streams = plan.streams
        if not self._are_words_late and (streams.voids or streams.opens or streams.chunks):
            self._are_words_late = True
            self._recorder.error(
                "words-late",
                "words of streams move after the forward pass that they are for, because the host did not call "
                "handle_preemptions with this step's orders: peers may read pages that it has written anew (words-late)",
            )

    def _refuse(self, plan: StepPlan) -> None:
        """Answer a step's orders while nothing is registered: no fence word is valid, so no block is read."""
        code, message = (ASLEEP, ASLEEP_MESSAGE) if self._dead is None else (DEAD, DEAD_MESSAGE)
        now_s = time.monotonic()
        self._sent += [grant.request_id for grant in plan.grants]
        self._finished += fail_reads(plan.reads, now_s, code, message)
        if self._streams is not None:
            self._streams.fail(plan, now_s, code, message)

    def _note_death(self) -> None:
        """Stop using a dead transfer thread, and void its words here, because the thread may hang before it voids them itself."""
        registration = self._registration
        if registration is None or registration.agent.is_alive:
            return
        self._dead, self._registration = registration, None
        self._is_registration_due = True  # peers learn that there is nothing to read
        for request_id in self._announced.ids:
            self._void(registration, request_id, self._announced.slot(request_id))
        if self._streams is not None:
            self._streams.use(None)

    def _end_dead(self) -> None:
        """End the reads and leases of a dead thread once it has ended; never waits for it."""
        dead = self._dead
        if dead is not None and not self._is_dead_ended and dead.agent.has_ended:
            self._is_dead_ended = True
            dead.end(DEAD, DEAD_MESSAGE)

    def _void_grants(self, registration: Registration, plan: StepPlan) -> None:
        """Void the fence words of a step's grants, whose requests are no longer among the announced ones."""
        for grant in plan.grants:
            self._void(registration, grant.request_id, grant.fence[0] if grant.fence is not None else None)

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
        self._save(orders.plan)
        if self._streams is not None:
            self._streams.chunks_given(orders.plan, self._mirror)

    def _save(self, plan: StepPlan) -> None:
        mirror, registration = self._mirror, self._registration
        if mirror is None or registration is None or not (plan.saves or plan.completes):
            return
        began_s = time.perf_counter()
        mirror.save(plan.saves)
        failed = mirror.settle(plan.completes)
        self._recorder.observe("mirror_save_duration", time.perf_counter() - began_s)
        for request_id, reason in failed.items():
            self._void_failed_copy(registration, request_id, reason)

    def _void_failed_copy(self, registration: Registration, request_id: str, reason: str) -> None:
        self._recorder.count("num_failed_mirror_copies")
        self._void(registration, request_id, self._announced.slot(request_id))
        self._recorder.error(
            "mirror-copy",
            f"request {request_id}: its blocks could not be copied to host memory ({reason}); its readers will find its fence "
            "void",
        )

    def take_report(self) -> StepReport:
        """Return all ends since the last step, and this rank's registration if it was asked for or is new.

        In a step that computes nothing, this may wait for the end of a read or of a lease (`StepOrders.rest_s`).
        """
        streams = self._streams
        is_reading = bool(self._due_reads) or (streams is not None and streams.is_reading)
        self._resting.wait(is_reading=is_reading)
        registration = self._registration or self._dead
        self._watch.check(registration.agent if registration is not None else None)
        streamed = self._take_streams(streams) if streams is not None else None
        if not (self._sent or self._finished or self._failures or self._is_registration_due or streamed):
            return _NOTHING
        sent = frozenset(_drained(self._sent))
        self._resting.reported(sent)
        ends = [self._take_end(finished) for finished in _drained(self._finished)]
        bad = [end for end in ends if not end.is_ok]
        refused, self._failures = frozenset(self._failures), []
        for end in bad:
            if not end.order.is_reported:
                self._tell_not_notified(end)
        received, failed = refused | _reported_ids(ends), refused | _reported_ids(bad)
        failures = [self._failure(end) for end in bad if end.order.is_reported]
        of_streams, stream_ends = streamed if streamed is not None else (None, ())
        if of_streams is not None:
            received, failed = received.union(of_streams.received), failed.union(of_streams.failed)
            failures += [self._failure(end) for end in stream_ends if not end.is_ok]
        is_due, self._is_registration_due = self._is_registration_due, False
        return StepReport(
            sent=sent,
            received=received,
            failed=failed,
            registrations={self.rank: self.registration} if is_due else {},
            failures=tuple(failures),
            stream_ends=tuple((name, self.rank, is_done) for name, is_done in of_streams.ends) if of_streams else (),
        )

    def _failure(self, end: ReadEnd) -> ReadFailure:
        """Return why a read failed; the scheduler counts and logs it once for all ranks."""
        text = f"{_producer(end)}: {end.message} ({end.code})"
        return ReadFailure(end.order.request_id, self.rank, end.code, text)

    def _take_streams(self, streams: RankStreams) -> tuple[EndReport, list[ReadEnd]] | None:
        """Return the ends of streams; requests that ended while they were computed are reported as sent."""
        self._sent.extend(streams.take_sent())
        taken = streams.take(self._completion.complete)
        taken_s = time.monotonic()
        for end in taken[1] if taken is not None else ():
            self._tell_end(end, taken_s)
        return taken

    def _tell_not_notified(self, end: ReadEnd) -> None:
        """Count and log a producer that could not be notified that its blocks are no longer needed."""
        self._recorder.count("num_failed_notifications", times=int(end.was_met))
        self._log.warning(
            end.code,
            "request %s: could not notify %s that it is no longer needed; its blocks stay leased until the lease expires: %s",
            end.order.request_id,
            _producer(end),
            f"{end.message} ({end.code})",
        )

    def _take_end(self, finished: FinishedRead) -> ReadEnd:
        """Complete a read whose transfers have ended, and close its trace."""
        taken_s = time.monotonic()
        end = self._completion.complete(self._confirmed(finished))
        if end.order.is_reported:
            self._recorder.hand_overs.read_ended(end, taken_s, time.monotonic())
        self._close_trace(end)
        return end

    def _tell_end(self, end: ReadEnd, taken_s: float) -> None:
        self._recorder.hand_overs.read_ended(end, taken_s, time.monotonic())
        if end.is_ok:
            self._recorder.observe("stream_bytes", end.times.bytes_moved)
            self._recorder.observe("stream_early_bytes", end.times.early_bytes or 0)
        self._close_trace(end)

    def _close_trace(self, end: ReadEnd) -> None:
        link = self._links.pop(end.order.request_id, None)
        if link is not None and self._trace is not None:
            self._trace(link, end)

    def _confirmed(self, finished: FinishedRead) -> FinishedRead:
        """Return the read as failed if the cache was reset after it was ordered."""
        if not finished.end.order.is_reported:
            return finished  # only a notification; a read of that id may belong to another request
        request_id = finished.end.order.request_id
        self._due_reads.discard(request_id)
        if request_id not in self._void_reads:
            return finished
        self._void_reads.discard(request_id)
        return replace(finished, end=replace(finished.end, code="cache-reset", message=_RESET), conversion=())

    def take_stats(self) -> dict[str, list[Any]] | None:
        """Return the observations of the last interval by key; None if there are none."""
        return self._recorder.take()

    def status(self) -> Answer:
        """Return this rank's current state as plain values; any thread."""
        registration, dead = self._registration, self._dead
        is_registered = registration is not None
        return worker_status(self._facts, registration or dead, is_registered=is_registered, is_asleep=self._is_asleep)

    def hand_overs(self) -> Answer:
        """Return the timestamps of this rank's latest hand-overs, as plain values; any thread."""
        part = f"{self._facts.pp_rank}.{self._facts.tp_rank}"
        return {"part": part, "engine_id": self._facts.engine_id, "hand_overs": self._recorder.hand_overs.describe()}
