"""Samples of a run, their medians and quartiles, and the rows that compare one kind of pair with another."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, final

from kvdev.pairs.gates import ALL_BYTES, LESS_FLOOR, PREFILL_GAP, USUAL_GAP, target_for
from kvdev.pairs.kinds import ALONE, comparisons
from kvdev.pairs.plan import left_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdev.pairs.gates import Where
    from kvdev.pairs.plan import Case, Setting

__all__ = ["MEASURES", "Book", "described", "rows_of", "spread_of", "where_of"]

MEASURES: Final[Mapping[str, str]] = {
    "first contact": "ms",
    "hand-over": "ms",
    "first token": "ms",
    "early bytes": "% of the bytes",
    "decode step": "ms",
    "last read": "ms",
    "worst gap": "ms",
    "usual gap": "ms",
    "gap beside a prefill": "ms",
    "blocks held": "ms",
    "worker at rest": "% of a core",
    "prefill throughput": "tokens/s",
    "wrong answers": "answers",
    "recomputed": "tokens",
}
"""Measure -> unit."""
_BESIDE_ALONE: Final = ("prefill throughput", "worker at rest")
"""Measures that an engine without a connector has, too."""
_COUNTED: Final = ("wrong answers", "recomputed")
"""Measures whose samples are added up, and whose sum must be 0."""
_BEYOND: Final = 1e6
"""Ratio to a figure of 0, which keeps to no upper bound."""


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
    if case is None:
        return first
    return (*first, *((name, getattr(case, name)) for name in ("tokens", "at_once", "pool", "prefix")))


def spread_of(samples: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles: of 1, 2, 3, 4 and 5 they are 2 and 4; of one sample it is both."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def described(where: Mapping[str, Any]) -> str:
    """Return a setting and a case in words."""
    words: list[str] = []
    if "tokens" in where:
        words = [f"{where['tokens']} tokens", f"{where['at_once']} at once", f"{where['pool']} pool"]
        words += [f"all but {left_tokens(where['tokens'])} held"] if where["prefix"] == "held" else []
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
                rows += [_early(book, kind, where) for kind in kinds if book.samples(measure, kind, where)]
            else:
                rows += _compared_all(book, measure, kinds, where)
            if measure == "last read" and "streamed" in kinds:
                rows += _saved(book, where)
    return rows


def _compared_all(book: Book, measure: str, kinds: Sequence[str], where: Where) -> list[dict[str, Any]]:
    sides = [(one, other, measure) for one, other in comparisons(kinds)]
    sides += [(one, ALONE, measure) for one in kinds if measure in _BESIDE_ALONE]
    sides += [(one, one, other) for one in kinds for other in (USUAL_GAP, PREFILL_GAP) if measure == "worst gap"]
    return [row for side in sides if (row := _compared(book, measure, side, where)) is not None]


def _compared(book: Book, measure: str, side: tuple[str, str, str], where: Where) -> dict[str, Any] | None:
    one, other, other_measure = side
    mine, theirs = book.samples(measure, one, where), book.samples(other_measure, other, where)
    if not mine or not theirs:
        return None
    beside = other if other_measure == measure else other_measure
    row = _row(measure, MEASURES[measure], (one, beside), where, (statistics.median(mine), statistics.median(theirs)))
    row["spread"] = [round(value, 3) for value in (*spread_of(mine), *spread_of(theirs))]
    row["samples"] = len(mine)
    return row


def _early(book: Book, kind: str, where: Where) -> dict[str, Any]:
    samples = book.samples("early bytes", kind, where)
    row = _row("early bytes", MEASURES["early bytes"], (kind, ALL_BYTES), where, (statistics.median(samples), 100.0))
    row["spread"] = [*(round(value, 3) for value in spread_of(samples)), 100.0, 100.0]
    row["samples"] = len(samples)
    return row


def _saved(book: Book, where: Where) -> list[dict[str, Any]]:
    """Return the row of the time that streaming saves until the first token, beside the most that it can.

    What is saved is the median of the differences of each round, whose two prefills have the same neighbours. A plain hand-over
    of 181 ms, decode steps of 70 ms and a last read of 5 ms leave 106 ms. Prompts whose first token comes after 2075 ms,
    streamed, and after 2150 ms, plain, save 75 ms of that: 0.708.
    """
    first, streamed = (book.samples("first token", kind, where) for kind in ("ours", "streamed"))
    taken = [
        first,
        streamed,
        *(book.samples(each, "ours", where) for each in ("hand-over", "decode step", "last read")),
    ]
    if not all(taken):
        return []
    saved = [plain_ms - streamed_ms for plain_ms, streamed_ms in zip(first, streamed, strict=True)]
    hand_over_ms, step_ms, read_ms = map(statistics.median, taken[2:])
    most_ms = hand_over_ms - step_ms - read_ms
    row = _row("saved", "ms", ("streamed", LESS_FLOOR), where, (statistics.median(saved), most_ms))
    row["spread"] = [round(value, 3) for value in (*spread_of(saved), most_ms, most_ms)]
    row["samples"] = len(saved)
    return [row]


def _row(measure: str, unit: str, pair: tuple[str, str], where: Where, medians: tuple[float, float]) -> dict[str, Any]:
    (one, beside), (ours, baseline) = pair, medians
    ratio = ours / baseline if baseline else _BEYOND * (ours > 0)
    target = target_for(measure, one, beside, where)
    return {
        "name": f"{measure}, {one} beside {beside}, {described(dict(where))}",
        "unit": unit,
        "ours": round(ours, 3),
        "baseline": round(baseline, 3),
        "ratio": round(ratio, 3),
        "target": str(target) if target else "context",
        "met": target is None or target.is_met(ratio),
        "measure": measure,
        "kind": one,
        "beside": beside,
        "where": dict(where),
    }


def _counted(book: Book, measure: str, kind: str, where: Where) -> dict[str, Any]:
    samples = book.samples(measure, kind, where)
    total = sum(samples)
    is_judged = measure == "wrong answers" or kind != "vllm"
    return {
        "name": f"{measure}, {kind}, {described(dict(where))}",
        "unit": MEASURES[measure],
        "ours": total,
        "baseline": len(samples),
        "ratio": round(total / len(samples), 3),
        "target": "0" if is_judged else "context",
        "met": total == 0 or not is_judged,
        "measure": measure,
        "kind": kind,
        "beside": "samples",
        "where": dict(where),
        "samples": len(samples),
    }
