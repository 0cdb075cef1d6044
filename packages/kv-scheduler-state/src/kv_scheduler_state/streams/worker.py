"""The worker's side of produced streams: the words to store, and when to store them.

`before_forward` runs before anything may write a freed block (`handle_preemptions` of the engine); `chunk_ended` runs
when the *device* has finished the chunk, never when it was scheduled: the scheduler may be two steps ahead by then.

A chunk of an earlier start may end after its slot was opened again or given to another request. Its tag then differs from the
slot's, and its progress is not shown.

A finished prompt continues as a lease with the same slot and generation. `LeaseTable` ends the lease; pass its ends to
`leases_ended` before they are reported, so that readers see the end in the progress word, too.

Reports of a consumer's worker about its streams: which go to the engine, and which only to the scheduler half.

The *engine* counts one report of each worker as received, and lets a request run once it has all of them. So a worker whose
fence held tells the engine at once, and never again for this request. A worker whose stream broke tells the *scheduler half*
alone, which may order another stream, or the plain read of the final ticket, into the same blocks. A worker that is already done
takes part in neither, because its data counts.

Worked example. Worker 0 is done and worker 1 breaks: the engine has one report of two. The final ticket comes: worker 1 reads
alone, its report is the second. Or nothing comes, and the stream is to be stopped: worker 1 reports the request as received
and failed, worker 0 reports nothing more.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from kv_scheduler_state.fences import ended_generation
from kv_scheduler_state.streams.values import stream_tag

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from kv_scheduler_state.plan import StreamChunk, StreamOpen, StreamOrder, StreamPlan
    from kv_scheduler_state.worker.lease import LeaseEnd

__all__ = ["EndReport", "StreamEnds", "StreamWords", "StreamWorker"]


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


class EndReport(NamedTuple):
    """Reports of a step: for the engine, and for the scheduler half (request, whether the fence held)."""

    received: tuple[str, ...]
    failed: tuple[str, ...]
    ends: tuple[tuple[str, bool], ...]


@final
class StreamEnds:
    """Tracks the outcome of each stream on one worker."""

    def __init__(self) -> None:
        # State of each stream: reading, torn, done, or stopping. A stopping stream is reported to the engine however it ends.
        self._states: dict[str, str] = {}
        self._received: list[str] = []
        self._failed: list[str] = []
        self._ends: list[tuple[str, bool]] = []

    def apply(self, plan: StreamPlan) -> tuple[tuple[StreamOrder, ...], tuple[str, ...]]:
        """Take in a plan; return the streams to watch and the streams to cancel."""
        for request_id in plan.ends:
            self._states.pop(request_id, None)
        watches: list[StreamOrder] = []
        for order in plan.watches:
            request_id = order.read.request_id
            if self._states.get(request_id) == "done":
                self._ends.append((request_id, True))
            else:
                self._states[request_id] = "reading"
                watches.append(order)
        cancels = tuple([request_id for request_id in plan.stops if self._stop(request_id)])
        return tuple(watches), cancels

    def takes_read(self, request_id: str) -> bool:
        """Whether this worker must perform and report the current order: a reported read or notification, or a failure.

        It must not if its stream of the request is done, because it has then reported already. Call this once per such order.
        """
        return self._states.pop(request_id, "") != "done"

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
        """Return the reports since the last call."""
        report = EndReport(tuple(self._received), tuple(self._failed), tuple(self._ends))
        self._received, self._failed, self._ends = [], [], []
        return report

    def _stop(self, request_id: str) -> bool:
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
