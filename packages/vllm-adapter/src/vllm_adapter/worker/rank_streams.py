"""Streams of a rank on the engine thread: words of the prompts that it computes, and reports of those that it reads.

The words move before the forward pass (`before_forward`), because the forward pass may write into blocks that were freed in
this step. A chunk is shown once the device has finished it (`chunks_given`). Ends of streams come from the transfer thread and
are reported with the next step: to the engine, or to the scheduler half alone, see `ports.StreamEnds`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from vllm_adapter.steps import STREAM_STOPPED, ReadEnd
from vllm_adapter.worker.sleep import fail_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import ReadOrder, StepPlan, StreamEnds, StreamOpen, StreamOrder, StreamWorker
    from vllm_adapter.steps import StepReport
    from vllm_adapter.worker.host_mirror import HostMirror
    from vllm_adapter.worker.transfer.records import FinishedRead

__all__ = ["RankStreams", "ReadsOfStep", "StreamReports"]


class ReadsOfStep(NamedTuple):
    """Orders of a step for this rank's transfer thread, beside those of leases."""

    reads: tuple[ReadOrder, ...]
    """Plain reads and notifications."""
    watches: tuple[StreamOrder, ...] = ()
    """Streams to read."""
    stops: tuple[str, ...] = ()
    """Requests whose stream is to be given up."""


class StreamReports(NamedTuple):
    """Ends of streams since the last step."""

    received: frozenset[str]
    """For the engine: requests that this rank is done with, well or badly."""
    failed_ids: frozenset[str]
    """The part of them that ended badly."""
    failed: tuple[ReadEnd, ...]
    """Reasons of these, where one is known."""
    good: tuple[ReadEnd, ...]
    """The good ones among them."""
    ends: tuple[tuple[str, bool], ...]
    """For the scheduler half: request, and whether its fence held."""

    def added_to(self, report: StepReport) -> StepReport:
        """Return a report with these ends in it."""
        return replace(
            report,
            received=report.received | self.received,
            failed=report.failed | self.failed_ids,
            stream_ends=self.ends,
        )


def _given_up(end: ReadEnd) -> ReadEnd:
    """Return the end of a stream that was given up; all of it may have arrived before anybody knew."""
    return replace(end, code=STREAM_STOPPED, message="the stream was given up") if end.is_ok else end


