"""The cache is reset, or its memory registered anew: what was promised before is void."""

from __future__ import annotations

import pytest
from model.invariants import problems
from scheduler_helpers import BLOCKS, allocate, finish, hand_over, scheduler, with_ticket

from kv_scheduler_state import UNBOUND, prefill_request_params
from kv_scheduler_state.errors import InvalidEvent


def test_a_lease_that_is_out_is_revoked_once_and_ends_with_its_report():
    state = scheduler()
    assert hand_over(state, BLOCKS).keep_blocks
    state.take_step_plan(now_s=1.0)
    state.reset(now_s=2.0)
    state.reset(now_s=2.0)
    assert state.take_step_plan(now_s=2.0).revokes == ("p1",)
    state.report(sent=["p1"], received=[], failed=[])
    assert state.live_count == 0
    assert problems(state) == []


@pytest.mark.parametrize(("begun", "again", "is_kept"), [(True, False, False), (True, True, True), (False, True, True)])
def test_only_what_is_computed_after_a_reset_is_handed_over(begun, again, is_kept):
    state = scheduler()
    state.arrive("p1", prefill_request_params(), prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    if begun:
        allocate(state, "p1", BLOCKS)
        state.take_step_plan(now_s=0.0)
    state.reset(now_s=0.5)
    if begun and again:
        state.preempt("p1", now_s=0.6)
    if again:
        allocate(state, "p1", BLOCKS, now_s=0.7)
    decision = finish(state, now_s=1.0)
    assert (decision.keep_blocks, decision.withheld_code) == (is_kept, "" if is_kept else "cache-reset")
    assert state.take_step_plan(now_s=1.0).releases == (() if is_kept else ("p1",))
    assert state.live_count == is_kept
    assert problems(state) == []


def test_a_ticket_that_was_not_used_yet_is_given_up_and_its_producer_notified():
    state = scheduler()
    with_ticket(state)
    assert state.external_tokens("d1", computed_tokens=0) == 48
    state.reset(now_s=0.5)
    assert state.external_tokens("d1", computed_tokens=0) == 0
    plan = state.take_step_plan(now_s=100.0)
    (order,) = plan.reads
    assert (order.ticket.peer_request_id, order.is_notify_only, order.is_reported) == ("cmpl-1", True, False)
    assert plan.heartbeats == ()
    allocate(state, "d1", BLOCKS, now_s=0.7)
    assert state.take_step_plan(now_s=101.0).reads == ()
    assert problems(state) == []


def test_reads_under_way_are_named_and_still_waited_for():
    state = scheduler()
    with_ticket(state)
    state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=48, now_s=0.0)
    state.reset(now_s=0.5)
    assert state.take_step_plan(now_s=0.5).voids == ("d1",)
    state.report(sent=[], received=[], failed=["d1"])
    assert problems(state) == []


@pytest.mark.parametrize(("dialect", "is_sent_to_vllm"), [(None, False), (14, False), (15, True)])
def test_tickets_name_the_generation_that_was_set_last(dialect, is_sent_to_vllm):
    state = scheduler(generation=5, dialect=dialect)
    assert hand_over(state, BLOCKS, name="p1").params["kv_generation"] == 5
    state.set_generation(6)
    params = hand_over(state, BLOCKS, name="p2").params
    assert params["kv_generation"] == 6
    assert params.get("remote_registration_generation") == (6 if is_sent_to_vllm else None)
    state.set_generation(None)
    assert "kv_generation" not in (hand_over(state, BLOCKS, name="p3").params or ("kv_generation",))


@pytest.mark.parametrize("generation", [-1, 1 << 53, True, 1.0, "7"])
def test_a_generation_that_no_consumer_would_accept_is_refused(generation):
    with pytest.raises(InvalidEvent, match="generation"):
        scheduler().set_generation(generation)
