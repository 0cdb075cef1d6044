"""`dev.py bench NAME`: one benchmark with its figures beside the machine and the commit; `--against`: in two checkouts by turns.

Each checkout runs its own benchmark on its own code in its own environment, so an API may differ between them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvdev.paths import ROOT, STATE
from kvdev.steps import fail, note, run_step

Rows = list[dict[str, Any]]


_TOLERANCE = 0.95


def run_bench(_uv: object, options: Namespace) -> int:
    """Run `tools/bench/NAME.py`, or compare it; return 0 when every target was met, or nothing became slower."""
    name: str = options.name
    folder = ROOT / "tools" / "bench"
    known = sorted(p.stem.replace("_", "-") for p in folder.glob("[!_]*.py"))
    if name not in known:
        fail(f"no benchmark named {name!r}; there are {', '.join(known)}")
    choices: dict[str, Any] = {}
    for option, owner in (("gates", "connector"), ("vllm", "hand-over")):
        if value := getattr(options, option):
            choices[option] = value
            if name != owner:
                fail(f"the benchmark {name!r} takes no --{option}: that is for {owner}")
    if options.against:
        return _run_comparison(options)
    sys.path.insert(0, str(folder))
    results: Rows = []
    for row in importlib.import_module(name.replace("-", "_")).run(**choices):
        note(f"{row['name']}: {row['ours']:.5g} against {row['baseline']:.5g} {row['unit']}, ratio {row['ratio']}")
        results.append(row)
    _print_table(f"bench {name}", ("name", "unit", "ours", "baseline", "ratio", "target", "met"), results)
    if options.json:
        print(json.dumps({"results": results, "machine": _machine(), "commit": _commit()}))
    return 0 if all(row["met"] for row in results) else 1


def _run_comparison(options: Namespace) -> int:
    """Compare this checkout with another one or with a commit; return 0 when nothing became slower than the tolerance."""
    name, against, runs = options.name, options.against, options.runs
    taken: dict[str, list[Rows]] = {"old": [], "new": []}
    with _checkout(against) as other:
        for turn in range(runs):
            # The order changes from turn to turn, so that being first costs both the same.
            for side in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                note(f"run {turn + 1} of {runs}: {side}")
                taken[side].append(_run_in(ROOT if side == "new" else other, name))
    figures = compared(taken["old"], taken["new"])
    keys = ("name", "unit", "old", "new", "speed", "old ratio", "new ratio", "slower")
    _print_table(f"bench {name}: {against} (old) against this checkout (new), medians of {runs}", keys, figures)
    if options.json:
        print(json.dumps(figures))
    return 1 if any(one["slower"] for one in figures) else 0


def compared(old: Sequence[Rows], new: Sequence[Rows]) -> Rows:
    """Return the medians of the figures that both report, and the speed: above 1 is faster, for rates as for times and sizes.

    A figure is slower when its medians say so, and the best of both series as well: a busy machine slows a few runs.
    """
    figures: Rows = []
    for row in new[0]:
        name, is_rate = row["name"], re.search(r"/s$", row["unit"]) is not None
        sides = [[one for rows in series for one in rows if one["name"] == name] for series in (old, new)]
        if not all(sides):
            note(f"in this checkout only: {name}")
            continue
        old_ours, new_ours = ([one["ours"] for one in side] for side in sides)
        # The least is the best of costs: of rates, of their inverses.
        before, after = ([1 / one for one in side] if is_rate else side for side in (old_ours, new_ours))
        speeds = [of(before) / of(after) if of(after) else 1.0 for of in (median, min)]
        ratios = {
            f"{side} ratio": round(median(one["ratio"] for one in rows), 3)
            for side, rows in zip(("old", "new"), sides, strict=True)
        }
        figure = {"name": name, "unit": row["unit"], "old": median(old_ours), "new": median(new_ours)}
        is_slower = max(speeds) < _TOLERANCE
        figures.append({**figure, "speed": round(speeds[0], 3), **ratios, "slower": is_slower})
    return figures


def _run_in(checkout: Path, name: str) -> Rows:
    command = [sys.executable, str(checkout / "tools" / "dev.py"), "bench", name, "--json"]
    environment = {key: value for key, value in os.environ.items() if key not in {"KVDEV_UV", "VIRTUAL_ENV"}}
    # The uv that was found here serves the other checkout too.
    environment["PATH"] = f"{Path(os.environ['KVDEV_UV']).parent}{os.pathsep}{environment.get('PATH', '')}"
    # A benchmark that misses a target ends with 1, and has figures.
    _, log = run_step(f"bench {name} {checkout.name}", command, env=environment, cwd=checkout, allowed=(0, 1))
    last = log.read_text().splitlines()[-1]
    if not last.startswith("{"):
        fail(f"the benchmark gave no figures in {checkout}: {log}")
    rows: Rows = json.loads(last)["results"]
    return rows


@contextlib.contextmanager
def _checkout(against: str) -> Iterator[Path]:
    """Give a folder with the other version: a checkout as it is, a commit as a work tree that goes afterwards."""
    if (Path(against) / "tools" / "dev.py").exists():
        yield Path(against).resolve()
        return
    folder = STATE / "bench" / re.sub(r"[^\w.-]", "-", against)
    run_step("prune work trees", ["git", "worktree", "prune"])
    run_step(
        f"work tree of {against}", ["git", "worktree", "add", "--force", "--detach", folder, f"{against}^{{commit}}"]
    )
    try:
        yield folder
    finally:
        run_step("remove work tree", ["git", "worktree", "remove", "--force", folder])


def _print_table(title: str, headings: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*headings, title=title)
    for row in rows:
        values = (row[heading] for heading in headings)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    Console(stderr=True, width=150).print(table)


def _machine() -> dict[str, object]:
    models = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[:1],
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
