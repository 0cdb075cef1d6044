"""Planted faults: each has its place in production, and its checker finds it (weekly); a failing seed replays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from episode import play
from many import DRAWS
from planted import FAULTS, Fault, oracle_finds

SIMULATE = Path(__file__).parent / "simulate.py"
_SEEDS = 60
"""Seeds tried after the one in the table, which plays another episode once the draw of plans has changed."""
weekly = pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="weekly: dev.py test --long sim")


def test_every_fault_has_its_place() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        with fault.planted():
            pass


@weekly
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    if fault.found_by == "oracle":
        assert oracle_finds(fault)
        return
    draw = DRAWS[fault.found_by]
    found = next((seed for seed in (fault.seed, *range(_SEEDS)) if play(draw(seed), fault).violations), None)
    assert found is not None, "no seed finds it"
    assert not play(draw(found)).violations


def test_the_command_prints_the_timeline_of_a_failing_seed() -> None:
    words = [sys.executable, str(SIMULATE), "0"]
    failed = subprocess.run([*words, "--bug", "fence-not-voided"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "CHECK   fence-stands" in failed.stdout
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
