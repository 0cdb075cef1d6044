"""Campaigns in processes of their own, since UCX reads its settings, and malloc its own, when a process starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

__all__ = ["ADVICE", "Who", "campaign", "line_of"]

Who = Literal["bare", "own"]

ADVICE = {"MALLOC_MMAP_THRESHOLD_": "32768"}
"""Setting for processes that use NIXL without this package: memory of UCX's request pool comes zeroed from the kernel."""
_SCRIPTS = {
    "bare": Path(__file__).resolve().parents[3] / "docs" / "upstream" / "consumer_death.py",
    "own": Path(__file__).with_name("own_agents.py"),
}
_LAST_WORDS = re.compile(r"(Assertion `[^']*' failed|Fatal: .*|in \w+ .*Segmentation fault.*)$", re.MULTILINE)
_NOT_INHERITED = ("UCX_", "NIXL_", "MALLOC_", "KV_NIXL_")


def campaign(who: Who, harm: str, count: int, environment: dict[str, str], *options: str) -> dict[str, Any]:
    """Run one campaign and return its figures, with the last words of processes that UCX ended, counted."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    words = [sys.executable, str(_SCRIPTS[who]), "--harm", harm, "--count", str(count), *options]
    done = subprocess.run(
        words,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    figures["last_words"] = dict(Counter(_LAST_WORDS.findall(done.stderr)))
    return {"who": who, **figures}


def line_of(figures: dict[str, Any]) -> str:
    """Return one line of the table that a run prints."""
    low, high = figures["interval"]
    settings = " ".join(f"{name}={text}" for name, text in figures["settings"].items()) or "default transports"
    signals = ", ".join(f"{name} {count}" for name, count in figures["by_signal"].items()) or "none"
    return (
        f"{figures['who']:<5} {figures['harm']:<7} {figures['deaths_per_100']:>5} deaths per 100 ({low} to {high}, "
        f"{figures['deaths']} of {figures['harmed']}; {signals})  {settings}"
    )
