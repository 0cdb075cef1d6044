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

_CHUNK = 50
DRAWS: dict[str, Callable[[int], EpisodePlan]] = {"plain": draw_plan, "streams": draw_stream_plan}
"""Plans of seeds, by kind of run."""


@final
@dataclass(slots=True)
class Figures:
    """Figures of many episodes; `failures` are (seed, kind, sentence)."""

    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])

    def replays(self, words: str = "") -> str:
        """Return the failures as one paragraph each, with the command that replays it."""
        return "\n".join(
            f"seed {seed}: {kind}: {text}\n  replay: python integration_tests/fleet_sim/simulate.py {seed}{words}"
            for seed, kind, text in self.failures
        )

    def text(self) -> str:
        """Return all counts in one line."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


def _share(kind: str, seeds: list[int]) -> Figures:
    figures = Figures()
    for seed in seeds:
        world = play(DRAWS[kind](seed))
        figures.counts += world.counts
        figures.counts.update(episodes=1, events=world.events, simulated_s=round(world.now_s))
        figures.failures += [(seed, one.kind, one.text) for one in world.violations[:1]]
    return figures


def play_many(seeds: Iterable[int], kind: str = "plain", *, jobs: int | None = None) -> Figures:
    """Play seeds of a kind of run, a key of `DRAWS`, on several processes."""
    wanted = list(seeds)
    shares = [wanted[at : at + _CHUNK] for at in range(0, len(wanted), _CHUNK)]
    figures = Figures()
    with ProcessPoolExecutor(jobs or min(4, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for share in pool.map(partial(_share, kind), shares):
            figures.counts += share.counts
            figures.failures += share.failures
    return figures
