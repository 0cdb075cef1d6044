"""Readers that die in the middle of reads: deaths of the process they read from, beside bare NIXL's in the same run.

The short tests fill fresh memory with a pattern (`MALLOC_PERTURB_`), under which bare NIXL's process dies at the first or
second kill, so that a few kills tell the two apart. The long test measures without it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from campaigns import ADVICE, Who, campaign, line_of

IS_LONG = os.environ.get("KVDEV_LONG") == "1"
TCP = {"UCX_TLS": "tcp"}
PATTERN = {"MALLOC_PERTURB_": "253"}
"""malloc's memory then holds 2 in every byte: UCX takes that for a list of buffers."""
OFF = {"KV_NIXL_ZEROED_REQUESTS": "n"}
REPORT = Path(__file__).resolve().parents[3] / ".dev" / "reports" / "chaos-agents.json"

KILLS, OTHERS = 200, 60
ROWS: list[tuple[Who, dict[str, str]]] = [
    ("bare", {}),
    ("own", {}),
    ("bare", TCP),
    ("bare", {**TCP, "UCX_KEEPALIVE_INTERVAL": "inf"}),
    ("bare", {**TCP, **ADVICE}),
    ("own", {**TCP, **OFF}),
    ("own", TCP),
]
HARMS = {"kill": KILLS, "stop": OTHERS, "reset": OTHERS, "close": OTHERS, "frozen": OTHERS, "frozen-kill": OTHERS}


@pytest.mark.full
def test_a_killed_reader_leaves_our_producer_alive(figure: Callable[[str], None]) -> None:
    figures = campaign("own", "kill", 5, {**TCP, **PATTERN}, "--ready", "2")
    figure(line_of(figures))
    assert figures["mid_read"] >= 3, "hardly any reader was killed in the middle of a read, so this shows nothing"
    # On a busy machine UCX may still abort a producer that gets no core: docs/adr/0016.
    assert set(figures["by_signal"]) <= {"SIGABRT"}


@pytest.mark.full
def test_the_reproducer_of_the_report_still_ends_bare_nixl(figure: Callable[[str], None]) -> None:
    """Where this fails, UCX may have been mended: then the report, the finding of the doctor and the remedy can go."""
    by_signal: Counter[str] = Counter()
    for _ in range(4):
        figures = campaign("bare", "kill", 3, {**TCP, **PATTERN}, "--ready", "1")
        figure(line_of(figures))
        by_signal.update(figures["by_signal"])
        if by_signal["SIGSEGV"]:
            return
    pytest.fail(f"no SIGSEGV in 12 kills, but {dict(by_signal)}")


@pytest.mark.skipif(not IS_LONG, reason="takes an hour: dev.py test --long chaos")
@pytest.mark.timeout(7200)
def test_deaths_per_100_beside_bare_nixls(figure: Callable[[str], None]) -> None:
    rows: list[dict[str, Any]] = []
    for harm, count in HARMS.items():
        for who, settings in ROWS:
            rows.append(campaign(who, harm, count, settings))
            figure(line_of(rows[-1]))
            REPORT.parent.mkdir(parents=True, exist_ok=True)
            REPORT.write_text(json.dumps(rows, indent=1))
    for harm in HARMS:
        of = {(row["who"], tuple(row["settings"])): row for row in rows if row["harm"] == harm}
        assert of["own", ()]["deaths"] == 0, "on default transports nothing may die"
        # Intervals, because bare NIXL's own deaths differ from run to run.
        assert of["own", ("UCX_TLS",)]["interval"][0] <= of["bare", ("UCX_TLS",)]["interval"][1]
    kills = [row for row in rows if row["who"] == "own" and not set(OFF) & set(row["settings"])]
    assert all("SIGSEGV" not in row["by_signal"] for row in kills)
