"""Many seeds on several processes, and the figures of them all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import final

from coverage_of_states import OUT_OF_REACH, all_pairs, stream_pairs
from draw import draw_plan
from draw_streams import draw_stream_plan
from episode import play
from plan import EpisodePlan

__all__ = ["DRAWS", "Figures", "play_many"]

_CHUNK = 50


@final
@dataclass(slots=True)
class Figures:
    """Figures of many episodes; `failures` are (seed, kind, sentence)."""

    episodes: int = 0
    events: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    shapes: Counter[str] = field(default_factory=Counter[str])
    failures: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])

    def add(self, other: Figures) -> None:
        """Add another share of the episodes."""
        self.episodes += other.episodes
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.counts += other.counts
        self.pairs += other.pairs
        self.shapes += other.shapes
        self.failures += other.failures

    def lines(self) -> list[str]:
        """Return the figures as text."""
        faults = {name[6:]: count for name, count in sorted(self.counts.items()) if name.startswith("fault ")}
        outcomes = {name[8:]: count for name, count in sorted(self.counts.items()) if name.startswith("outcome ")}
        special = {name[9:]: count for name, count in sorted(self.counts.items()) if name.startswith("accepted-")}
        return [
            f"{self.episodes} episodes, {self.events} events, {self.simulated_s:.0f} s, {len(self.shapes)} configurations",
            f"reads accepted {self.counts['accepted']}, failed {self.counts['failed-reads']}; answers: {outcomes}",
            f"reads accepted with, or of: {special}; refused between releases {self.counts['refused-releases']}",
            f"prefix hits: {self.counts['hits alone']} alone, {self.counts['hits before a read']} before a read",
            f"faults: {sum(faults.values())} of {len(faults)} kinds: {faults}",
            *self._streams(),
            self._covered(),
        ]

    def _streams(self) -> list[str]:
        """Return the figures of streamed hand-overs as text, none where there were none."""
        early, late = self.counts["stream-bytes early"], self.counts["stream-bytes late"]
        if not early + late:
            return []
        wanted = stream_pairs()
        missing = sorted(f"{state}: {event}" for state, event in wanted - self.pairs.keys())
        met = f"pairs of state and event of streams {len(wanted) - len(missing)} of {len(wanted)}, not met: {missing or 'none'}"
        share = f"{early} of {early + late} bytes ({early / (early + late):.0%}) before the last chunk was computed"
        return [f"streams accepted {self.counts['accepted-streamed']}, {share}", met]

    def _covered(self) -> str:
        """Return which states, and pairs of state and event, the machines met, as text."""
        wanted = all_pairs()
        met, states = wanted & self.pairs.keys(), {state for state, _ in wanted}
        open_pairs = sorted(f"{state}: {event}" for state, event in wanted - met - OUT_OF_REACH.keys())
        reasons = [
            f"  out of reach: {state}: {event} ({why})"
            for (state, event), why in OUT_OF_REACH.items()
            if (state, event) not in met
        ]
        count = len({state for state, _ in met})
        head = f"states {count} of {len(states)}, pairs of state and event {len(met)} of {len(wanted)}"
        tail = f"{len(wanted) - len(reasons)} within reach; not met: {open_pairs or 'none'}"
        return "\n".join([f"{head}, {tail}", *reasons])

    def as_values(self) -> dict[str, object]:
        """Return the figures as plain values."""
        wanted = all_pairs()
        met = wanted & self.pairs.keys()
        return {
            "episodes": self.episodes,
            "events": self.events,
            "simulated_s": round(self.simulated_s, 3),
            "configurations": len(self.shapes),
            "counts": dict(sorted(self.counts.items())),
            "states": {"met": len({state for state, _ in met}), "all": len({state for state, _ in wanted})},
            "pairs": {
                "met": {f"{state}: {event}": self.pairs[state, event] for state, event in sorted(met)},
                "not_met": [f"{state}: {event}" for state, event in sorted(wanted - met - OUT_OF_REACH.keys())],
                "out_of_reach": {
                    f"{state}: {event}": why
                    for (state, event), why in OUT_OF_REACH.items()
                    if (state, event) not in met
                },
            },
            "failures": [{"seed": seed, "kind": kind, "text": text} for seed, kind, text in self.failures],
        }


DRAWS: dict[str, Callable[[int], EpisodePlan]] = {"plain": draw_plan, "streams": draw_stream_plan}
"""Plans of seeds, by kind of run."""


def _share(kind: str, seeds: list[int]) -> Figures:
    figures = Figures()
    for seed in seeds:
        plan = DRAWS[kind](seed)
        outcome = play(plan)
        figures.episodes += 1
        figures.events += outcome.events
        figures.simulated_s += outcome.ended_s
        figures.counts += outcome.counts
        figures.pairs += outcome.pairs
        figures.shapes[plan.fleet.shape] += 1
        figures.failures += [(seed, one.kind, one.text) for one in outcome.violations[:1]]
    return figures


def play_many(seeds: Iterable[int], kind: str = "plain", *, jobs: int | None = None) -> Figures:
    """Play seeds of a kind of run, a key of `DRAWS`, on several processes."""
    wanted = list(seeds)
    shares = [wanted[at : at + _CHUNK] for at in range(0, len(wanted), _CHUNK)]
    figures = Figures()
    with ProcessPoolExecutor(jobs or min(4, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for share in pool.map(partial(_share, kind), shares):
            figures.add(share)
    return figures
