"""The worker's side of produced streams: the words to store, and when to store them.

`before_forward` runs before anything may write a freed block (`handle_preemptions` of the engine); `chunk_ended` runs
when the *device* has finished the chunk, never when it was scheduled: the scheduler may be two steps ahead by then.

A chunk of an earlier start may end after its slot was opened again or given to another request. Its tag then differs from the
slot's, and its progress is not shown.

A finished prompt continues as a lease with the same slot and generation. `LeaseTable` ends the lease; pass its ends to
`leases_ended` before they are reported, so that readers see the end in the progress word, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, final

from kv_scheduler_state.fences import ended_generation
from kv_scheduler_state.streams.values import stream_tag

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from kv_scheduler_state.plan import StreamChunk, StreamOpen, StreamPlan
    from kv_scheduler_state.worker.lease import LeaseEnd

__all__ = ["StreamWords", "StreamWorker"]


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
