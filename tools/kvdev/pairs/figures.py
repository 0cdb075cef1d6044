"""Samples of a run, their medians and quartiles, and the rows that compare kinds of pairs and judge them by bounds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from kvdev.pairs.plan import ALONE, comparisons, left_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdev.pairs.plan import Case, Setting

__all__ = [
    "MEASURES",
    "TARGETS",
    "Book",
    "Target",
    "described",
    "rows_of",
    "spread_of",
    "target_for",
    "unjudged",
    "where_of",
]

Where = tuple[tuple[str, object], ...]
"""Setting and case of a sample, as (name, value): `(("transport", "tcp"), ("chunk", 256))`."""
MEASURES: Final[Mapping[str, str]] = {
    "hand-over": "ms",
    "first token": "ms",
    "early bytes": "% of the bytes",
    "decode step": "ms",
    "last read": "ms",
    "worst gap": "ms",
    "usual gap": "ms",
    "gap beside a prefill": "ms",
    "worker at rest": "% of a core",
    "prefill throughput": "tokens/s",
    "wrong answers": "answers",
    "recomputed": "tokens",
}
"""Measure -> unit."""
_BESIDE_ALONE: Final = ("prefill throughput", "worker at rest")
"""Measures that an engine without a connector has, too."""
_BESIDE_GAPS: Final = ("usual gap", "gap beside a prefill")
_COUNTED: Final = ("wrong answers", "recomputed")
"""Measures whose samples are added up, and whose sum must be 0."""
_ALL_BYTES: Final = "all bytes"
_LESS_FLOOR: Final = "plain less floor"
"""The most that streaming can save: a plain hand-over, less one decode step and the read of the last step's blocks."""
_BEYOND: Final = 1e6
"""Ratio to a figure of 0, which keeps to no upper bound."""


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


_LONG: Final[Mapping[str, object]] = {"tokens": 1900, "prefix": "new"}
_HELD: Final[Mapping[str, object]] = {"tokens": 1900, "prefix": "held"}
_MANY_STEPS: Final = 112
"""Most tokens of a step at which 1900 tokens take 17 steps; at 256 they take 8."""
TARGETS: Final = (
    Target("early bytes", "streamed", _ALL_BYTES, 0.85, {**_LONG, "chunk": _MANY_STEPS}, is_least=True),
    Target("hand-over", "streamed", "ours", 0.5, {**_LONG, "transport": "default"}),
    Target("hand-over", "streamed", "ours", 0.4, {**_LONG, "transport": "tcp"}),
    Target("hand-over", "streamed", "vllm", 0.35, {**_LONG, "transport": "default"}),
    Target("saved", "streamed", _LESS_FLOOR, 0.6, _LONG, is_least=True),
    Target("first token", "streamed", "ours", 0.95, _HELD),
    Target("first token", "streamed", "vllm", 0.8, _LONG),
    Target("worst gap", "", "vllm", 0.45),
    Target("worst gap", "", "usual gap", 1.3),
    Target("worker at rest", "", "vllm", 0.02),
    Target("prefill throughput", "", ALONE, 0.95, is_least=True),
)


def target_for(measure: str, one: str, other: str, where: Where) -> Target | None:
    """Return the bound of a row; None for a row that is context."""
    return next((target for target in TARGETS if target.is_about(measure, one, other, where)), None)


@final
class Book:
    """Samples by measure, kind, setting and case."""

    def __init__(self) -> None:
        self._samples: defaultdict[tuple[str, str, Where], list[float]] = defaultdict(list)

    def add(self, measure: str, kind: str, setting: Setting, case: Case | None, *values: float) -> None:
        """Note samples."""
        if measure not in MEASURES:
            raise KeyError(measure)
        self._samples[measure, kind, where_of(setting, case)].extend(values)

    def samples(self, measure: str, kind: str, where: Where) -> list[float]:
        """Return the samples of a kind; empty if there are none."""
        return self._samples.get((measure, kind, where), [])

    def places(self, measure: str) -> list[Where]:
        """Return where a measure was taken, in the order of the first sample."""
        return list(dict.fromkeys(where for name, _, where in self._samples if name == measure))


def where_of(setting: Setting, case: Case | None) -> Where:
    """Return a setting and a case as names and values."""
    first = (("transport", setting.transport), ("chunk", setting.chunk))
    return first if case is None else (*first, ("tokens", case.tokens), ("prefix", case.prefix))


