"""Protocols for examining engines from outside, as the pre-flight check does: comparisons and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Comparison", "Difference", "PlanEstimate"]


class Difference(Protocol):
    """A factor whose values differ."""

    @property
    def name(self) -> str: ...
    @property
    def local(self) -> object:
        """The consumer's value; None if it has none."""
        ...

    @property
    def peer(self) -> object: ...
    @property
    def group(self) -> str:
        """`must-match`, `may-differ` or `informative`."""
        ...


class Comparison(Protocol):
    """All known differences between two engines."""

    @property
    def differences(self) -> Sequence[Difference]: ...
    @property
    def suspects(self) -> Sequence[str]:
        """Factors that probably differ, where one side sends only its hash and no known value explains the difference."""
        ...

    @property
    def is_same_hash(self) -> bool: ...


class PlanEstimate(Protocol):
    """Sizes and times of a plan, for a prompt of 1024 tokens and the prices of the planner."""

    @property
    def bytes_per_token(self) -> float: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def direct_us(self) -> float: ...
    @property
    def staged_us(self) -> float | None: ...
    @property
    def is_staged_cheaper(self) -> bool: ...
