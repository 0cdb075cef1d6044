"""Protocol of the reader that decides which part of a stream to read next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_scheduler_state.streams import StreamPart, StreamReport

__all__ = [
    "StreamReaders",
]


class StreamReaders(Protocol):
    """Readers of one worker, each with a name for one stream from one rank."""

    def state_of(self, stream_id: str) -> str:
        """Return the state of a stream, e.g. `breaking` while it waits for its memory to be quiet."""
        ...

    def cause_of(self, stream_id: str) -> str:
        """Return the event that broke a stream which is not quiet yet; empty for any other."""
        ...

    def watch(
        self,
        stream_id: str,
        *,
        generation: int,
        tag: int,
        prompt_tokens: int,
        entry_tokens: int,
        first_entry: int = 0,
        now_s: float,
    ) -> None:
        """Start to follow a progress word; `entry_tokens` is the common multiple of all groups' blocks."""
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
