"""`dev.py bench NAME`: run one benchmark module and report its figures beside the machine and the commit."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvdev.paths import ROOT
from kvdev.steps import fail, note

__all__ = ["run_bench"]


def run_bench(name: str, *, as_json: bool, size: str = "quick") -> int:
    """Run `tools/bench/NAME.py`; return 0 when every target was met.

    Args:
        name: The benchmark.
        as_json: Print the report as the last line.
        size: One of the benchmark's `SIZES`; `quick` for one that has none.
    """
    folder = ROOT / "tools" / "bench"
    known = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    if name not in known:
        fail(f"no benchmark named {name!r}; there are {', '.join(known)}")
    sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    if size not in getattr(module, "SIZES", ("quick",)):
        fail(f"the benchmark {name!r} has one size: --{size} is not for it")
    os.environ["KV_BENCH_SIZE"] = size
    results: list[dict[str, Any]] = module.run(note)
    report = {"results": results, "machine": _machine(), "commit": _commit()}
    table = Table(title=f"bench {name}")
    for heading in ("name", "unit", "ours", "baseline", "ratio", "target", "met"):
        table.add_column(heading, overflow="fold")
    for row in results:
        table.add_row(*(_shown(row.get(key)) for key in ("name", "unit", "ours", "baseline", "ratio", "target", "met")))
    Console(stderr=True, width=150).print(table)
    if as_json:
        print(json.dumps(report))
    return 0 if all(row.get("met") is not False for row in results) else 1


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _machine() -> dict[str, object]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": model, "cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
