"""Rows of a benchmark's report, and CPU time of calls taken in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def row(
    name: str,
    unit: str,
    ours: float,
    baseline: float,
    target: str = "context",
    *,
    met: bool | None = None,
    ratio: float = 0.0,
) -> dict[str, object]:
    """Return one figure as `dev.py bench` shows it; the ratio is ours over the baseline unless it is given.

    Targets such as "<= 1.5" and ">= 0.7" are bounds of the ratio; any other comes with its verdict `met`, or is context.
    """
    ratio = ratio or (ours / baseline if baseline else 1e6 if ours else 1.0)  # beside 0 no upper bound is kept
    if met is None:
        sign, _, bound = target.partition(" ")
        met = {"<=": ratio <= float(bound or 0), ">=": ratio >= float(bound or 0)}.get(sign, True)
    figures = {"ours": ours, "baseline": baseline, "ratio": round(ratio, 3)}
    return {"name": name, "unit": unit, **figures, "target": target, "met": met}


def by_turns(
    rounds: int,
    *calls: Callable[[], object],
    repeat: int = 1,
    clock: Callable[[], float] = time.thread_time,
    pause_s: float = 0.0,
) -> list[float]:
    """Return the median CPU time of each call in microseconds, taken in turns, with the garbage collector off as in `timeit`."""
    samples: list[list[float]] = [[] for _ in calls]
    gc.disable()
    try:
        for _ in range(rounds):
            for times, call in zip(samples, calls, strict=True):
                time.sleep(pause_s)
                begin = clock()
                for _ in range(repeat):
                    call()
                times.append((clock() - begin) / repeat)
    finally:
        gc.enable()
    return [1e6 * statistics.median(times) for times in samples]
