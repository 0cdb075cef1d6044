"""`dev.py bench NAME --against OTHER`: the same benchmark in two checkouts, run by turns, medians compared.

Each checkout runs its own benchmark on its own code in its own environment, so an API may differ between them. A figure
counts as slower when its median is beyond the tolerance twice: after the first runs, and again over a second series of
fresh ones. Speed is new over old: 1.0 is equal, 0.95 is five per cent slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvdev.paths import ROOT, STATE
from kvdev.steps import DevError, fail, note, run_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Figure", "compare", "run_comparison", "speed"]

_TOLERANCE = 0.95
_RATES = ("/s", "per s", "per second")

Sample = dict[str, tuple[str, float, float]]
"""name -> (unit, our figure, figure of the baseline that the benchmark measures beside it)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Medians of one figure, old against new."""

    name: str
    unit: str
    old: float
    new: float
    speed: float
    old_ratio: float
    new_ratio: float
    repeated_speed: float | None = None

    @property
    def is_slower(self) -> bool:
        """Whether both series say that it became slower than the tolerance allows."""
        return self.speed < _TOLERANCE and self.repeated_speed is not None and self.repeated_speed < _TOLERANCE


def run_comparison(name: str, against: str, *, runs: int, as_json: bool) -> int:
    """Compare this checkout with another one or with a commit; return 0 when nothing became slower."""
    with _checkout(against) as other:
        old, new = _runner(other, name), _runner(ROOT, name)
        figures = compare(old, new, runs=runs)
    table = Table(title=f"bench {name}: {against} (old) against this checkout (new), medians of {runs}")
    for heading in ("name", "unit", "old", "new", "speed", "repeated", "old ratio", "new ratio", "slower"):
        table.add_column(heading, overflow="fold")
    for one in figures:
        again = "" if one.repeated_speed is None else f"{one.repeated_speed:.3f}"
        values = (
            f"{one.old:.4g}",
            f"{one.new:.4g}",
            f"{one.speed:.3f}",
            again,
            f"{one.old_ratio:.3f}",
            f"{one.new_ratio:.3f}",
        )
        table.add_row(one.name, one.unit, *values, "SLOWER" if one.is_slower else "")
    Console(stderr=True, width=150).print(table)
    if as_json:
        keys = Figure.__slots__
        print(json.dumps([{key: getattr(one, key) for key in keys} | {"slower": one.is_slower} for one in figures]))
    return 1 if any(one.is_slower for one in figures) else 0


def compare(old: Callable[[], Sample], new: Callable[[], Sample], *, runs: int) -> list[Figure]:
    """Run both by turns, and once more if a figure looks slower; return the figures that both report."""
    figures = _series(old, new, runs)
    if not any(one.speed < _TOLERANCE for one in figures):
        return figures
    for one in figures:
        if one.speed < _TOLERANCE:
            beside = f"beside its baseline {one.old_ratio:.3f}, now {one.new_ratio:.3f}"
            note(f"looks slower: {one.name}: {one.old:.4g} {one.unit}, now {one.new:.4g}: {one.speed:.3f} ({beside})")
    note("a second series decides")
    again = {one.name: one.speed for one in _series(old, new, runs)}
    return [
        Figure(
            one.name, one.unit, one.old, one.new, one.speed, one.old_ratio, one.new_ratio,
            again.get(one.name) if one.speed < _TOLERANCE else None,
        )
        for one in figures
    ]  # fmt: skip


def speed(unit: str, old: float, new: float) -> float:
    """Return how fast new is in terms of old: above 1 is faster, for rates (`MB/s`) as for times and sizes."""
    before, after = (new, old) if any(unit.endswith(rate) for rate in _RATES) else (old, new)
    return before / after if after else 1.0


def _series(old: Callable[[], Sample], new: Callable[[], Sample], runs: int) -> list[Figure]:
    taken: defaultdict[str, list[Sample]] = defaultdict(list)
    for turn in range(runs):
        # The order changes from turn to turn, so that being first costs both the same.
        for side, run in (("old", old), ("new", new)) if turn % 2 == 0 else (("new", new), ("old", old)):
            note(f"run {turn + 1} of {runs}: {side}")
            taken[side].append(run())
    shared = [name for name in taken["new"][0] if name in taken["old"][0]]
    for name in taken["new"][0].keys() ^ taken["old"][0].keys():
        note(f"in one checkout only: {name}")
    figures: list[Figure] = []
    for name in shared:
        unit = taken["new"][0][name][0]
        (before, base_before), (after, base_after) = (
            (median(sample[name][1] for sample in taken[side]), median(sample[name][2] for sample in taken[side]))
            for side in ("old", "new")
        )
        ratios = (speed(unit, base_before, before), speed(unit, base_after, after))
        figures.append(Figure(name, unit, before, after, speed(unit, before, after), *ratios))
    return figures


def _runner(checkout: Path, name: str) -> Callable[[], Sample]:
    command = [sys.executable, str(checkout / "tools" / "dev.py"), "bench", name, "--json"]
    environment = {key: value for key, value in os.environ.items() if key not in {"KVDEV_UV", "VIRTUAL_ENV"}}
    # The uv that was found here serves the other checkout too.
    environment["PATH"] = f"{Path(os.environ['KVDEV_UV']).parent}{os.pathsep}{environment.get('PATH', '')}"

    def run() -> Sample:
        finished = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=1800, check=False
        )
        try:
            report: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            end = "\n".join(finished.stderr.splitlines()[-20:])
            raise DevError(
                f"the benchmark gave no figures in {checkout} (exit code {finished.returncode}):\n{end}"
            ) from None
        return {row["name"]: (row["unit"], row["ours"], row["baseline"]) for row in report["results"]}

    return run


@contextlib.contextmanager
def _checkout(against: str) -> Iterator[Path]:
    """Give a folder with the other version: a checkout as it is, a commit as a work tree that goes afterwards."""
    if (Path(against) / "tools" / "dev.py").exists():
        yield Path(against).resolve()
        return
    known = ["git", "rev-parse", "--verify", "--quiet", f"{against}^{{commit}}"]
    found = subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        fail(f"{against!r} is neither a checkout (a folder with tools/dev.py) nor a commit of this repository")
    commit = found.stdout.strip()
    folder = STATE / "bench" / commit[:12]
    run_step("prune work trees", ["git", "worktree", "prune"])
    if not folder.exists():
        run_step(f"work tree of {commit[:12]}", ["git", "worktree", "add", "--detach", folder, commit])
    try:
        yield folder
    finally:
        run_step("remove work tree", ["git", "worktree", "remove", "--force", folder])
