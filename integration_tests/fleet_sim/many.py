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

from draw import draw_plan
from draw_streams import draw_stream_plan
from episode import play
from plan import EpisodePlan

__all__ = ["DRAWS", "Figures", "play_many"]

_CHUNK = 50
DRAWS: dict[str, Callable[[int], EpisodePlan]] = {"plain": draw_plan, "streams": draw_stream_plan}
"""Plans of seeds, by kind of run."""


@final
@dataclass(slots=True)
class Figures:
    """Figures of many episodes; `failures` are (seed, kind, sentence)."""

    episodes: int = 0
    events: int = 0
    simulated_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])

    def add(self, other: Figures) -> None:
        """Add another share of the episodes."""
        self.episodes += other.episodes
        self.events += other.events
        self.simulated_s += other.simulated_s
        self.counts += other.counts
        self.failures += other.failures

    def text(self) -> str:
        """Return the figures as one line per group of counts."""
        head = f"{self.episodes} episodes, {self.events} events, {self.simulated_s:.0f} s of their time"
        groups: dict[str, dict[str, int]] = {}
        for name, count in sorted(self.counts.items()):
            group, _, rest = name.partition(" ")
            groups.setdefault(group if rest else "", {})[rest or name] = count
        return "\n".join([head, *(f"{group or 'others'}: {counts}" for group, counts in sorted(groups.items()))])


def _share(kind: str, seeds: list[int]) -> Figures:
    figures = Figures()
    for seed in seeds:
        outcome = play(DRAWS[kind](seed))
        figures.episodes += 1
        figures.events += outcome.events
        figures.simulated_s += outcome.ended_s
        figures.counts += outcome.counts
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
