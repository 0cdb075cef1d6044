"""Fleets of random configurations: nothing breaks.

`KVDEV_LONG=1` walks ten times as many fleets.
"""

from __future__ import annotations

import os
import random

import pytest
from model.fleet import random_walk

SEEDS = 600 if os.environ.get("KVDEV_LONG") == "1" else 60
ROUNDS = 60


@pytest.mark.never_wrong("C8")
@pytest.mark.timeout(600)
def test_no_fleet_of_any_configuration_breaks_a_promise():
    configurations = {random_walk(random.Random(seed).randrange, rounds=ROUNDS) for seed in range(SEEDS)}
    for name in ("groups", "workers", "readers", "consumers", "siblings", "fence_slots", "ids", "lease_s", "has_lag"):
        assert len({getattr(configuration, name) for configuration in configurations}) > 1, name
