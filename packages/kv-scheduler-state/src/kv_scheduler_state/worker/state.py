"""One worker's part of all hand-overs, on its engine thread. It outlives the registrations of the worker's memory.

**Fences.** A request's fence word is written on the engine thread as soon as its plan arrives: it must be there before the
step's end can make a ticket known. When a worker loses its memory (sleep), the words and the KV of announced requests are lost.
Such a request becomes whole again when the engine computes it from the beginning: its new word is among the plan's fences. A
lost request that is granted a lease all the same must end at once; without its word no reader accepts its pages.

**Streams.** The *engine* counts one report of each worker as received, and lets a request run once it has all of them.
So a worker whose fence held tells the engine at once, and never again for this request. A worker whose stream broke tells the
*scheduler half* alone, which may order another stream, or the plain read of the final ticket, into the same blocks. A worker
that is already done takes part in neither, because its data counts.

Worked example. Worker 0 is done and worker 1 breaks: the engine has one report of two. The final ticket comes: worker 1 reads
alone, its report is the second. Or nothing comes, and the stream is to be stopped: worker 1 reports the request as received
and failed, worker 0 reports nothing more.

**Words** of produced streams. `before_forward` runs before anything may write a freed block (`handle_preemptions` of the engine);
`chunk_ended` runs when the *device* has finished the chunk, never when it was scheduled: the scheduler may be two steps ahead by
then.

A chunk of an earlier start may end after its slot was opened again or given to another request. Its tag then differs from the
slot's, and its progress is not shown.

A finished prompt continues as a lease with the same slot and generation. `LeaseTable` ends the lease; pass its ends to
`leases_ended` before they are reported, so that readers see the end in the progress word, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from kv_scheduler_state.fences import ended_generation, stream_tag
from kv_scheduler_state.plan import StepPlan

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from kv_scheduler_state.plan import StreamChunk, StreamOpen, StreamOrder, StreamPlan
    from kv_scheduler_state.worker.leases import LeaseEnd

__all__ = ["EndReport", "StreamWords", "StreamWorker", "WorkerState"]


class EndReport(NamedTuple):
    """Reports of a step: for the engine, and for the scheduler half (request, whether the fence held)."""

    received: tuple[str, ...]
    failed: tuple[str, ...]
    ends: tuple[tuple[str, bool], ...]


@final
class WorkerState:
    """Takes in every step plan, and returns the part of it that this worker must carry out. Not thread-safe."""

    def __init__(self) -> None:
        # Fence words of announced requests, and those of them whose memory is gone.
        self._announced: dict[str, tuple[int, int] | None] = {}
        self._lost: set[str] = set()
        # State of each stream that is read here: reading, torn, done, or stopping. A stopping one is reported however it ends.
        self._states: dict[str, str] = {}
        self._received: list[str] = []
        self._failed: list[str] = []
        self._ends: list[tuple[str, bool]] = []

    def apply(self, plan: StepPlan) -> StepPlan:
        """Take in a plan once; return the part that this worker must carry out.

        Leases of requests whose KV is lost are revoked with their grant. Orders about a stream that this worker has read to its
        end are left out, since it has reported the request already.
        """
        self._announced.update(dict.fromkeys(plan.expects))
        self._lost.difference_update(plan.restarts)
        self._announced.update((order.request_id, (order.slot, order.generation)) for order in plan.fences)
        granted = [order.request_id for order in plan.grants]
        lost = [request_id for request_id in granted if request_id in self._lost]
        for request_id in (*plan.releases, *granted):
            self._announced.pop(request_id, None)
            self._lost.discard(request_id)
        if lost:
            plan = plan._replace(revokes=(*plan.revokes, *lost))
        has_streams = self._states or plan.streams.watches or plan.streams.stops
        return self._without_done(plan) if has_streams else plan

    @property
    def announced(self) -> tuple[str, ...]:
        """Requests that are announced and neither granted nor released, oldest first."""
        return tuple(self._announced)

    def fence_slot(self, request_id: str) -> int | None:
        """Return the fence slot of an announced request, None if it has none."""
        word = self._announced.get(request_id)
        return word[0] if word is not None else None

    def lose(self) -> StepPlan:
        """Note that memory and fence words of all announced requests are gone; return the plan that announces them again."""
        self._lost.update(self._announced)
        return StepPlan(expects=self.announced)

    @property
    def is_reading(self) -> bool:
        """Whether a stream has not ended here, or the next order about a torn one is still to come."""
        return any(state != "done" for state in self._states.values())

    def ended(self, request_id: str, *, is_done: bool) -> None:
        """Record the end of a request's stream on this worker, whose memory is quiet; `is_done` if its fence held."""
        was_stopped = self._states.get(request_id) == "stopping"
        if is_done or was_stopped:
            self._received.append(request_id)
        if was_stopped:
            self._failed.append(request_id)
            del self._states[request_id]
            return
        self._states[request_id] = "done" if is_done else "torn"
        self._ends.append((request_id, is_done))

    def take_report(self) -> EndReport:
        """Return the ends of streams since the last call."""
        report = EndReport(tuple(self._received), tuple(self._failed), tuple(self._ends))
        self._received, self._failed, self._ends = [], [], []
        return report

    def _without_done(self, plan: StepPlan) -> StepPlan:
        orders = plan.streams
        # A read or a failure is the last order about a stream.
        reads = [order for order in plan.reads if not order.is_reported or self._takes(order.request_id)]
        failures = [request_id for request_id in plan.failures if self._takes(request_id)]
        for request_id in orders.ends:
            self._states.pop(request_id, None)
        watches = [order for order in orders.watches if self._watches(order)]
        stops = [request_id for request_id in orders.stops if self._stops(request_id)]
        streams = orders._replace(watches=tuple(watches), stops=tuple(stops))
        return plan._replace(reads=tuple(reads), failures=tuple(failures), streams=streams)

    def _takes(self, request_id: str) -> bool:
        return self._states.pop(request_id, "") != "done"

    def _watches(self, order: StreamOrder) -> bool:
        request_id = order.read.request_id
        if self._states.get(request_id) == "done":
            self._ends.append((request_id, True))
            return False
        self._states[request_id] = "reading"
        return True

    def _stops(self, request_id: str) -> bool:
        """Note that a stream is given up; return whether its reading must be cancelled."""
        state = self._states.get(request_id)
        if state == "reading":
            self._states[request_id] = "stopping"
            return True
        if state == "torn":
            self._received.append(request_id)
            self._failed.append(request_id)
        self._states.pop(request_id, None)
        return False


