"""Ends of prompts that are not handed over: the engine is shutting down, or too many blocks wait for readers."""

from __future__ import annotations

from typing import Literal

import pytest
from scheduler_helpers import FULL, WINDOW, prefill_request_params, scheduler, with_ticket

from kv_scheduler_state import FinishDecision, SchedulerState
from kv_scheduler_state._errors import InvalidConfig


def end(
    state: SchedulerState, request_id: str, blocks: list[list[int]], *, reason: Literal["length", "abort"] = "length"
) -> FinishDecision:
    """Let a prompt arrive, be computed and end."""
    state.arrive(request_id, prefill_request_params(), prompt_tokens=16, now_s=0.0)
    state.allocate(request_id, block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    decision = state.finish(request_id, reason=reason, block_ids=blocks, computed_tokens=16, now_s=0.0)
    assert state.check_invariants() == ()
    is_granted = any(grant.request_id == request_id for grant in state.take_step_plan(now_s=0.0).grants)
    assert is_granted == decision.keep_blocks
    return decision


def test_a_draining_engine_hands_nothing_over_and_keeps_its_promises() -> None:
    state = scheduler()
    assert not state.is_draining
    assert end(state, "p1", [[1, 2]]).keep_blocks
    state.drain()
    state.drain()
    assert state.is_draining
    assert end(state, "p2", [[3]]) == (False, None, "draining")
    assert end(state, "p3", [[4]], reason="abort") == (False, None, "")
    assert (state.lease_count, state.leased_blocks, state.fence_slots_used) == (1, (2,), 1)
    state.report(sent=["p1"], received=[], failed=[])
    assert (state.lease_count, state.leased_blocks, state.live_count) == (0, (0,), 0)


def test_a_draining_engine_goes_on_reading() -> None:
    state = scheduler()
    state.drain()
    with_ticket(state)
    assert state.external_tokens("d1", computed_tokens=0) == 48
    state.allocate("d1", block_ids=[[4, 5, 6]], new_block_ids=[[4, 5, 6]], external_tokens=48, now_s=0.0)
    assert [order.request_id for order in state.take_step_plan(now_s=0.0).reads] == ["d1"]


def test_a_revoked_lease_is_out_until_the_workers_have_ended_it() -> None:
    state = scheduler()
    end(state, "p1", [[1, 2]])
    state.revoke("p1", now_s=1.0)
    assert (state.lease_count, state.leased_blocks) == (1, (2,))
    state.report(sent=["p1"], received=[], failed=[])
    assert (state.lease_count, state.leased_blocks) == (0, (0,))


def test_null_blocks_keep_nothing() -> None:
    state = scheduler(groups=(FULL, WINDOW), null_block=0)
    end(state, "p1", [[1, 2, 3, 4], [0, 0, 7, 8]])
    assert state.leased_blocks == (4, 2)


def test_leases_beyond_the_quota_are_not_granted() -> None:
    state = scheduler(max_leases=2)
    assert end(state, "p1", [[1]]).keep_blocks
    assert end(state, "p2", [[2]]).keep_blocks
    assert end(state, "p3", [[3]]) == (False, None, "lease-quota")
    state.report(sent=["p1"], received=[], failed=[])
    assert end(state, "p4", [[4]]).keep_blocks


def test_blocks_beyond_the_quota_are_not_leased() -> None:
    state = scheduler(max_leased_blocks=100)
    small, large = list(range(1, 41)), list(range(41, 91))
    assert end(state, "p1", [small]).keep_blocks
    assert end(state, "p2", [large]).keep_blocks
    assert end(state, "p3", [list(range(100, 111))]) == (False, None, "lease-quota")
    state.revoke("p1", now_s=0.0)
    assert end(state, "p4", [list(range(100, 111))]) == (False, None, "lease-quota")
    state.report(sent=["p1"], received=[], failed=[])
    assert end(state, "p5", [list(range(100, 151))]) == (False, None, "lease-quota")
    assert end(state, "p6", [list(range(100, 150))]).keep_blocks
    assert state.leased_blocks == (100,)


def test_no_quota_is_the_default() -> None:
    state = scheduler(fence_slots=300)
    assert all(end(state, f"p{number}", [[number]]).keep_blocks for number in range(300))
    assert (state.lease_count, state.leased_blocks) == (300, (300,))


@pytest.mark.parametrize("quota", ["max_leases", "max_leased_blocks"])
def test_a_quota_of_nothing_is_refused(quota: str) -> None:
    with pytest.raises(InvalidConfig, match="max_leases"):
        scheduler(**{quota: 0})
