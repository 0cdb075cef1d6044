"""Answers of a real Prometheus to every expression of the dashboard: recorded once, drawn many times."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdev.dashboard import DASHBOARD
from kvdev.expressions import plain
from kvdev.prometheus import query_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Curve", "Phase", "Recording", "dashboard_panels", "read_recording", "record", "write_recording"]

_DIGITS: Final = 4
_MOST_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class Curve:
    """Series of one answer: its labels, and a value for each step, None where there was none."""

    labels: Mapping[str, str]
    values: tuple[float | None, ...]

    @property
    def last(self) -> float | None:
        """The last value that there was."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a recorded run: its beginning and end in seconds, and a sentence about its load."""

    from_s: float
    to_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Recording:
    """Run as the dashboard shows it.

    Attributes:
        about: Sentence on the engines and the machine.
        span_s: Length.
        step_s: Time between two values of a curve; value n is that of n * step_s.
        phases: Loads, in order.
        answers: Curves by expression, as the dashboard spells it.
    """

    about: str
    span_s: float
    step_s: float
    phases: tuple[Phase, ...]
    answers: Mapping[str, tuple[Curve, ...]]


def dashboard_panels() -> list[dict[str, Any]]:
    """Return the panels and row headings of the dashboard's file, from top to bottom."""
    return list(json.loads(DASHBOARD.read_text())["panels"])


def record(url: str, begin_s: float, span_s: float, *, about: str, phases: Sequence[Phase] = ()) -> Recording:
    """Ask a Prometheus for everything that the dashboard draws of a span.

    A stat or a table shows one moment, so of those the last value alone is asked for.

    Args:
        url: The server.
        begin_s: Beginning of the span, Unix time.
        span_s: Its length.
        about: Sentence on the engines and the machine.
        phases: Loads of the run.
    """
    step_s = float(max(1, math.ceil(span_s / _MOST_STEPS)))
    answers: dict[str, tuple[Curve, ...]] = {}
    for panel in dashboard_panels():
        for target in panel.get("targets", ()):
            begin = begin_s if target.get("range") else begin_s + span_s
            asked = plain(target["expr"], rate="15s", span=f"{math.ceil(span_s)}s")
            found = query_range(url, asked, begin, begin_s + span_s, step_s)
            answers[target["expr"]] = tuple(_curve(each, begin, begin_s + span_s, step_s) for each in found)
    return Recording(about, span_s, step_s, tuple(phases), answers)


def _curve(answer: Mapping[str, Any], begin_s: float, end_s: float, step_s: float) -> Curve:
    """Return an answer's samples by step: with a step of 2 s, a sample at begin_s + 6 becomes value 3."""
    values: list[float | None] = [None] * (math.floor((end_s - begin_s) / step_s) + 1)
    for moment, text in answer["values"]:
        value = float(text)
        if math.isfinite(value):  # a quantile of nothing is no number
            values[round((moment - begin_s) / step_s)] = float(f"{value:.{_DIGITS}g}")
    return Curve({name: str(value) for name, value in answer["metric"].items()}, tuple(values))


def write_recording(recording: Recording, file: Path) -> None:
    """Write a recording as JSON, one curve a line, so that a change can be read."""
    head = {key: value for key, value in asdict(recording).items() if key != "answers"}
    blocks = []
    for expression, curves in recording.answers.items():
        lines = ",\n".join(f"  {json.dumps(asdict(curve), separators=(',', ':'))}" for curve in curves)
        blocks.append(f" {json.dumps(expression)}: [\n{lines}\n ]" if curves else f" {json.dumps(expression)}: []")
    file.write_text(json.dumps(head)[:-1] + ', "answers": {\n' + ",\n".join(blocks) + "\n}}\n")


def read_recording(file: Path) -> Recording:
    """Return what `write_recording` wrote."""
    told = json.loads(file.read_text())
    answers = {
        expression: tuple(Curve(each["labels"], tuple(each["values"])) for each in curves)
        for expression, curves in told["answers"].items()
    }
    phases = tuple(Phase(**each) for each in told["phases"])
    return Recording(told["about"], told["span_s"], told["step_s"], phases, answers)
