"""A series of kills under load, and its report."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from live import FAILS, LEASE_S, Live
from load import Asked, Load, running_load
from recorder import Sample, sample_of
from verdicts import judge_all, percentile, slow_ends

from kvdev.engines import metric_sum
from kvdev.paths import STATE
from kvdev.steps import note

__all__ = ["REPORTS", "Series", "SeriesReport", "kill_under_load", "write_report"]

REPORTS = STATE / "reports" / "chaos"
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
_LONG_READS = 4
_AFTER_RESTART_S = 2.0


@dataclass(frozen=True, slots=True)
class Series:
    """Parameters of a series of kills."""

    label: str
    transport: str
    victims: Sequence[str]
    """Engines that are killed by turns."""
    kills: int
    seed: int


@final
@dataclass(frozen=True, slots=True)
class SeriesReport:
    """Figures of a series."""

    label: str
    transport: str
    victims: Sequence[str]
    kills: int
    seed: int
    seconds: float
    requests: int
    verdicts: dict[str, int]
    healthy_pairs: dict[str, float]
    """Requests that needed no engine that was out: their number, how many were right, seconds (median, 99 of 100)."""
    handed_over: int
    """Reads that decode engines which were never killed have counted."""
    deaths_of_survivors: list[str]
    restart_s: float
    stranded: dict[str, str]
    survivors: dict[str, dict[str, list[float]]]
    """Engine -> level -> [before, after], both at rest."""
    bad: list[str]


def kill_under_load(live: Live, series: Series) -> SeriesReport:
    """Kill the victims by turns, with reads of theirs under way, and start each anew; return the figures."""
    draw = random.Random(series.seed)
    survivors = [name for name in live.engines if name not in series.victims]
    _warm_up(live)
    left = live.stranded()
    assert not left, f"held before the first kill: {left}"
    before = {name: sample_of(live.engines[name].pid, 0) for name in survivors}
    reads = _reads(live, survivors)
    deaths: list[str] = []
    began_s = time.monotonic()
    with running_load(live.load(series.seed, workers=3, pause_s=0.15)) as load:
        for number in range(series.kills):
            victim = series.victims[number % len(series.victims)]
            time.sleep(draw.uniform(1.0, 2.0))
            _strike(live, load, victim, draw)
            deaths += _start_again(live, victim, number)
            time.sleep(_AFTER_RESTART_S)
            deaths += _revive(live, number)
    seconds = time.monotonic() - began_s
    left = live.stranded()
    after = {name: sample_of(live.engines[name].pid, 0) for name in survivors}
    counts, bad = judge_all(load.asked, live.outages, FAILS)
    return SeriesReport(
        **{name: getattr(series, name) for name in ("label", "transport", "victims", "kills", "seed")},
        seconds=round(seconds, 1),
        requests=len(load.asked),
        verdicts={str(verdict): count for verdict, count in counts.items()},
        healthy_pairs=_healthy_pairs(live, load.asked),
        handed_over=round(_reads(live, survivors) - reads) if not deaths else -1,
        deaths_of_survivors=deaths,
        restart_s=round(statistics.median(live.restarts_s), 1),
        stranded=left,
        survivors={name: _levels(before[name], after[name]) for name in survivors},
        bad=[repr(each)[:600] for each in bad[:5]],
    )


def _warm_up(live: Live) -> None:
    """Let each pair meet, and every path run once: memory that is taken once is no growth."""
    with running_load(live.load(1, workers=2, pause_s=0.01)) as load:
        until = time.monotonic() + 60
        while time.monotonic() < until and len(load.asked) < 3 * len(live.prompts):
            time.sleep(0.2)
    met = {(each.pair.prefill, each.pair.decode) for each in load.asked if each.end == "text"}
    assert len(met) == len(live.pairs()), f"only {met} have met: {load.asked[:3]}"


def _strike(live: Live, load: Load, victim: str, draw: random.Random) -> None:
    """Kill the victim while long reads from it, or of it, are on the wire."""
    pairs = live.pairs(*_sides(victim))
    long = [prompt for prompt in live.prompts if len(prompt.text) > 800]
    load.aim(pairs, draw.sample(long, _LONG_READS), lambda: live.kill(victim), draw.uniform(0.0, 0.05))


def _sides(victim: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if victim.startswith("prefill"):
        return (victim,), ("decode-0", "decode-1")
    return ("prefill-0", "prefill-1"), (victim,)


def _start_again(live: Live, victim: str, number: int) -> list[str]:
    live.begin_again(victim)
    deaths = _revive(live, number)
    live.wait_serving(victim)
    note(f"  ok  kill {number + 1}: {victim} is back after {live.restarts_s[-1]:.1f} s")
    return deaths


def _revive(live: Live, number: int) -> list[str]:
    """Start engines anew that died though nobody killed them; return a line for each."""
    deaths: list[str] = []
    for name in live.dead():
        deaths.append(f"kill {number + 1}: {name} died\n{live.engines[name].last_words(6)}")
        note(f"  --  {name} died with its peer")
        last_kill_s = max(began_s for spans in live.outages.spans.values() for began_s, _ in spans)
        live.outages.begin(name, last_kill_s)
        live.begin_again(name)
        live.wait_serving(name)
    return deaths


def _healthy_pairs(live: Live, asked: Sequence[Asked]) -> dict[str, float]:
    """Return figures of the requests none of whose engines was out, while another one was."""
    others = [
        each
        for each in asked
        if any(live.outages.is_out(name, each.started_s, each.ended_s) for name in live.engines)
        and not any(live.outages.is_out(n, each.started_s, each.ended_s) for n in (each.pair.prefill, each.pair.decode))
    ]
    took_s = slow_ends(others, lambda _: True)
    return {
        "requests": len(others),
        "right": sum(each.end == "text" and each.text == each.prompt.answer for each in others),
        "median_s": round(percentile(took_s, 0.5), 3),
        "p99_s": round(percentile(took_s, 0.99), 3),
    }


def _reads(live: Live, survivors: Sequence[str]) -> float:
    return sum(metric_sum(live.engines[name].metrics(), TRANSFERS) for name in survivors)


def _levels(before: Sample, after: Sample) -> dict[str, list[float]]:
    names = ("resident_mb", "descriptors", "sockets", "threads")
    return {name: [round(getattr(before, name), 1), round(getattr(after, name), 1)] for name in names}


def write_report(name: str, report: Any) -> Path:
    """Write a report as JSON below `.dev/reports/chaos` and return the file."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    file = REPORTS / f"{name}.json"
    file.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return file


TWO_LEASES_S = 2 * LEASE_S
