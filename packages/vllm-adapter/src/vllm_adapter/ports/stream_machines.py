"""Machines of kv-scheduler-state that carry out the orders of streamed hand-overs in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_scheduler_state import LeaseEnd
    from kv_scheduler_state.streams import EndReport, StreamChunk, StreamOpen, StreamOrder, StreamPlan

__all__ = ["StreamEnds", "StreamWorker"]


class StreamWorker(Protocol):
    """Writes the words of a producer's worker, in the order that is safe."""

    def before_forward(self, plan: StreamPlan) -> Sequence[tuple[str, Exception]]:
        """Change words, open slots and publish the ids of this step's chunks; return (request, error) of refused orders."""
        ...

    def chunk_ended(self, chunk: StreamChunk) -> None:
        """Show the tokens of a chunk that the device has finished; any thread."""
        ...

    def held(self, chunk: StreamChunk) -> None:
        """Show the tokens whose pages were complete before a chunk's step; any thread."""
        ...

    def spoil(self, opening: StreamOpen) -> None:
        """Store words that no reader accepts, for a prompt whose pages are unusable."""
        ...

    def leases_ended(self, ends: Iterable[LeaseEnd]) -> None:
        """Void the words of streams whose lease has ended on this worker."""
        ...

    def take_sent(self) -> Sequence[str]:
        """Return the requests that ended without a lease and whose words are permanently void, each once."""
        ...


class StreamEnds(Protocol):
    """Tracks the outcome of each stream on a consumer's worker. Engine thread only."""

    def apply(self, plan: StreamPlan) -> tuple[tuple[StreamOrder, ...], tuple[str, ...]]:
        """Process a plan; return the streams to read and the streams to stop."""
        ...

    def takes_read(self, request_id: str) -> bool:
        """Whether this worker must carry out and report the current order; call once for each reported read or failure."""
        ...

    def ended(self, request_id: str, *, is_done: bool) -> None:
        """Record the end of a request's stream on this worker, whose memory is quiet; `is_done` if its fence held."""
        ...

    def take_report(self) -> EndReport:
        """Return the ends since the last call."""
        ...
