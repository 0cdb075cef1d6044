"""A soak: requests at a steady rate for a long time, clients that leave, and faults; levels are drawn and judged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from live import FAILS, Live
from load import running_load
from recorder import Recorder
from verdicts import GROWTH_BOUNDS, growth, judge_all, percentile, slow_ends, too_large

from kvdev.steps import note

__all__ = ["SURVIVORS", "Soak", "SoakReport", "soak"]

SURVIVORS = ("prefill-0", "decode-0")
"""Engines that no fault touches: their levels must be flat."""
_FAULT_EVERY_S = 45.0
_STOPPED_S = (1.0, 6.0)


@dataclass(frozen=True, slots=True)
class Soak:
    """Parameters of a soak."""

    requests: int
    seconds: float
    """It goes on until both are reached."""
    seed: int
    leave_share: float = 0.05


@final
@dataclass(frozen=True, slots=True)
class SoakReport:
    """Figures of a soak."""

    seconds: float
    seed: int
    requests: int
    verdicts: dict[str, int]
    faults: dict[str, int]
    handed_over_s: dict[str, float]
    levels: dict[str, dict[str, dict[str, float]]]
    """Engine -> level -> median of the first and of the last half after the warm-up, growth, bound."""
    too_large: list[str]
    most_held: dict[str, dict[str, int]]
    """Engine -> level -> the highest that its status ever said."""
    stranded: dict[str, str]
    bad: list[str]


def soak(live: Live, plan: Soak) -> SoakReport:
    """Run the soak and return its figures."""
    draw = random.Random(plan.seed)
    faults: dict[str, int] = {}
    began_s = time.monotonic()
    # Workers that pause: about four requests a second, also where the machine is busy with other things.
    with running_load(live.load(plan.seed, workers=10, pause_s=1.5, leave_share=plan.leave_share)) as load:
        next_fault_s, next_note_s = began_s + _FAULT_EVERY_S, began_s + 60
        while (now_s := time.monotonic()) - began_s < plan.seconds or len(load.asked) < plan.requests:
            assert not live.dead(), f"{live.dead()} died:\n{live.engines[live.dead()[0]].last_words()}"
            time.sleep(0.5)
            if now_s >= next_fault_s:
                name, fault = draw.choice(FAULTS)
                fault(live, draw)
                faults[name] = faults.get(name, 0) + 1
                next_fault_s = time.monotonic() + _FAULT_EVERY_S
            if now_s >= next_note_s:
                note(f"  ... {len(load.asked)} requests in {now_s - began_s:.0f} s, faults {faults}")
                next_note_s += 60
    seconds = time.monotonic() - began_s
    stranded = live.stranded()
    counts, bad = judge_all(load.asked, live.outages, FAILS)
    took_s = slow_ends(load.asked, lambda each: each.had_ticket)
    return SoakReport(
        seconds=round(seconds),
        seed=plan.seed,
        requests=len(load.asked),
        verdicts={str(verdict): count for verdict, count in counts.items()},
        faults=faults,
        handed_over_s={f"p{share * 100:g}": round(percentile(took_s, share), 3) for share in (0.5, 0.9, 0.99)},
        levels={name: levels_of(live.recorder, name) for name in SURVIVORS},
        too_large=[
            f"{name}: {text}"
            for name in SURVIVORS
            for level in GROWTH_BOUNDS
            if (text := too_large(level, live.recorder.levels(name, level)))
        ],
        most_held={name: _most_held(live.recorder, name) for name in live.engines},
        stranded=stranded,
        bad=[repr(each)[:600] for each in bad[:5]],
    )


def levels_of(recorder: Recorder, name: str) -> dict[str, dict[str, float]]:
    """Return the medians of the two halves, the growth and its bound, of each level of an engine."""
    found: dict[str, dict[str, float]] = {}
    for level, (most, share) in GROWTH_BOUNDS.items():
        series = recorder.levels(name, level)
        kept = sorted(series[len(series) // 5 :])
        middle = kept[len(kept) // 2]
        found[level] = {
            "median": round(middle, 1),
            "least": round(kept[0], 1),
            "most": round(kept[-1], 1),
            "grew": round(growth(series), 1),
            "bound": round(max(most, share * middle), 1),
        }
    return found


def _most_held(recorder: Recorder, name: str) -> dict[str, int]:
    held = [each for _, each in recorder.holdings.get(name, [])]
    levels = ("leases", "leased_blocks", "requests", "reads", "quarantined", "peers")
    return {level: max((getattr(each, level) for each in held), default=0) for level in levels}


def _kill(name: str) -> Callable[[Live, random.Random], None]:
    def fault(live: Live, draw: random.Random) -> None:
        live.kill(name)
        time.sleep(draw.uniform(0.0, 3.0))
        live.begin_again(name)
        live.wait_serving(name)

    return fault


def _stop(name: str) -> Callable[[Live, random.Random], None]:
    def fault(live: Live, draw: random.Random) -> None:
        live.stop(name)
        time.sleep(draw.uniform(*_STOPPED_S))
        live.resume(name)

    return fault


FAULTS: Sequence[tuple[str, Callable[[Live, random.Random], None]]] = (
    ("a prefill engine is killed and started anew", _kill("prefill-1")),
    ("a decode engine is killed and started anew", _kill("decode-1")),
    ("a prefill engine is stopped for 1 to 6 s", _stop("prefill-1")),
    ("a decode engine is stopped for 1 to 6 s", _stop("decode-1")),
)
