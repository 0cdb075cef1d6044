"""Fleets whose prompts are read while they are computed: no promise is broken, whatever happens at whichever chunk."""

from __future__ import annotations

import os

import pytest
from draw_streams import AIMED, draw_stream_plan
from episode import play
from figures import Figure
from many import play_many

_COUNTS = {"KVDEV_LONG": "2500", "KVDEV_FULL": "100"}
SEEDS = int(os.environ.get("FLEET_SIM_STREAM_SEEDS", next((_COUNTS[n] for n in _COUNTS if n in os.environ), "20")))
FIRST = int(os.environ.get("FLEET_SIM_FIRST", "20" if "KVDEV_FULL" in os.environ else "0"))


@pytest.mark.sized
@pytest.mark.timeout(1800)
def test_no_seed_of_streams_breaks_a_promise(figure: Figure) -> None:
    found = play_many(range(FIRST, FIRST + SEEDS), "streams")
    figure(found.text())
    assert found.counts["episodes"] == SEEDS
    assert not found.failures, found.replays(" --streams")
    # Nothing is shown by episodes in which no stream is read to its end, or none before its prompt is whole.
    assert found.counts["accepted-streamed"] > SEEDS / 2
    early, late = found.counts["stream-bytes early"], found.counts["stream-bytes late"]
    assert early > (early + late) / 4
    assert found.counts["accepted"] > 2 * SEEDS
    if SEEDS >= 100:
        for kind in AIMED:
            assert found.counts[f"fault {kind}"] > SEEDS / 10, kind
        for name in ("latent", "state", "window", "mirror", "unequal-tp"):
            assert found.counts[f"accepted-streamed {name}"] > SEEDS / 200, name


def test_engines_that_read_from_each_other_never_wait_for_each_other() -> None:
    """All blocks of both are leased, to requests that wait for blocks of their own engine, and nothing runs."""
    for seed in (101, 157, 309, 353, 847):
        plan = draw_stream_plan(seed)
        assert plan.fleet.answer_s, "a pair"
        assert not play(plan).violations, f"seed {seed}"
