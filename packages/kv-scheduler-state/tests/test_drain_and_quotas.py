"""Ends of prompts that are not handed over: the engine is shutting down, or too many blocks wait for readers."""

from __future__ import annotations

import pytest
from model.invariants import problems
from scheduler_helpers import FULL, WINDOW, allocate, begin, finish, scheduler, with_ticket
from stream_helpers import Prompt, early, producer, question, run

from kv_scheduler_state import FinishDecision, SchedulerState
from kv_scheduler_state.errors import InvalidConfig


def end(state: SchedulerState, request_id: str, blocks: list[list[int]], *, reason: str = "length") -> FinishDecision:
    """Let a prompt arrive, be computed and end."""
    begin(state, request_id, blocks, tokens=16)
    decision: FinishDecision = finish(state, request_id, reason, blocks, 16)
    assert problems(state) == []
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


@pytest.mark.parametrize("limit", ["drain", "max_leases", "max_leased_blocks"])
def test_a_prompt_that_a_peer_streams_is_handed_over_whatever_came_meanwhile(limit: str) -> None:
    """Its reader holds blocks and part of the data; with the policy to fail, a refusal would end the request with an error."""
    quota = {"max_leases": {"max_leases": 1}, "max_leased_blocks": {"max_leased_blocks": 8}}.get(limit, {})
    state = producer(**quota)
    run(state, ["arrive", "allocate", "chunk", "plan"])
    if limit == "drain":
        state.drain()
    else:
        assert end(state, "p9", [[8, 9]]).withheld_code == "lease-quota", "the stream's own lease is promised"
    run(state, ["last-chunk", "plan"])
    decision = run(state, ["length"])
    assert (decision.keep_blocks, decision.withheld_code) == (True, "")
    assert not state.take_step_plan(now_s=0.0).streams.voids
    after = end(state, "p10", [[10, 11]])
    assert after.withheld_code == ("draining" if limit == "drain" else "lease-quota")
    state.report(sent=["p1"], received=[], failed=[])
    assert (state.lease_count, state.leased_blocks, state.streams.produced.slots_used) == (0, (0,), 0)
    assert limit == "drain" or end(state, "p11", [[10, 11]]).keep_blocks, "its promise ended with its lease"


@pytest.mark.parametrize("event", ["abort", "length"])
def test_quotas_bound_streamed_prompts_that_nobody_reads_and_ended_ones_make_room(event: str) -> None:
    state = producer(stream_slots=8, fence_slots=8, max_leases=2, max_leased_blocks=20)
    for number in range(6):
        early_ticket = early(serves=True, hand_over_id=f"{number:032x}")
        state.arrive(f"p{number}", early_ticket, prompt_tokens=100, identity=Prompt(), now_s=0.0)
        run(state, ["allocate", "chunk", "last-chunk", "plan"], f"p{number}")
    for number in range(6):
        decision = run(state, [event], f"p{number}")
        assert decision.keep_blocks == (number < 2), "only the first two have a slot and a lease"
        state.take_step_plan(now_s=0.0)
    assert state.lease_count == (2 if event == "length" else 0)
    state.report(sent=["p0", "p1"], received=[], failed=[])
    assert (state.lease_count, state.leased_blocks, state.streams.produced.slots_used) == (0, (0,), 0)
    assert end(state, "p9", [[1] * 16]).keep_blocks, "every promise is gone"


@pytest.mark.parametrize("cause", ["drain", "no tickets"])
def test_an_engine_that_could_give_no_ticket_offers_nothing(cause: str) -> None:
    state = producer()
    if cause == "drain":
        state.drain()
    else:
        state.streams.produced.gives_offers = False
    run(state, ["arrive", "allocate", "chunk"])
    state.streams.produced.ask("a", question())
    assert (state.streams.produced.slots_used, state.take_step_plan(now_s=0.0).streams.opens) == (0, ())


def test_a_draining_engine_goes_on_reading() -> None:
    state = scheduler()
    state.drain()
    with_ticket(state)
    assert state.external_tokens("d1", computed_tokens=0) == 48
    allocate(state, "d1", [[4, 5, 6]], external=48)
    assert [order.request_id for order in state.take_step_plan(now_s=0.0).reads] == ["d1"]


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
    state.revoke_all(now_s=0.0)
    assert end(state, "p4", [list(range(100, 111))]) == (False, None, "lease-quota")
    state.report(sent=["p1"], received=[], failed=[])
    assert end(state, "p5", [list(range(100, 151))]) == (False, None, "lease-quota")
    assert end(state, "p6", [list(range(100, 150))]).keep_blocks
    assert state.leased_blocks == (100,)


@pytest.mark.parametrize("quota", ["max_leases", "max_leased_blocks"])
def test_a_quota_of_nothing_is_refused(quota: str) -> None:
    with pytest.raises(InvalidConfig, match=quota):
        scheduler(**{quota: 0})


@pytest.mark.never_wrong("B13")
@pytest.mark.parametrize("has_lease", [True, False])
def test_the_newest_read_that_waits_for_blocks_gives_way_to_a_peer(has_lease: bool) -> None:
    """Its peer is notified, and gets its blocks back; the prompt is computed here."""
    state = scheduler()
    for name in ("d1", "d2", "reading"):
        with_ticket(state, name, remote_request_id=f"far-{name}")
    state.external_tokens("reading", computed_tokens=0)
    allocate(state, "reading", [[4, 5, 6]], external=48)
    if has_lease:
        end(state, "p1", [[1, 2]])
    state.take_step_plan(now_s=0.0)
    given = [state.give_way(now_s=1.0) for _ in range(3)]
    assert given == (["d2", "d1", ""] if has_lease else ["", "", ""])
    plan = state.take_step_plan(now_s=1.0)
    assert not plan.revokes
    assert not plan.cancels
    assert [order.request_id for order in plan.reads if not order.is_reported] == [name for name in given if name]
    assert state.external_tokens("d2", computed_tokens=0) == (0 if has_lease else 48)
    assert problems(state) == []


@pytest.mark.never_wrong("B13")
def test_blocks_kept_for_a_next_turn_come_back_before_a_read_gives_way() -> None:
    """They are kept for minutes without heartbeats, and no reader counts on them yet; of handed-over prompts none is revoked."""
    state = scheduler(bidirectional=True)
    for number in (1, 2):
        with_ticket(state, f"turn{number}", remote_request_id=f"far-turn{number}")
        allocate(state, f"turn{number}", [[number]])
        assert finish(state, f"turn{number}", "length", [[number]], 16).keep_blocks
    end(state, "p1", [[3]])
    with_ticket(state, "d", remote_request_id="far-d")
    assert [state.give_way(now_s=1.0) for _ in range(4)] == ["", "", "d", ""]
    assert state.take_step_plan(now_s=1.0).revokes == ("turn1", "turn2")
    assert problems(state) == []
