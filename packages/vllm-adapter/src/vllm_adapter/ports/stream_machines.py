"""Machines of kv-scheduler-state that carry out the orders of streamed hand-overs in a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_adapter.ports.leases import LeaseEnd
    from vllm_adapter.ports.stream_orders import StreamChunk, StreamOpen, StreamPlan
    from vllm_adapter.ports.stream_reads import StreamOrder

__all__ = ["StreamEndReport", "StreamEnds", "StreamWorker"]


class StreamWorker(Protocol):
    """Stores words of a worker of the producer, in the order that is safe."""

    def before_forward(self, plan: StreamPlan) -> Sequence[tuple[str, Exception]]:
        """Move words, open slots and publish the ids of this step's chunks; return (request, error) of refused orders."""
        ...

    def chunk_ended(self, chunk: StreamChunk) -> None:
        """Show the tokens of a chunk that the device has finished; any thread."""
        ...

    def held(self, chunk: StreamChunk) -> None:
        """Show the tokens whose pages were there before a chunk's step; any thread."""
        ...

    def spoil(self, opening: StreamOpen) -> None:
        """Store words that no reader accepts, for a prompt whose pages are no good."""
        ...

    def leases_ended(self, ends: Iterable[LeaseEnd]) -> None:
        """Move the words of streams whose lease has ended on this worker."""
        ...

    def take_sent(self) -> Sequence[str]:
        """Return the requests that ended without a lease and whose words have moved for good, each once."""
        ...


class StreamEndReport(Protocol):
    """New ends of streams: for the engine, and for the scheduler half (request, whether the fence held)."""

    @property
    def received(self) -> tuple[str, ...]: ...
    @property
    def failed(self) -> tuple[str, ...]: ...
    @property
    def ends(self) -> tuple[tuple[str, bool], ...]: ...


class StreamEnds(Protocol):
    """Keeps what has become of each stream on a worker of the consumer. Engine thread only."""

    def apply(self, plan: StreamPlan) -> tuple[tuple[StreamOrder, ...], tuple[str, ...]]:
        """Take in a plan; return the streams to read and the streams to stop."""
        ...

    def takes_read(self, request_id: str) -> bool:
        """Whether this worker is to do and report what is ordered now; ask once for each reported read or failure."""
        ...

    def ended(self, request_id: str, *, is_done: bool) -> None:
        """Record the end of a request's stream on this worker, whose memory is quiet; `is_done` if its fence held."""
        ...

    def take_report(self) -> StreamEndReport:
        """Return what is new since the last call."""
        ...
