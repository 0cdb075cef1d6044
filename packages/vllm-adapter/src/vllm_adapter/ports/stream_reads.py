"""Streamed reads: orders of the request machines, and the reader that decides which part to read next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports.orders import ReadOrder

__all__ = ["StreamFacts", "StreamOrder", "StreamPart", "StreamReaders", "StreamReport"]


class StreamFacts(NamedTuple):
    """A stream to be read from one rank.

    Attributes:
        generation: Generation of the offer, which the fence word must still show at the end.
        tag: Tag of progress words and table entries.
        prompt_tokens: Tokens that are handed over.
        entry_tokens: Tokens that become complete together: the common multiple of all groups' blocks.
        first_entry: First entry to read; the local cache holds the earlier ones.
    """

    generation: int
    tag: int
    prompt_tokens: int
    entry_tokens: int
    first_entry: int = 0


class StreamOrder(Protocol):
    """Order to follow a peer's progress word and read the finished tokens."""

    @property
    def read(self) -> ReadOrder:
        """The whole read, without the peer's blocks, which its table lists."""
        ...

    @property
    def tag(self) -> int: ...
    @property
    def start(self) -> int:
        """First token to read."""
        ...


class StreamPart(Protocol):
    """Entries to read now."""

    @property
    def first(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def is_last(self) -> bool:
        """Whether this is the last part, with which states are read."""
        ...


class StreamReport(Protocol):
    """End of a stream from one rank, once its memory is quiet."""

    @property
    def stream_id(self) -> str: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def cause(self) -> str:
        """Event that broke it: `changed`, `stall`, `slow`, `part-lost`, `lost` or `cancel`; empty if it is done."""
        ...


class StreamReaders(Protocol):
    """Readers of one worker, each with a name for one stream from one rank."""

    def state_of(self, stream_id: str) -> str:
        """Return the state of a stream, e.g. `breaking` while it waits for its memory to be quiet."""
        ...

    def cause_of(self, stream_id: str) -> str:
        """Return the event that broke a stream which is not quiet yet; empty for any other."""
        ...

    def watch(self, stream_id: str, stream: StreamFacts, now_s: float) -> None:
        """Start to follow a progress word."""
        ...

    def observed(self, stream_id: str, tag: int, tokens: int, now_s: float) -> StreamPart | None:
        """Process a progress word; return the part to read now, if any."""
        ...

    def landed(self, stream_id: str, *, is_good: bool, now_s: float) -> None:
        """Count a part that can no longer write."""
        ...

    def fence_found(self, stream_id: str, word: int | None) -> None:
        """Process the fence word; None if it could not be read."""
        ...

    def cancel(self, stream_id: str) -> None:
        """Stop reading; the stream is reported once its memory is quiet."""
        ...

    def tick(self, now_s: float) -> None:
        """Give up streams that made no progress in time."""
        ...

    def take_fences(self) -> Sequence[str]:
        """Return the streams whose fence word must be read now, each once."""
        ...

    def take_reports(self) -> Sequence[StreamReport]:
        """Return the ends of streams, each once."""
        ...
