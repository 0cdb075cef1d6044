"""Trailing tokens of a prompt that a producer leaves to the consumer."""

from __future__ import annotations

import pytest
from scheduler_helpers import FULL, STATE, WINDOW, allocate, scheduler, with_ticket

from kv_scheduler_state import UNBOUND, GroupConfig, prefill_request_params


@pytest.mark.parametrize(("prompt_tokens", "truncated", "loaded"), [(10, 1, 9), (2, 1, 1), (1, 0, 0), (0, 0, 0)])
def test_a_state_is_handed_over_one_token_early(prompt_tokens, truncated, loaded):
    state = scheduler(groups=(STATE,))
    admission = state.arrive("p1", prefill_request_params(), prompt_tokens=prompt_tokens, identity=UNBOUND, now_s=0.0)
    assert admission.truncate_tokens == truncated
    allocate(state, "p1", [[1]])
    state.preempt("p1", now_s=0.0)
    allocate(state, "p1", [[1]])  # the truncation was announced once and is not asked for again
    with_ticket(state, "d1", prompt_tokens=prompt_tokens, remote_num_tokens=None)
    assert state.external_tokens("d1", computed_tokens=0) == loaded


@pytest.mark.never_wrong("A8")
@pytest.mark.parametrize(
    ("group", "prompt_tokens", "left"),
    [
        (WINDOW, 47, 1),  # token 46 sees 15, whose block goes with token 47
        (WINDOW, 46, 0),
        (WINDOW, 48, 0),
        (WINDOW, 31, 0),  # nothing is given up yet
        (GroupConfig("window", 16, window_tokens=18), 49, 0),  # 48 tokens have a block less, on which other peers count
        (GroupConfig("full", 16, chunk_tokens=48), 96, 1),  # token 95 sees those from 48 on, token 96 itself alone
        (GroupConfig("full", 16, chunk_tokens=48), 95, 0),
        (GroupConfig("full", 16, chunk_tokens=48), 97, 0),
        (FULL, 96, 0),
    ],
)
def test_a_producer_stops_early_where_its_engine_gives_up_what_the_last_token_sees(group, prompt_tokens, left):
    state = scheduler(groups=(FULL, group))
    admission = state.arrive("p1", prefill_request_params(), prompt_tokens=prompt_tokens, identity=UNBOUND, now_s=0.0)
    assert admission.truncate_tokens == left