class StreamWords(Protocol):
    """Registered words that peers read."""

    def open(self, slot: int, generation: int, tag: int) -> None:
        """Store the generation, progress 0 under the tag, and give the table to the tag."""
        ...

    def void(self, slot: int, word: int, tag: int) -> None:
        """Store a word that no reader accepts, then `VOID_TOKENS` as the tag's progress, so that readers stop early."""
        ...

    def put(self, slot: int, tag: int, first: int, ids: tuple[int, ...]) -> None:
        """Store ids at the places of the tag's table from `first` on."""
        ...

    def show(self, slot: int, tag: int, tokens: int) -> None:
        """Store the progress, after everything that it announces."""
        ...


@final
class StreamWorker:
    """Applies plans to the words of one worker.

    Args:
        words: The words.
        slots: Number of stream slots; leases in the slots behind them are plain.
    """

    def __init__(self, words: StreamWords, slots: int) -> None:
        self._words = words
        self._slots = slots
        self._tags: dict[int, int] = {}
        self._ended: list[str] = []

    def before_forward(self, plan: StreamPlan) -> tuple[tuple[str, Exception], ...]:
        """Void words, open slots and publish the ids of this step's chunks; return the orders that the words refused.

        A refused order does not affect the others. A refused void still counts as done: words refuse a void only when they are
        gone.
        """
        refused: list[tuple[str, Exception]] = []
        for void in plan.voids:
            with _collecting(refused, void.request_id):
                self._words.void(void.slot, void.word, void.tag)
            self._tags.pop(void.slot, None)
            if void.ends:
                self._ended.append(void.request_id)
        for opening in plan.opens:
            with _collecting(refused, opening.request_id):
                self._words.open(opening.slot, opening.generation, opening.tag)
                self._tags[opening.slot] = opening.tag
        for chunk in plan.chunks:
            with _collecting(refused, chunk.request_id):
                for run in chunk.runs:
                    self._words.put(chunk.slot, chunk.tag, run.first, run.ids)
        return tuple(refused)

    def chunk_ended(self, chunk: StreamChunk) -> None:
        """Show the tokens of a chunk that the device has finished."""
        if self._tags.get(chunk.slot) == chunk.tag:
            self._words.show(chunk.slot, chunk.tag, chunk.tokens)

    def held(self, chunk: StreamChunk) -> None:
        """Show the tokens whose pages existed before a chunk's step, once the device has finished the earlier steps."""
        if self._tags.get(chunk.slot) == chunk.tag:
            self._words.show(chunk.slot, chunk.tag, chunk.held_tokens)

    def spoil(self, opening: StreamOpen) -> None:
        """Store words that no reader accepts, for a prompt whose pages are invalid; its end is ordered later, as usual."""
        self._words.void(opening.slot, ended_generation(opening.generation), opening.tag)
        self._tags.pop(opening.slot, None)

    def leases_ended(self, ends: Iterable[LeaseEnd]) -> None:
        """Void the words of streams whose lease has ended on this worker."""
        for end in ends:
            if end.fence is not None and end.fence[0] < self._slots:
                slot, word = end.fence
                self._words.void(slot, word, stream_tag(word))
                self._tags.pop(slot, None)

    def take_sent(self) -> list[str]:
        """Return the requests that ended without a lease and whose words are void for good, each once."""
        ended, self._ended = self._ended, []
        return ended


@contextmanager
def _collecting(refused: list[tuple[str, Exception]], request_id: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  (one order can only fail itself)
        refused.append((request_id, error))
