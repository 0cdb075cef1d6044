"""The package's exceptions: one base, four kinds, each with a stable code; and values shortened for their messages."""

from __future__ import annotations

from collections.abc import Sized
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = [
    "Fault",
    "GeometryMismatch",
    "InvalidBlocks",
    "InvalidGeometry",
    "TopologyError",
    "UnsupportedTopology",
    "demand",
    "shown",
    "shown_ranks",
]

Fault = Literal["local", "peer", "environment"]


class TopologyError(Exception):
    """Base of every exception that this package raises on purpose; its text is "sentence (code)".

    Attributes:
        message: The sentence alone.
        code: Stable kebab-case reason, listed in the README.
        fault: Side whose data was wrong.
        is_retry_safe: Whether the same call can succeed later without a change; geometry never does.
        context: The values that the sentence names.
    """

    def __init__(
        self, code: str, message: str, context: Mapping[str, object] | None = None, *, fault: Fault = "local"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.fault: Fault = fault
        self.is_retry_safe: bool | None = False
        self.context: Mapping[str, object] = MappingProxyType(dict(context or {}))

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def __reduce__(self) -> tuple[Callable[[], TopologyError], tuple[()]]:
        """Pickle the constructor's arguments, so that an error crosses processes with its code."""
        return partial(type(self), self.code, self.message, dict(self.context), fault=self.fault), ()

    def blamed_on(self, fault: Fault, **context: object) -> TopologyError:
        """Return the same error with another fault and more context: the one place where errors are re-labelled."""
        return type(self)(self.code, self.message, {**self.context, **context}, fault=fault)


@final
class InvalidGeometry(TopologyError):  # noqa: N818 - the name says what happened
    """A description contradicts itself: overlapping strides, fields outside a page, absurd sizes."""


@final
class GeometryMismatch(TopologyError):  # noqa: N818 - the name says what happened
    """Two descriptions that should agree do not: element sizes, axes, page sizes."""


@final
class UnsupportedTopology(TopologyError):  # noqa: N818 - the name says what happened
    """No plan exists for the pair, or none that keeps within the limits."""


@final
class InvalidBlocks(TopologyError):  # noqa: N818 - the name says what happened
    """Block ids are out of range, written twice, or do not cover the tokens asked for."""


_LONGEST = 60
_FEW = 6


def shown(value: object) -> str:
    """Return a short text of any value, without building the long one."""
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _LONGEST else f"{value[:_LONGEST]!r}..."
    if value is None or isinstance(value, float):
        return repr(value)
    length = len(value) if isinstance(value, Sized) else None
    return f"a {type(value).__name__}" + (f" of {length} items" if length is not None else "")


def shown_ranks(ranks: Collection[object]) -> str:
    """Return the first few ranks of many."""
    few = ", ".join(str(rank) for _, rank in zip(range(_FEW), ranks, strict=False))
    return f"[{few}]" if len(ranks) <= _FEW else f"[{few}, ... {len(ranks)} in all]"


def demand(name: str, value: object, *wanted: type | str) -> None:
    """Raise `wrong-type` unless a caller's value is of one of these types, or one of these words; a bool is not an int."""
    kinds = tuple(each for each in wanted if isinstance(each, type))
    if isinstance(value, bool) or not (isinstance(value, kinds) or (isinstance(value, str) and value in wanted)):
        names = " or ".join(each.__name__ if isinstance(each, type) else repr(each) for each in wanted)
        raise InvalidGeometry("wrong-type", f"{name} must be {names}, not {shown(value)}.", {"name": name})
