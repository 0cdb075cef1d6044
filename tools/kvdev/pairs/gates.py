"""Bounds of ratios of medians: how a run of the benchmark is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvdev.pairs.kinds import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ALL_BYTES",
    "LESS_FLOOR",
    "PREFILL_GAP",
    "TARGETS",
    "USUAL_GAP",
    "Target",
    "Where",
    "target_for",
    "unjudged",
]

Where = tuple[tuple[str, object], ...]
"""Setting and case of a sample, as (name, value): `(("transport", "tcp"), ("chunk", 256))`."""
USUAL_GAP: Final = "usual gap"
PREFILL_GAP: Final = "gap beside a prefill"
ALL_BYTES: Final = "all bytes"
LESS_FLOOR: Final = "plain less floor"
"""The most that streaming can save: a plain hand-over, less one decode step and the read of the last step's blocks."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of a ratio of medians.

    Attributes:
        measure: The measure.
        one: The kind that is judged; empty for every kind but vLLM's own.
        other: The kind, or figure, that it is compared with.
        bound: The most that the ratio may be, or the least.
        where: Values of setting and case that it holds for; all others are free.
        is_least: Whether `bound` is the least.
    """

    measure: str
    one: str
    other: str
    bound: float
    where: Mapping[str, object] = field(default_factory=dict)
    is_least: bool = False

    def is_about(self, measure: str, one: str, other: str, where: Where) -> bool:
        """Whether it holds for a row."""
        is_pair = other == self.other and (one == self.one or (not self.one and one != "vllm"))
        return measure == self.measure and is_pair and all(dict(where).get(k) == v for k, v in self.where.items())

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio keeps to the bound."""
        return ratio >= self.bound if self.is_least else ratio <= self.bound

    def __str__(self) -> str:
        """Return the bound as tables have it."""
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"


_LONG: Final[Mapping[str, object]] = {"tokens": 1900, "at_once": 1, "prefix": "new"}
_HELD: Final[Mapping[str, object]] = {**_LONG, "prefix": "held"}
_MANY_STEPS: Final = 112
"""Most tokens of a step at which 1900 tokens take 17 steps; at 256 they take 8."""
TARGETS: Final = (
    Target("early bytes", "streamed", ALL_BYTES, 0.85, {**_LONG, "chunk": _MANY_STEPS}, is_least=True),
    Target("hand-over", "streamed", "ours", 0.5, {**_LONG, "transport": "default"}),
    Target("hand-over", "streamed", "ours", 0.4, {**_LONG, "transport": "tcp"}),
    Target("hand-over", "streamed", "vllm", 0.35, {**_LONG, "transport": "default"}),
    Target("saved", "streamed", LESS_FLOOR, 0.6, _LONG, is_least=True),
    Target("first token", "streamed", "ours", 0.95, _HELD),
    Target("first token", "streamed", "vllm", 0.8, _LONG),
    Target("worst gap", "", "vllm", 0.45),
    Target("worst gap", "", USUAL_GAP, 1.3),
    Target("worker at rest", "", "vllm", 0.02),
    Target("prefill throughput", "", ALONE, 0.95, is_least=True),
)


def target_for(measure: str, one: str, other: str, where: Where) -> Target | None:
    """Return the bound of a row; None for a row that is context."""
    return next((target for target in TARGETS if target.is_about(measure, one, other, where)), None)


def unjudged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row that is not met for each bound that no row of a run was judged by: what was not measured is not shown."""
    judged = [
        target_for(row["measure"], row["kind"], row["beside"], tuple(row["where"].items()))
        for row in rows
        if row["target"] != "context"
    ]
    return [
        {
            "name": f"{target.measure}, {target.one or 'ours'} than {target.other}, {_words(target.where)}: not measured",
            "unit": "",
            "ours": 0.0,
            "baseline": 0.0,
            "ratio": 0.0,
            "target": str(target),
            "met": False,
            "measure": target.measure,
            "kind": target.one or "ours",
            "beside": target.other,
            "where": {},
            "samples": 0,
        }
        for target in TARGETS
        if target not in judged
    ]


def _words(where: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in where.items()) or "anywhere"
