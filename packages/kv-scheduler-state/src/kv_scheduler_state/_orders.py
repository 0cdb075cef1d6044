"""Parts of a step plan as workers read them, structurally: any object with these members will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "EndedLease",
    "FenceWord",
    "Grant",
    "ProducerOrders",
    "ReadOfStream",
    "ReadingOrders",
    "Watch",
    "WordChunk",
    "WordOpening",
    "WordOrders",
    "WordRun",
    "WordVoid",
]


class FenceWord(Protocol):
    """A fence word to write."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class Grant(Protocol):
    """A lease that starts now."""

    @property
    def request_id(self) -> str: ...
    @property
    def lease_s(self) -> float: ...
    @property
    def fence(self) -> tuple[int, int] | None: ...
    @property
    def nonce(self) -> str: ...


class ProducerOrders(Protocol):
    """The parts of a plan that a producer's worker applies; `StepPlan` describes them."""

    @property
    def expects(self) -> Sequence[str]: ...
    @property
    def fences(self) -> Sequence[FenceWord]: ...
    @property
    def grants(self) -> Sequence[Grant]: ...
    @property
    def releases(self) -> Sequence[str]: ...
    @property
    def revokes(self) -> Sequence[str]: ...
    @property
    def restarts(self) -> Sequence[str]: ...


class WordVoid(Protocol):
    """A word to move, see `StreamVoid`."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def word(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def ends(self) -> bool: ...


class WordOpening(Protocol):
    """A slot to give to a tag, see `StreamOpen`."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def tag(self) -> int: ...


class WordRun(Protocol):
    """Block ids for the table from place `first` on."""

    @property
    def first(self) -> int: ...
    @property
    def ids(self) -> tuple[int, ...]: ...


class WordChunk(Protocol):
    """Block ids to store, and tokens to show later, see `StreamChunk`."""

    @property
    def request_id(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def runs(self) -> Sequence[WordRun]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def held_tokens(self) -> int: ...


class WordOrders(Protocol):
    """The parts of `StreamPlan` that a producer's worker applies."""

    @property
    def voids(self) -> Sequence[WordVoid]: ...
    @property
    def opens(self) -> Sequence[WordOpening]: ...
    @property
    def chunks(self) -> Sequence[WordChunk]: ...


class EndedLease(Protocol):
    """A lease that has ended on this worker."""

    @property
    def fence(self) -> tuple[int, int] | None: ...


class ReadOfStream(Protocol):
    """The read of a stream."""

    @property
    def request_id(self) -> str: ...


class Watch(Protocol):
    """A stream to read, see `StreamOrder`."""

    @property
    def read(self) -> ReadOfStream: ...


WatchT_co = TypeVar("WatchT_co", bound=Watch, covariant=True)


class ReadingOrders(Protocol[WatchT_co]):
    """The parts of `StreamPlan` that a consumer's worker applies."""

    @property
    def ends(self) -> Sequence[str]: ...
    @property
    def watches(self) -> Sequence[WatchT_co]: ...
    @property
    def stops(self) -> Sequence[str]: ...