@final
class RankStreams:
    """Streams of one rank. Engine thread only, but for `ended`.

    Args:
        ends: Knows the fate of each stream that is read here.
        recorder: Takes what fails, and counts.
    """

    def __init__(self, ends: StreamEnds, recorder: Recorder) -> None:
        self._ends = ends
        self._recorder = recorder
        self._worker: StreamWorker | None = None
        self._finished: deque[FinishedRead] = deque()
        # The latest end of a stream that was not reported to the engine yet, for its reason.
        self._torn: dict[str, ReadEnd] = {}
        self._sent: list[str] = []
        # Openings of the prompts whose words stand, by request.
        self._open: dict[str, StreamOpen] = {}

    def use(self, worker: StreamWorker | None) -> None:
        """Store words with this from now on; None while nothing is registered."""
        self._worker = worker
        self._open.clear()

    # ---------------------------------------------------------------------------------------------- this rank computes

    def before_forward(
        self, plan: StepPlan, then: Callable[[Callable[[], None]], None], mirror: HostMirror | None = None
    ) -> None:
        """Move words, open slots and publish block ids, before anything of the step runs on the device.

        Pages that the steps before have filled (a prefix hit) are shown once the device has done these, not with this step's end.

        Args:
            plan: The step's orders.
            then: Runs an action once the device has finished what it has been given.
            mirror: Where readers take the pages from, if not from the device: they are shown behind this step's copies.
        """
        orders = plan.streams
        if not (orders.voids or orders.opens or orders.chunks):
            return
        if self._worker is None:  # the words are gone, so they are void
            self._sent += [void.request_id for void in orders.voids if void.ends]
            return
        for void in orders.voids:
            self._open.pop(void.request_id, None)
        self._open.update((opening.request_id, opening) for opening in orders.opens)
        for request_id, error in self._worker.before_forward(orders):
            self._recorder.trouble("storing the words of a stream", error, f"request {request_id}")
        self._sent += self._worker.take_sent()
        for chunk in orders.chunks:
            if chunk.held_tokens and mirror is None:
                then(partial(self._worker.held, chunk))

    def chunks_given(
        self, plan: StepPlan, then: Callable[[Callable[[], None]], None], mirror: HostMirror | None
    ) -> None:
        """Show this step's chunks once they can be read.

        Args:
            plan: The step's orders.
            then: Runs an action once the device has finished what it has been given.
            mirror: Where readers take the pages from, if not from the device: its copies come first.
        """
        worker = self._worker
        if worker is None:
            return
        for chunk in plan.streams.chunks:
            show = partial(worker.chunk_ended, chunk)
            if mirror is None:
                then(show)
            else:
                mirror.then(chunk.request_id, show)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget prompts that are whole and copied: their words move with their lease from now on."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def void(self, request_id: str) -> bool:
        """Move the words of a prompt whose pages are no good; False for one that has no stream."""
        opening = self._open.get(request_id)
        if opening is None or self._worker is None:
            return False
        self._worker.spoil(opening)
        return True

    def take_sent(self) -> list[str]:
        """Return requests that ended while they were computed, whose words have moved for good; each once."""
        sent, self._sent = self._sent, []
        return sent

    # ---------------------------------------------------------------------------------------------- this rank reads

    def apply(self, plan: StepPlan) -> ReadsOfStep:
        """Take in a step's orders; return what the transfer thread is to do.

        A rank that has read a stream to its end does nothing more for that request, see `StreamEnds.takes_read`.
        """
        reads = tuple(
            [order for order in plan.reads if not order.is_reported or self._ends.takes_read(order.request_id)]
        )
        watches, stops = self._ends.apply(plan.streams)
        for request_id in (*plan.streams.ends, *(order.request_id for order in reads)):
            self._torn.pop(request_id, None)
        return ReadsOfStep(reads, watches, stops)

    def failures(self, request_ids: Sequence[str]) -> list[str]:
        """Return those of a step's failures that this rank is to report."""
        return [request_id for request_id in request_ids if self._ends.takes_read(request_id)]

    def ended(self, finished: FinishedRead) -> None:
        """Take the end of a stream whose memory is quiet; any thread."""
        self._finished.append(finished)

    def fail(self, watches: Iterable[StreamOrder], now_s: float, code: str, message: str) -> None:
        """End streams that are ordered while nothing is registered."""
        for finished in fail_reads((order.read for order in watches), now_s, code, message):
            self.ended(finished)

    def fail_finished(self, failed: Callable[[FinishedRead], FinishedRead]) -> None:
        """Turn good ends that are not reported yet into bad ones: their pages are about to be lost."""
        for _ in range(len(self._finished)):
            self._finished.append(failed(self._finished.popleft()))

    def take(self, complete: Callable[[FinishedRead], ReadEnd]) -> StreamReports | None:
        """Return the ends since the last call, None for none; `complete` puts the pages of a good one where they belong."""
        latest: dict[str, ReadEnd] = {}
        while self._finished:
            end = complete(self._finished.popleft())
            latest[end.order.request_id] = end
            self._ends.ended(end.order.request_id, is_done=end.is_ok)
        report = self._ends.take_report()
        if not (report.received or report.ends):
            return None
        self._torn.update(latest)
        known = {request_id: self._torn.pop(request_id, None) for request_id in report.received}
        bad = [known[request_id] for request_id in report.failed]
        good = [end for request_id, end in known.items() if request_id not in report.failed]
        for request_id, is_done in report.ends:
            if is_done:
                self._torn.pop(request_id, None)
            elif request_id in latest:
                self._tell_torn(latest[request_id])
        return StreamReports(
            frozenset(report.received),
            frozenset(report.failed),
            tuple([_given_up(end) for end in bad if end is not None]),
            tuple([end for end in good if end is not None and end.is_ok]),
            report.ends,
        )

    def _tell_torn(self, end: ReadEnd) -> None:
        self._recorder.count("num_torn_streams")
        self._recorder.info(
            "stream-torn",
            f"request {end.order.request_id}: its stream from engine {end.order.peer.engine_id} broke off ({end.message}); "
            f"its prompt is asked for again ({end.code})",
        )
