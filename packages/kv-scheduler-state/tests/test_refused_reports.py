"""Refusals and reports that a sound host never causes: each is coded, and the other requests go on."""

from __future__ import annotations

import sys

import pytest
from scheduler_helpers import BLOCKS, WINDOW, allocate, config, consumer_params, hand_over, scheduler, with_ticket
from stream_helpers import Prompt

from kv_scheduler_state import UNBOUND, SchedulerState, SchedulerStateError, prefill_request_params, prompt_digest
from kv_scheduler_state.errors import DuplicateRequest, InvalidEvent, UnknownRequest


def test_a_wrong_report_of_sent_blocks_is_refused_and_the_right_ones_beside_it_count():
    state = scheduler()
    assert hand_over(state, [[1]], tokens=16).keep_blocks
    state.arrive("plain", None, prompt_tokens=4, identity=UNBOUND, now_s=0.0)
    state.arrive("waits", prefill_request_params(), prompt_tokens=4, identity=UNBOUND, now_s=0.0)
    for wrong in ("plain", "never-seen"):
        with pytest.raises(UnknownRequest):
            state.report(sent=[wrong], received=[], failed=[])
    with pytest.raises(SchedulerStateError) as refused:
        state.report(sent=["waits", "p1"], received=[], failed=[])
    assert refused.value.code == "illegal-transition"
    assert "p1" not in {entry["request_id"] for entry in state.snapshot(now_s=0.0)}


def test_a_parked_request_without_a_ticket_is_reported_once_and_its_id_rests_until_then():
    state = scheduler()
    state.arrive("r", None, prompt_tokens=16, identity=UNBOUND, now_s=0.0)
    with pytest.raises(InvalidEvent, match="without a ticket"):
        state.allocate("r", block_ids=[[1]], new_block_ids=[[1]], external_tokens=16, now_s=0.0)
    with pytest.raises(InvalidEvent):
        state.allocate("r", block_ids=[[1]], new_block_ids=[[1]], external_tokens=0, preemptions=-1, now_s=0.0)
    state.finish("r", reason="abort", block_ids=[[1]], computed_tokens=0, identity=UNBOUND, now_s=0.0)
    assert state.take_step_plan(now_s=0.0).failures == ("r",)
    with pytest.raises(DuplicateRequest, match="report of its failure"):
        state.arrive("r", None, prompt_tokens=16, identity=UNBOUND, now_s=0.0)
    state.report(sent=[], received=["r"], failed=["r"])
    state.arrive("r", None, prompt_tokens=16, identity=UNBOUND, now_s=0.0)


def test_a_read_before_the_engine_gives_blocks_is_taken_at_once_and_a_refused_one_is_no_failure():
    state = scheduler()
    with_ticket(state)
    tokens = state.external_tokens("d1", computed_tokens=0)
    given = {"block_ids": BLOCKS, "new_block_ids": BLOCKS, "is_parked": False, "now_s": 0.0}
    with pytest.raises(InvalidEvent):
        state.allocate("d1", external_tokens=tokens + 1, **given)
    state.allocate("d1", external_tokens=tokens, **given)
    assert [order.request_id for order in state.take_reads(["d1"]).reads] == ["d1"]
    plan = state.take_step_plan(now_s=0.0)
    assert (plan.reads, plan.failures) == ((), ())
    state.report(received=["d1"])
    assert state.state_counts() == {"consumer-local": 1}


def test_an_allocation_without_an_id_is_refused_and_reported_as_nobodys():
    state = scheduler()
    with pytest.raises(UnknownRequest):
        allocate(state, None, [[1]], external=4)
    assert state.take_step_plan(now_s=0.0).failures == ()


def test_a_second_read_of_a_request_is_refused_and_the_first_one_ends_as_it_did():
    state = scheduler()
    with_ticket(state)
    state.external_tokens("d1", computed_tokens=0)
    allocate(state, "d1", BLOCKS, external=48)
    with pytest.raises(SchedulerStateError):
        allocate(state, "d1", BLOCKS, external=48)
    plan = state.take_step_plan(now_s=0.0)
    assert ([order.request_id for order in plan.reads], plan.failures) == (["d1"], ())


@pytest.mark.never_wrong("A1")
def test_prompts_that_an_engine_cannot_identify_use_no_ticket():
    state, unknown = scheduler(), Prompt(refusal="ticket-media-unidentified")
    bound = consumer_params(kv_prompt=prompt_digest([1]))
    admission = state.arrive("d1", bound, prompt_tokens=48, identity=unknown, now_s=0.0)
    assert admission.rejected_code == "ticket-media-unidentified"
    unbound = hand_over(scheduler(engine_id="prefill-0"), [[1, 2, 3]], identity=unknown).params
    assert unbound["kv_prompt"] == ""
    admission = state.arrive("d2", unbound, prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    assert admission.rejected_code == "ticket-prompt-unidentified"


def test_token_ids_are_swapped_where_the_machine_is_big_endian(monkeypatch):
    little = prompt_digest([1, 2, 3])
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert prompt_digest([1, 2, 3]) != little  # swapped although this machine needs the opposite


def test_a_read_that_does_not_begin_at_a_block_or_lacks_blocks_is_refused():
    for blocks, external in (([[1, 2, 3]], 40), ([[1, 2]], 48)):
        state = scheduler()
        with_ticket(state)
        state.external_tokens("d1", computed_tokens=48 - external)
        with pytest.raises(InvalidEvent, match="needs whole blocks"):
            state.allocate("d1", block_ids=blocks, new_block_ids=blocks, external_tokens=external, now_s=0.0)
        assert state.take_step_plan(now_s=0.0).failures == ("d1",)


def test_blocks_of_a_prefix_hit_among_those_to_fill_are_refused_without_a_null_block():
    state = scheduler()
    with_ticket(state)
    state.external_tokens("d1", computed_tokens=0)
    with pytest.raises(InvalidEvent, match="no null block"):
        state.allocate("d1", block_ids=[[1, 2, 3]], new_block_ids=[[1, 3]], external_tokens=48, now_s=0.0)


@pytest.mark.never_wrong("A3")
def test_a_window_whose_first_local_block_would_keep_a_hole_is_computed_here():
    """Tokens 53 to 83 are seen; blocks of 4 from token 52 on hold them, but the local block begins with token 48."""
    own = {"remote_num_tokens": 84, "kv_span_tokens": [4], "remote_block_ids": [list(range(1, 10))], "kv_null_block": 0}
    for first, tokens in ((52, 0), (48, 83)):
        state = SchedulerState(config(groups=(WINDOW,), state_backoff_tokens=1))
        with_ticket(state, prompt_tokens=84, **{**own, "kv_first_tokens": [first]})
        loadable = state.external_tokens("d1", computed_tokens=0)
        assert (loadable or 0) >= tokens
        assert bool(loadable) == bool(tokens)
