"""Each of these stranded, killed or corrupted something in vLLM's own connector, at least once."""

from __future__ import annotations

import copy

import pytest
from scheduler_helpers import STATE, allocate, begin, consumer_params, finish, scheduler, with_ticket

from kv_scheduler_state import UNBOUND, LeaseTable, prefill_request_params
from kv_scheduler_state.errors import DuplicateRequest


def test_an_id_is_free_again_once_the_plan_with_its_end_is_taken():
    state = scheduler()
    with_ticket(state, "d1")
    finish(state, "d1", "abort", [[1]], 0)
    begin(state, "p1", [[1]])
    assert state.take_step_plan(now_s=0.0).reads[0].request_id == "d1"
    finish(state, "p1", "abort", [[1]], 0)
    with pytest.raises(DuplicateRequest, match="last orders"):
        state.arrive("p1", None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    with_ticket(state, "d1")  # its end was ordered with the last plan
    assert state.take_step_plan(now_s=0.0).releases == ("p1",)
    state.arrive("p1", None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)


def test_a_prefill_that_ends_without_blocks_is_forgotten_by_the_workers():
    state, table = scheduler(), LeaseTable()
    begin(state, "p1", [[1]])
    table.apply(state.take_step_plan(now_s=0.0), now_s=0.0)
    assert finish(state, "p1", "length", [[]], 0)[:2] == (False, None)
    plan = state.take_step_plan(now_s=0.0)
    assert plan.releases == ("p1",)
    table.apply(plan, now_s=0.0)
    (end,) = table.take_ended(now_s=0.0)
    assert (end.reason, end.is_reported, table.live_count(), state.live_count) == ("released", False, 0, 0)


def test_asking_for_the_external_tokens_changes_nothing():
    state = scheduler(groups=(STATE,))
    params = prefill_request_params()
    before = copy.deepcopy(params)
    assert state.arrive("p1", params, prompt_tokens=10, identity=UNBOUND, now_s=0.0).truncate_tokens == 1
    ticket = consumer_params(remote_num_tokens=9)
    assert state.arrive("d1", ticket, prompt_tokens=10, identity=UNBOUND, now_s=0.0).truncate_tokens == 0
    snapshot = state.snapshot(now_s=0.0)
    for _ in range(3):
        assert state.external_tokens("p1", computed_tokens=0) == 0
        assert state.external_tokens("d1", computed_tokens=0) == 9
        # The prefix lookup came first: with all but the last token here, nothing is left to read, and nothing is lost.
        assert state.external_tokens("d1", computed_tokens=9) == 0
    assert state.snapshot(now_s=0.0) == snapshot
    assert params == before
    assert ticket == consumer_params(remote_num_tokens=9)


@pytest.mark.parametrize(("prompt", "read"), [(11, 0), (12, 0), (13, 12), (20, 12)])
def test_a_state_is_read_back_only_for_a_prompt_that_goes_on_after_it(prompt, read):
    """The engine computes the last token of a prompt itself, also after a read of all of it: a state would see it twice."""
    params = consumer_params(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=12)
    state = scheduler(groups=(STATE,), bidirectional=True, recompute_threshold_tokens=0, state_backoff_tokens=0)
    state.arrive("p2", params, prompt_tokens=prompt, identity=UNBOUND, now_s=0.0)
    assert state.external_tokens("p2", computed_tokens=0) == read
    plain = scheduler(bidirectional=True, recompute_threshold_tokens=0)
    plain.arrive("p2", params, prompt_tokens=prompt, identity=UNBOUND, now_s=0.0)
    assert plain.external_tokens("p2", computed_tokens=0) == min(12, prompt)  # blocks of tokens may be computed again


def _held_read(hold_steps: int):
    """Return machines that have just been given blocks for a readback of 99 tokens."""
    state = scheduler(bidirectional=True, read_hold_steps=hold_steps, recompute_threshold_tokens=0)
    params = consumer_params(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=99)
    state.arrive("d1", params, prompt_tokens=100, identity=UNBOUND, now_s=0.0)
    allocate(state, "d1", [[*range(1, 8)]], external=99)
    return state


def _plans(state, count: int) -> list:
    return [state.take_step_plan(now_s=0.0) for _ in range(count)]


@pytest.mark.never_wrong("A9")
@pytest.mark.parametrize("hold_steps", [0, 1, 3])
def test_a_read_is_kept_back_until_the_steps_under_way_have_ended(hold_steps: int) -> None:
    state = _held_read(hold_steps)
    assert [len(plan.reads) for plan in _plans(state, hold_steps + 2)] == [*[0] * hold_steps, 1, 0]


@pytest.mark.never_wrong("A9")
def test_a_read_that_is_kept_back_can_be_cancelled_and_voided() -> None:
    state = _held_read(2)
    assert not _plans(state, 1)[0].reads
    finish(state, "d1", "abort", [[*range(1, 8)]], 0)
    (plan,) = _plans(state, 1)
    (order,) = plan.reads
    assert not any(blocks.ids for blocks in order.local_blocks), "only the peer is notified"
    assert not plan.cancels
    state = _held_read(2)
    state.reset(now_s=0.0)
    *early, due = _plans(state, 3)
    assert [(plan.reads, plan.voids) for plan in early] == [((), ())] * 2
    assert ([order.request_id for order in due.reads], due.voids) == (["d1"], ("d1",))
