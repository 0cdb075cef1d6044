"""Orders of streamed hand-overs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.ports.stream_reads import StreamOrder

__all__ = [
    "StreamChunk",
    "StreamOpen",
    "StreamPlan",
    "StreamRun",
    "StreamVoid",
]


class StreamVoid(Protocol):
    """Order: void the fence word, before the forward pass."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def word(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def ends(self) -> bool:
        """Whether the request is then reported as sent."""
        ...


class StreamOpen(Protocol):
    """Order: give a slot and its table to a tag, before the forward pass."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def tag(self) -> int: ...


class StreamRun(Protocol):
    """Block ids for the table from place `first` on."""

    @property
    def first(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]: ...


class StreamChunk(Protocol):
    """Order: store block ids before the forward pass, and show `tokens` once the device has finished the chunk."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def runs(self) -> Sequence[StreamRun]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def held_tokens(self) -> int:
        """Tokens whose pages are complete once all earlier steps have ended on the device; 0 if none are known."""
        ...


class StreamPlan(Protocol):
    """Orders of one step about streams."""

    @property
    def voids(self) -> Sequence[StreamVoid]: ...
    @property
    def opens(self) -> Sequence[StreamOpen]: ...
    @property
    def chunks(self) -> Sequence[StreamChunk]: ...
    @property
    def ends(self) -> Sequence[str]:
        """Streams of this engine's requests to forget."""
        ...

    @property
    def watches(self) -> Sequence[StreamOrder]: ...
    @property
    def stops(self) -> Sequence[str]:
        """Requests whose stream is to be stopped, and reported as received and failed."""
        ...
