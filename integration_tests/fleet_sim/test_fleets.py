"""Whole fleets under faults, by seed: no promise is broken, and a seed is a run, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from figures import Figure
from many import DRAWS, play_many

_COUNTS = {"KVDEV_LONG": "1000", "KVDEV_FULL": "400"}
SEEDS = int(os.environ.get("FLEET_SIM_SEEDS", next((_COUNTS[n] for n in _COUNTS if n in os.environ), "200")))
# The rest of the full run goes on where the short run ends.
FIRST = int(os.environ.get("FLEET_SIM_FIRST", "200" if "KVDEV_FULL" in os.environ else "0"))
HERE = Path(__file__).parent


@pytest.mark.sized
@pytest.mark.timeout(1800)
def test_no_seed_breaks_a_promise(figure: Figure) -> None:
    found = play_many(range(FIRST, FIRST + SEEDS))
    figure(found.text())
    assert found.counts["episodes"] == SEEDS
    assert not found.failures, found.replays()
    # Nothing is shown by episodes in which nothing is read, nothing fails or most clients get no answer.
    assert found.counts["accepted"] > 3 * SEEDS
    assert found.counts["failed-reads"] > SEEDS / 10
    assert found.counts["outcome done"] > 4 * SEEDS
    if SEEDS >= 400:
        for name in ("latent", "state", "mirror", "after-hit"):
            assert found.counts[f"accepted-{name}"] > SEEDS / 100, name


@pytest.mark.full
@pytest.mark.parametrize("kind", DRAWS)
def test_a_seed_is_a_run_byte_for_byte(kind: str) -> None:
    script = f"from many import DRAWS\nfrom episode import play\nprint([play(DRAWS[{kind!r}](s)).log_hash() for s in range(8)])"
    others = filter(None, os.environ.get("FLEET_SIM_PYTHONS", "").split(":"))
    printed = {
        subprocess.run(
            [python, "-c", script],
            cwd=HERE,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{HERE}:{HERE.parent / 'fakes'}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for python in (sys.executable, *others)
        for hash_seed in ("1", "2")
    }
    (one,) = printed
    assert len(set(one.split())) == 8
