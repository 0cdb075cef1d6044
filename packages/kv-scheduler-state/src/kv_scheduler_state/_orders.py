"""The producer's part of a step plan as workers read it, structurally: any object with these members will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FenceWord", "Grant", "ProducerOrders"]


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
