"""Planted faults: each has its place in production, and its checker finds it (weekly); a failing seed shrinks to a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from episode import play
from many import DRAWS
from plan import from_json
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


@pytest.mark.full
def test_a_failing_seed_is_shrunk_to_a_timeline_and_a_plan(tmp_path: Path) -> None:
    """As the documentation says of the command: the shrunk plan is small, and replays."""
    saved = tmp_path / "small.json"
    words = [sys.executable, str(SIMULATE), "0", "--bug", "fence-not-voided", "--save", str(saved)]
    first = subprocess.run(words, capture_output=True, text=True, check=False)
    assert first.returncode == 1
    assert "CHECK   fence-stands" in first.stdout
    assert "replay: python integration_tests/fleet_sim/simulate.py 0 --bug fence-not-voided" in first.stdout
    assert len(from_json(saved.read_text()).requests) == 1
    again = [sys.executable, str(SIMULATE), "--plan", str(saved), "--whole"]
    assert subprocess.run([*again, "--bug", "fence-not-voided"], capture_output=True, check=False).returncode == 1
    assert subprocess.run(again, capture_output=True, check=False).returncode == 0
