"""Streams of a rank on the engine thread: the words of prompts that it computes, and reports on prompts that it reads.

A rank has a `RankStreams` only where prompts are streamed. The words change before the forward pass (`before_forward`), because
the forward pass may write into blocks that were freed in this step. The ends of streams are reported to the engine, or to the
scheduler half alone, see `ports.WorkerState`.

A chunk's tokens may be shown once the device has finished it (`chunks_given`), never before. Where a call returns only when its
work is done (CPU), they are shown at once. On a device with streams the engine thread records a mark in its stream behind the
forward pass and continues; one thread of this module waits for the marks in order (`ChunkMarks`). With a host buffer readers
take the mirror's pages, so showing waits for the copies instead (`HostMirror.then`).
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol, final

from vllm_adapter.cache.names import peer_text
from vllm_adapter.steps import STREAM_STOPPED

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterable

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import EndReport, StepPlan, StreamOpen, StreamWorker, WorkerState
    from vllm_adapter.steps import ReadEnd
    from vllm_adapter.worker.pages import HostMirror

__all__ = ["ChunkMarks", "DeviceMarks", "RankStreams"]


@final
class RankStreams:
    """Streams of one rank. Engine thread only.

    Args:
        state: Tracks the outcome of each stream that is read here.
        recorder: Records failures and counts.
        sent: Receives the requests that ended while they were computed, once their words are permanently void.
        marks: Shows when the device has finished a chunk; None where calls return only when their work is done.
        mirror: If there is one, readers take the pages from it: chunks are then shown after the copies of their step.
    """

    def __init__(
        self,
        state: WorkerState,
        recorder: Recorder,
        sent: deque[str],
        marks: DeviceMarks | None = None,
        mirror: HostMirror | None = None,
    ) -> None:
        self._state = state
        self._recorder = recorder
        self._sent = sent
        self._marks = ChunkMarks(marks, recorder.trouble)
        self._mirror = mirror
        self._worker: StreamWorker | None = None
        # The latest end of each stream that has not been reported to the engine yet.
        self._torn: dict[str, ReadEnd] = {}
        # Openings of the prompts whose words are valid, by request.
        self._open: dict[str, StreamOpen] = {}
        self._begun: StepPlan | None = None
        self._are_words_late = False

    def close(self) -> None:
        """Show no more chunks; idempotent."""
        self._marks.close()

    def use(self, worker: StreamWorker | None) -> None:
        """Write words through `worker` from now on; None while nothing is registered."""
        self._worker = worker
        self._open.clear()

    # ---------------------------------------------------------------------------------------------- this rank computes

    def before_forward(self, plan: StepPlan) -> None:
        """Change words, open slots and publish block ids, before any work of the step runs on the device.

        Pages filled by earlier steps (a prefix hit) are shown once the device has finished those, without waiting for this step.
        """
        self._begun, orders = plan, plan.streams
        if not (orders.voids or orders.opens or orders.chunks):
            return
        if self._worker is None:  # the words no longer exist, so they are void
            self._sent += [void.request_id for void in orders.voids if void.ends]
            return
        for void in orders.voids:
            self._open.pop(void.request_id, None)
        self._open.update((opening.request_id, opening) for opening in orders.opens)
        for request_id, error in self._worker.before_forward(orders):
            self._recorder.trouble("storing the words of a stream", error, f"request {request_id}")
        self._sent += self._worker.take_sent()
        for chunk in orders.chunks:
            if chunk.held_tokens and self._mirror is None:
                self._marks.then(partial(self._worker.held, chunk))

    def catch_up(self, plan: StepPlan) -> None:
        """Change the words of this step unless `before_forward` was called with it, as it must be."""
        orders = plan.streams
        if self._begun is not plan:
            if (orders.voids or orders.opens or orders.chunks) and not self._are_words_late:
                self._are_words_late = True
                self._recorder.error(
                    "words-late",
                    "words of streams move after the forward pass that they are for, because the host did not call "
                    "handle_preemptions with this step's orders: peers may read pages that it has written anew (words-late)",
                )
            self.before_forward(plan)
        self._begun = None

    def chunks_given(self, plan: StepPlan) -> None:
        """Show this step's chunks once they can be read."""
        worker, mirror = self._worker, self._mirror
        if worker is None:
            return
        for chunk in plan.streams.chunks:
            show = partial(worker.chunk_ended, chunk)
            if mirror is None:
                self._marks.then(show)
            else:
                mirror.then(chunk.request_id, show)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget prompts that are complete and copied: from now on their words change with their lease."""
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def void(self, request_id: str) -> bool:
        """Void the words of a prompt whose pages are unusable; return False for a prompt without a stream."""
        opening = self._open.get(request_id)
        if opening is None or self._worker is None:
            return False
        self._worker.spoil(opening)
        return True

    # ---------------------------------------------------------------------------------------------- this rank reads

    def apply(self, plan: StepPlan) -> None:
        """Forget the latest end of each stream about which a step orders something else."""
        for request_id in (*plan.streams.ends, *(order.request_id for order in plan.reads)):
            self._torn.pop(request_id, None)

    def ended(self, end: ReadEnd) -> None:
        """Process the end of a stream, whose pages are complete if it is a good one."""
        self._torn[end.order.request_id] = end
        self._state.ended(end.order.request_id, is_done=end.is_ok)

    def take(self) -> tuple[EndReport, list[ReadEnd]]:
        """Return what to report to the engine and to the scheduler half, and the reads that have ended for good, where known."""
        report = self._state.take_report()
        ends: list[ReadEnd] = []
        for request_id in report.received:
            known = self._torn.pop(request_id, None)
            if known is not None and request_id in report.failed:
                # All its data may have arrived before the stop took effect.
                ends.append(known.failed(STREAM_STOPPED, "the stream was given up"))
            elif known is not None and known.is_ok:
                ends.append(known)
        for request_id, is_done in report.ends:
            if is_done:
                self._torn.pop(request_id, None)
            elif (torn := self._torn.get(request_id)) is not None:
                self._recorder.observe("num_torn_streams", torn.code)
                self._recorder.info(
                    "stream-torn",
                    f"request {request_id}: its stream from {peer_text(torn.order.ticket.peer)} broke off "
                    f"({torn.message}); its prompt is asked for again ({torn.code})",
                )
        return report, ends


_LOOK_S: Final = 0.0005
"""Interval at which a mark is polled; the thread sleeps while there is none."""


class DeviceMarks(Protocol):
    """Marks behind all the work that the calling thread has given the device so far."""

    def mark(self) -> object:
        """Record and return a mark; never waits."""
        ...

    def is_over(self, mark: object) -> bool:
        """Return whether everything before the mark is done; any thread."""
        ...


@final
class ChunkMarks:
    """Runs actions in the order in which they were given, each once the device has reached its mark.

    Args:
        device: The device's marks; None where calls return only when their work is done.
        trouble: Receives the exception of an action or of polling a mark; later actions still run.
    """

    def __init__(self, device: DeviceMarks | None, trouble: Callable[[str, Exception], None]) -> None:
        self._device = device
        self._trouble = trouble
        self._waiting: SimpleQueue[tuple[object, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def then(self, action: Callable[[], None]) -> None:
        """Run an action after the work that the calling thread has given the device so far; engine thread, never waits."""
        if self._device is None:
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._device,), name="kv-chunk-marks", daemon=True)
            self._thread.start()
        self._waiting.put((self._device.mark(), action))

    def close(self) -> None:
        """Run no more actions; idempotent."""
        self._is_closed = True
        self._waiting.put(None)

    def _run(self, device: DeviceMarks) -> None:
        while (item := self._waiting.get()) is not None:
            mark, action = item
            try:
                while not device.is_over(mark):
                    if self._is_closed:
                        return
                    time.sleep(_LOOK_S)
                action()
            except Exception as error:  # noqa: BLE001  (a chunk that is not shown costs its readers a fallback, nothing else)
                self._trouble("showing a chunk", error)
