"""The random driver holds on the code as it is, and finds each fault when its fix is taken back."""

import os
from collections import Counter

import pytest
from agent_checks.driver import run_episode
from reverts import REVERTS

from kv_nixl_agent import AgentError, _transfer
from kv_nixl_agent._states import TABLE, step

EPISODES = 4000 if os.environ.get("KVDEV_LONG") == "1" else 60
ENOUGH = 150


@pytest.mark.never_wrong("C8")
@pytest.mark.timeout(900)
def test_random_episodes_keep_every_promise_and_take_every_step_of_the_table(monkeypatch):
    taken: Counter[tuple[str, str]] = Counter()

    def counted(state, event):
        taken[state, event] += 1
        return step(state, event)

    monkeypatch.setattr(_transfer, "step", counted)
    for seed in range(EPISODES):
        run_episode(seed)
    missed = {(row.state, row.event) for row in TABLE} - set(taken)
    assert missed <= {("data-done", "end"), ("verified", "end")}


@pytest.mark.never_wrong("C8")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REVERTS)
def test_the_driver_finds_each_fault_that_was_fixed(monkeypatch, name):
    REVERTS[name](monkeypatch)
    for seed in range(ENOUGH):
        try:
            run_episode(seed)
        except (AssertionError, AgentError):
            return
    raise AssertionError(f"{ENOUGH} episodes do not show that {name}")
