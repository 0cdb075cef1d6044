"""A request's life on both sides, as the engine's hooks tell it."""

from __future__ import annotations

import pickle

from model.invariants import problems
from scheduler_helpers import consumer_params, scheduler

from kv_scheduler_state import FenceOrder, GrantOrder, prefill_request_params
from kv_scheduler_state.plan import EMPTY_PLAN


def test_prefill_is_announced_granted_and_forgotten():
    state = scheduler(engine_id="prefill-0")
    assert state.arrive("p1", prefill_request_params(), prompt_tokens=48, now_s=0.0).role == "producer"
    assert state.take_step_plan(now_s=0.0) is EMPTY_PLAN
    state.allocate("p1", block_ids=[[1, 2, 3]], new_block_ids=[[3]], external_tokens=0, now_s=0.0)
    plan = state.take_step_plan(now_s=0.0)
    assert plan.expects == ("p1",)
    assert plan.fences == (FenceOrder("p1", 0, 100),)
    assert pickle.loads(pickle.dumps(plan)) == plan
    decision = state.finish("p1", reason="length", block_ids=[[1, 2, 3]], computed_tokens=48, now_s=1.0)
    assert decision.keep_blocks
    nonce = decision.params["kv_nonce"]
    own = {"kv_lease_s": 30.0, "kv_fence": [0, 100], "kv_first_tokens": [0], "kv_span_tokens": [16], "kv_nonce": nonce}
    assert decision.params == consumer_params(remote_request_id="p1", **own), "vLLM's keys, and ours"
    assert state.has_work()
    assert state.take_step_plan(now_s=1.0).grants == (GrantOrder("p1", 30.0, (0, 100), nonce),)
    assert not state.has_work()
    assert state.live_count == 1
    state.report(sent=["p1"], received=[], failed=[])
    assert state.live_count == 0
    assert problems(state) == []
