"""Judge a run: each request by its text and its excuse, each surviving engine by what it holds and how much it grew."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from load import Asked

Verdict = Literal["right", "left", "clean error", "wrong text", "without excuse", "hung"]
BAD: tuple[Verdict, ...] = ("wrong text", "without excuse", "hung")


@final
@dataclass
class Outages:
    """Spans in which an engine could not serve, by the clock of this process; an end of infinity is one that goes on."""

    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def begin(self, engine: str, now_s: float) -> None:
        """Note that the engine is out from now on."""
        if not self.is_out(engine, now_s, now_s):
            self.spans.setdefault(engine, []).append((now_s, math.inf))

    def end(self, engine: str, now_s: float) -> None:
        """Note that the engine serves again."""
        began_s, _ = self.spans[engine].pop()
        self.spans[engine].append((began_s, now_s))

    def is_out(self, engine: str, from_s: float, to_s: float) -> bool:
        """Whether an outage of the engine overlaps the span.

        Example: out from 10 to 12; a request from 11.9 to 13 overlaps it, one from 12.1 to 13 did not.
        """
        return any(began_s <= to_s and from_s <= ended_s for began_s, ended_s in self.spans.get(engine, ()))


def judge(asked: Asked, outages: Outages, fails: Mapping[str, bool] | None = None) -> Verdict:
    """Return the verdict on one request.

    Args:
        asked: The request as it ended.
        outages: When which engine was out.
        fails: Decode engine -> whether its policy is to fail a request whose KV is lost; absent ones compute the prompt.

    An error is clean when it came in the API's form, or as a connection of an engine that was killed, and an engine that the
    request needed was out meanwhile. A decode engine that computes lost prompts needs no prefill engine once it has the request.
    """
    right = asked.prompt.answer
    if asked.end == "text":
        return "right" if asked.is_right else "wrong text"
    # Text that came before a connection broke is part of the answer, too.
    if not right.startswith(asked.text):
        return "wrong text"
    if asked.end in {"left", "hung"}:
        return "left" if asked.end == "left" else "hung"
    span = (asked.started_s, asked.ended_s)
    own = asked.pair.prefill if asked.step == "prefill" else asked.pair.decode
    if outages.is_out(own, *span):
        return "clean error"
    is_excused = asked.step == "decode" and (fails or {}).get(own, False) and outages.is_out(asked.pair.prefill, *span)
    return "clean error" if is_excused and asked.end == "error" else "without excuse"


def judge_all(
    asked: Sequence[Asked], outages: Outages, fails: Mapping[str, bool] | None = None
) -> tuple[Counter[Verdict], list[Asked]]:
    """Return how many requests got which verdict, and those that must not be."""
    verdicts = [(judge(each, outages, fails), each) for each in asked]
    counts: Counter[Verdict] = Counter()
    for verdict, _ in verdicts:
        counts[verdict] += 1
    return counts, [each for verdict, each in verdicts if verdict in BAD]


def growth(series: Sequence[float], *, warm_up_share: float = 0.2) -> float:
    """Return how much a level grew: the median of the last half less that of the first half, after a warm-up.

    Example: 10 samples 9, 9, 1, 1, 1, 1, 3, 3, 3, 3: without the first two, halves of 1 and of 3, so it grew by 2.
    A single spike does not count; a leak of x per sample counts as about x times half of the samples.
    """
    kept = series[int(len(series) * warm_up_share) :]
    if len(kept) < 4:
        raise ValueError(f"{len(series)} samples tell nothing of growth")
    middle = len(kept) // 2
    return statistics.median(kept[middle:]) - statistics.median(kept[:middle])


GROWTH_BOUNDS: Mapping[str, tuple[float, float]] = {
    "resident_mb": (16.0, 0.03),
    "descriptors": (6.0, 0.05),
    "sockets": (6.0, 0.05),
    "threads": (4.0, 0.05),
}
"""Level -> growth that is still flat: as a number, or as a share of the median, whichever is more."""


def too_large(name: str, series: Sequence[float]) -> str:
    """Return a sentence when a level grew by more than its bound, else an empty text."""
    most, share = GROWTH_BOUNDS[name]
    bound = max(most, share * statistics.median(series))
    grew = growth(series)
    return f"{name} grew by {grew:.1f}, bound {bound:.1f}" if grew > bound else ""
