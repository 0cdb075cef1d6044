"""Streamed reads: orders of the request machine, and the reader that tells what to read next."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports.orders import ReadOrder

__all__ = ["StreamFacts", "StreamOrder", "StreamPart", "StreamReaders", "StreamReport"]


class StreamFacts(NamedTuple):
    """A stream to be read from one rank.

    Attributes:
        generation: Generation of the offer, which the fence word must show in the end.
        tag: Tag that progress and table carry.
        prompt_tokens: Tokens that are handed over.
        entry_tokens: Tokens that become whole together: the common multiple of all groups' blocks.
        first_entry: Entries before it are here already.
    """

    generation: int
    tag: int
    prompt_tokens: int
    entry_tokens: int
    first_entry: int = 0


class StreamOrder(Protocol):
    """Order to read behind a peer's progress word."""

    @property
    def read(self) -> ReadOrder:
        """The whole read, without the peer's blocks: its table lists them."""
        ...

    @property
    def tag(self) -> int: ...
    @property
    def start(self) -> int:
        """First token to read."""
        ...


class StreamPart(Protocol):
    """Entries that are to be read now."""

    @property
    def first(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def is_last(self) -> bool:
        """Whether states are read with it: it is the last one."""
        ...


class StreamReport(Protocol):
    """End of a stream from one rank; its memory is quiet."""

    @property
    def stream_id(self) -> str: ...
    @property
    def is_done(self) -> bool: ...


class StreamReaders(Protocol):
    """Readers of one worker, by a name for each stream from one rank."""

    def state_of(self, stream_id: str) -> str:
        """Return the state of a stream: `breaking` for one that waits for its memory to be quiet."""
        ...

    def watch(self, stream_id: str, stream: StreamFacts, now_s: float) -> None:
        """Begin to read behind a progress word."""
        ...

    def observed(self, stream_id: str, tag: int, tokens: int, now_s: float) -> StreamPart | None:
        """Take a progress word; return the part that is to be read now, if any."""
        ...

    def landed(self, stream_id: str, *, is_good: bool, now_s: float) -> None:
        """Count a part as quiet."""
        ...

    def fence_found(self, stream_id: str, word: int | None) -> None:
        """Take the fence word, None if it could not be read."""
        ...

    def cancel(self, stream_id: str) -> None:
        """Stop reading; the report follows once the memory is quiet."""
        ...

    def tick(self, now_s: float) -> None:
        """Give up the streams that made no progress in time."""
        ...

    def take_fences(self) -> Sequence[str]:
        """Return the streams whose fence word is to be read now, each once."""
        ...

    def take_reports(self) -> Sequence[StreamReport]:
        """Return the ends, each once."""
        ...
