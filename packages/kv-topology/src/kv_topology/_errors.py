"""The package's exceptions: one base, four kinds, all with a stable code."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Fault", "GeometryMismatch", "InvalidBlocks", "InvalidGeometry", "TopologyError", "UnsupportedTopology"]

Fault = Literal["local", "peer", "environment"]


class TopologyError(Exception):
    """Base of every exception that this package raises on purpose.

    Attributes:
        code: Stable kebab-case reason, listed in the README.
        fault: Side whose data was wrong.
        is_retry_safe: Whether the same call can succeed later without a change; geometry never does.
        context: The values that the sentence names.
    """

    def __init__(
        self, message: str, *, code: str, fault: Fault = "local", context: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.fault: Fault = fault
        self.is_retry_safe: bool | None = False
        self.context: Mapping[str, object] = MappingProxyType(dict(context or {}))

    def blamed_on(self, fault: Fault, **context: object) -> TopologyError:
        """Return the same error with another fault and more context: the one place where errors are re-labelled."""
        message = str(self)
        return type(self)(message, code=self.code, fault=fault, context={**self.context, **context})


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
