"""The random driver: every promise holds, and every step of the table is taken."""

import os
from collections import Counter

import pytest
from agent_checks.driver import run_episode

from kv_nixl_agent.transfers.transfer import TABLE, Transfer

EPISODES = 4000 if os.environ.get("KVDEV_LONG") == "1" else 60


@pytest.mark.never_wrong("C8")
@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_an_episode_keeps_every_promise(seed):
    run_episode(seed)


@pytest.mark.full
@pytest.mark.never_wrong("C8")
@pytest.mark.timeout(900)
def test_random_episodes_keep_every_promise_and_take_every_step_of_the_table(monkeypatch):
    taken: Counter[tuple[str, str]] = Counter()

    go = Transfer._go

    def counted(one, event):
        taken[one.state, event] += 1
        return go(one, event)

    monkeypatch.setattr(Transfer, "_go", counted)
    for seed in range(EPISODES):
        run_episode(seed)
    missed = {(row.state, row.event) for row in TABLE} - set(taken)
    assert missed <= {("data-done", "end"), ("verified", "end")}
