"""Figures of the benchmark `connector`: where samples are taken, what they are compared with, and the bounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from _rows import row

Samples = Mapping[tuple[str, str, "Place"], list[float]]


TOKENS: Final = 1900
BLOCK_TOKENS: Final = 128
LEFT: Final = TOKENS - (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
"""Tokens that a prefill engine computes which holds all whole blocks but the last: 1900 - 14 x 128 = 108."""
ALONE: Final = "alone"
"""Name of the engine without a connector."""


class Place(NamedTuple):
    """Where a sample was taken.

    Attributes:
        transport: `default`, or `tcp` for `UCX_TLS=tcp`.
        chunk: Most tokens of a step.
        prefix: `new`, or `held`: the prefill engine's cache holds all but the last `LEFT` tokens.
    """

    transport: str
    chunk: int
    prefix: str = "new"

    def __str__(self) -> str:
        """Return it as names of rows have it."""
        held = f", all but {LEFT} held" if self.prefix == "held" else ""
        transports = "UCX_TLS=tcp" if self.transport == "tcp" else "default transports"
        return f"{TOKENS} tokens{held}, {transports}, steps of {self.chunk}"


class Target(NamedTuple):
    """A ratio of medians of `kind` and `other` with its bound, where `holds_for` the place."""

    measure: str
    kind: str
    other: str
    bound: str = "context"
    holds_for: Callable[[Place], bool] = lambda place: place.prefix == "new"


def _new_over(transport: str) -> Callable[[Place], bool]:
    return lambda place: place.prefix == "new" and place.transport == transport


TARGETS: Final = (
    # In steps of 112, 1900 tokens take 17 steps; in steps of 256 they take 8.
    Target(
        "early bytes", "streamed", "all bytes", ">= 0.85", lambda place: place.prefix == "new" and place.chunk == 112
    ),
    Target("hand-over", "ours", "vllm"),
    Target("hand-over", "streamed", "ours", "<= 0.5", _new_over("default")),
    Target("hand-over", "streamed", "ours", "<= 0.4", _new_over("tcp")),
    Target("hand-over", "streamed", "vllm", "<= 0.35", _new_over("default")),
    Target("saved", "streamed", "plain less floor", ">= 0.6"),
    Target("first token", "ours", "vllm"),
    Target("first token", "streamed", "ours", "<= 0.95", lambda place: place.prefix == "held"),
    Target("first token", "streamed", "vllm", "<= 0.8"),
    *(Target("worst gap", kind, "vllm", "<= 0.45") for kind in ("ours", "streamed")),
    *(Target("worst gap", kind, "usual gap", "<= 1.3") for kind in ("ours", "streamed")),
    *(Target("worker at rest", kind, "vllm", "<= 0.02") for kind in ("ours", "streamed")),
    *(Target("prefill throughput", kind, ALONE, ">= 0.95") for kind in ("ours", "streamed")),
)
UNITS: Final = {"early bytes": "% of the bytes", "worker at rest": "% of a core", "prefill throughput": "tokens/s"}
"""Units of measures that are not milliseconds."""


def rows_of(samples: Samples, *, needs_all: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a run; with `needs_all` a row that is not met for each bound that was not judged."""
    rows: list[dict[str, Any]] = []
    for target in TARGETS:
        name, unit = f"{target.measure}, {target.kind} beside {target.other}", UNITS.get(target.measure, "ms")
        count = len(rows)
        for place in sorted({place for _, _, place in samples if target.holds_for(place)}):
            mine, theirs = _compared(samples, target, place)
            if mine and theirs:
                ours, baseline = statistics.median(mine), statistics.median(theirs)
                found = row(f"{name}, {place}", unit, ours, baseline, target.bound)
                rows.append(found | {"samples": len(mine)})
        if needs_all and count == len(rows):
            rows.append(row(f"{name}: not measured", unit, 0.0, 1.0, target.bound, met=target.bound == "context"))
    return rows + _counted(samples)


def _compared(samples: Samples, target: Target, place: Place) -> tuple[list[float], list[float]]:
    """Return the samples of a target's kind and of what it is compared with; empty where nothing was measured."""
    if target.measure == "saved":
        return _saved(samples, place)
    mine = samples.get((target.measure, target.kind, place), [])
    if target.other == "all bytes":
        return mine, [100.0]
    if target.other == "usual gap":
        return mine, samples.get(("usual gap", target.kind, place), [])
    return mine, samples.get((target.measure, target.other, place), [])


def _saved(samples: Samples, place: Place) -> tuple[list[float], list[float]]:
    """Return the time that streaming saves until the first token, by rounds, and the most that it can.

    That is a plain hand-over less one decode step and the read of the last step's blocks. A plain hand-over of 181 ms, decode
    steps of 70 ms and a last read of 5 ms leave 106 ms. Prompts whose first token comes after 2075 ms, streamed, and after
    2150 ms, plain, save 75 ms of that: 0.708.
    """
    plain, streamed = (samples.get(("first token", kind, place), []) for kind in ("ours", "streamed"))
    floor = [samples.get((each, "ours", place), []) for each in ("hand-over", "decode step", "last read")]
    if not (plain and streamed and all(floor)):
        return [], []
    over, step, read = map(statistics.median, floor)
    return [early - late for early, late in zip(plain, streamed, strict=True)], [over - step - read]


def _counted(samples: Samples) -> list[dict[str, Any]]:
    """Return the sums of what must not be; vLLM's own connector may recompute."""
    rows: list[dict[str, Any]] = []
    for (measure, kind, place), taken in samples.items():
        if measure in {"wrong answers", "recomputed"}:
            is_judged = measure == "wrong answers" or kind != "vllm"
            is_met, target = sum(taken) == 0 or not is_judged, "0" if is_judged else "context"
            rows.append(row(f"{measure}, {kind}, {place}", "", sum(taken), len(taken), target, met=is_met))
    return rows