def spread_of(samples: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles: of 1, 2, 3, 4 and 5 they are 2 and 4; of one sample it is both."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def described(where: Mapping[str, Any]) -> str:
    """Return a setting and a case in words."""
    words = [f"{where['tokens']} tokens"] if "tokens" in where else []
    if where.get("prefix") == "held":
        words.append(f"all but {left_tokens(where['tokens'])} held")
    transport = "UCX_TLS=tcp" if where["transport"] == "tcp" else "default transports"
    return ", ".join([*words, transport, f"steps of {where['chunk']}"])


def rows_of(book: Book, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a run: kinds compared, and beside them what needs no other kind."""
    rows: list[dict[str, Any]] = []
    for measure in MEASURES:
        for where in book.places(measure):
            if measure in _COUNTED:
                rows += [_counted(book, measure, kind, where) for kind in kinds if book.samples(measure, kind, where)]
            elif measure == "early bytes":
                rows += [
                    _row(measure, (kind, _ALL_BYTES), where, samples, [100.0])
                    for kind in kinds
                    if (samples := book.samples(measure, kind, where))
                ]
            else:
                rows += _compared(book, measure, kinds, where)
            if measure == "last read" and "streamed" in kinds:
                rows += _saved(book, where)
    return rows


def unjudged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row that is not met for each bound that no row of a run was judged by: what was not measured is not shown."""
    judged = [
        target_for(row["measure"], row["kind"], row["beside"], tuple(row["where"].items()))
        for row in rows
        if row["target"] != "context"
    ]
    missing: list[dict[str, Any]] = []
    for target in TARGETS:
        if target not in judged:
            kind, words = target.one or "ours", ", ".join(f"{name} {value}" for name, value in target.where.items())
            name = f"{target.measure}, {kind} than {target.other}, {words or 'anywhere'}: not measured"
            judgement = {"target": str(target), "met": False}
            row = {"name": name, "unit": "", "ours": 0.0, "baseline": 0.0, "ratio": 0.0, **judgement, "samples": 0}
            missing.append({**row, "measure": target.measure, "kind": kind, "beside": target.other, "where": {}})
    return missing


def _compared(book: Book, measure: str, kinds: Sequence[str], where: Where) -> list[dict[str, Any]]:
    sides = [(one, other, measure) for one, other in comparisons(kinds)]
    sides += [(one, ALONE, measure) for one in kinds if measure in _BESIDE_ALONE]
    sides += [(one, one, other) for one in kinds for other in _BESIDE_GAPS if measure == "worst gap"]
    rows: list[dict[str, Any]] = []
    for one, other, other_measure in sides:
        mine, theirs = book.samples(measure, one, where), book.samples(other_measure, other, where)
        if mine and theirs:
            beside = other if other_measure == measure else other_measure
            rows.append(_row(measure, (one, beside), where, mine, theirs))
    return rows


def _saved(book: Book, where: Where) -> list[dict[str, Any]]:
    """Return the row of the time that streaming saves until the first token, beside the most that it can.

    What is saved is the median of the differences of each round, whose two prefills have the same neighbours. A plain hand-over
    of 181 ms, decode steps of 70 ms and a last read of 5 ms leave 106 ms. Prompts whose first token comes after 2075 ms,
    streamed, and after 2150 ms, plain, save 75 ms of that: 0.708.
    """
    plain, streamed = (book.samples("first token", kind, where) for kind in ("ours", "streamed"))
    overs, steps, reads = (book.samples(each, "ours", where) for each in ("hand-over", "decode step", "last read"))
    if not (plain and streamed and overs and steps and reads):
        return []
    saved = [plain_ms - streamed_ms for plain_ms, streamed_ms in zip(plain, streamed, strict=True)]
    most_ms = statistics.median(overs) - statistics.median(steps) - statistics.median(reads)
    return [_row("saved", ("streamed", _LESS_FLOOR), where, saved, [most_ms])]


def _row(
    measure: str, pair: tuple[str, str], where: Where, mine: Sequence[float], theirs: Sequence[float]
) -> dict[str, Any]:
    (one, beside), ours, baseline = pair, statistics.median(mine), statistics.median(theirs)
    ratio = ours / baseline if baseline else _BEYOND * (ours > 0)
    target = target_for(measure, one, beside, where)
    return {
        "name": f"{measure}, {one} beside {beside}, {described(dict(where))}",
        "unit": MEASURES.get(measure, "ms"),
        "ours": round(ours, 3),
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 3),
        "target": str(target) if target else "context",
        "met": target is None or target.is_met(ratio),
        "measure": measure,
        "kind": one,
        "beside": beside,
        "where": dict(where),
        "spread": [round(value, 3) for value in (*spread_of(mine), *spread_of(theirs))],
        "samples": len(mine),
    }


def _counted(book: Book, measure: str, kind: str, where: Where) -> dict[str, Any]:
    samples = book.samples(measure, kind, where)
    is_judged = measure == "wrong answers" or kind != "vllm"
    return {
        "name": f"{measure}, {kind}, {described(dict(where))}",
        "unit": MEASURES[measure],
        "ours": sum(samples),
        "baseline": len(samples),
        "ratio": round(sum(samples) / len(samples), 3),
        "target": "0" if is_judged else "context",
        "met": sum(samples) == 0 or not is_judged,
        "measure": measure,
        "kind": kind,
        "beside": "samples",
        "where": dict(where),
        "samples": len(samples),
    }
