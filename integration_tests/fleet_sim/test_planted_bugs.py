"""Planted bugs: the recorded schedule of each still finds it, and finds nothing without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bugs import BUGS
from episode import play
from plan import from_json
from record import load

RECORDED: dict[str, Any] = load()


SIMULATE = Path(__file__).parent / "simulate.py"


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


def test_every_bug_is_recorded() -> None:
    assert set(RECORDED) == set(BUGS)
    assert len(BUGS) >= 40


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_found(name: str) -> None:
    plan = from_json(json.dumps(RECORDED[name]["plan"]))
    found = play(plan, BUGS[name])
    assert [one.kind for one in found.violations[:1]] == [RECORDED[name]["kind"]]
    assert not play(plan).violations


def test_the_documented_examples_break_a_promise() -> None:
    """Examples name the seed under which the bug was found; others may not meet it."""
    texts = [SIMULATE.read_text(), (SIMULATE.parents[2] / "docs" / "evidence.md").read_text()]
    told = [each for text in texts for each in re.findall(r"simulate\.py (\d+) --bug ([a-z-]+)", text)]
    assert len(told) >= 2
    assert told == [(str(RECORDED[name]["seed"]), name) for _, name in told]
