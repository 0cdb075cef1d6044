"""Lifecycles that vLLM's own connector is tested for, applied to this package."""

from __future__ import annotations

import pytest
from scheduler_helpers import (
    allocate,
    begin,
    consumer_params,
    finish,
    renewed,
    scheduler,
    with_ticket,
)

from kv_scheduler_state import UNBOUND, PeerAddress, prefill_request_params
from kv_scheduler_state.errors import InvalidEvent


def test_a_read_that_needs_no_block_is_still_reported():
    state = scheduler()
    with_ticket(state)
    allocate(state, "d1", [[4, 5, 6]], [[]], external=1)
    (order,) = state.take_step_plan(now_s=0.0).reads
    assert (order.is_notify_only, order.is_reported) == (True, True)


# ---- remote decode: the prefill side


def test_without_a_free_slot_nothing_is_handed_over_and_slots_come_back():
    state = scheduler(fence_slots=1, fence_seed=(1 << 53) - 1)
    for name in ("p1", "p2"):
        begin(state, name)
    plan = state.take_step_plan(now_s=0.0)
    assert [order.request_id for order in plan.fences] == ["p1"]
    assert plan.expects == ("p1", "p2")
    assert state.fence_slots_used == 1
    assert finish(state, "p1").params["kv_fence"] == [0, (1 << 53) - 1]
    assert finish(state, "p2") == (False, None, "no-fence-slot")
    plan = state.take_step_plan(now_s=0.0)
    assert ([grant.request_id for grant in plan.grants], plan.releases) == (["p1"], ("p2",))
    state.report(sent=["p1"], received=[], failed=[])
    assert state.fence_slots_used == 0
    begin(state, "p3", [[1]])
    assert state.take_step_plan(now_s=0.0).fences[0].generation == 1


# ---- groups, windows and states


def test_a_ticket_for_a_shorter_prompt_is_not_believed_beyond_it():
    state = scheduler()
    with_ticket(state, prompt_tokens=1000, remote_num_tokens=48)
    assert state.external_tokens("d1", computed_tokens=0) == 48
    with pytest.raises(InvalidEvent, match="expects 1000 external tokens"):
        allocate(state, "d1", [[1, 2, 3]], external=1000)


# ---- heartbeats


def beats(state, now_s):
    return [(beat.peer.engine_id, renewed(beat)) for beat in state.take_step_plan(now_s=now_s).heartbeats]


def test_heartbeats_are_grouped_by_peer_and_throttled():
    state = scheduler()
    with_ticket(state, "d1", remote_request_id="a")
    with_ticket(state, "d2", remote_request_id="b")
    with_ticket(state, "d3", remote_request_id="c", remote_engine_id="prefill-1")
    state.arrive("p1", prefill_request_params(), prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    state.arrive("local", None, prompt_tokens=1, identity=UNBOUND, now_s=0.0)
    plan = state.take_step_plan(now_s=0.0)
    assert [renewed(beat) for beat in plan.heartbeats] == [("a", "b"), ("c",)]
    assert plan.heartbeats[0].peer == PeerAddress("prefill-0", "10.0.0.1", 5600, 2, 1, 1)
    assert beats(state, 4.9) == []
    with_ticket(state, "d4", remote_request_id="d", now_s=4.9)
    assert beats(state, 4.9) == []
    assert beats(state, 5.0) == [("prefill-0", ("a", "b", "d")), ("prefill-1", ("c",))]
    assert beats(state, 10.0) == [("prefill-0", ("a", "b", "d")), ("prefill-1", ("c",))]


def test_a_late_heartbeat_is_as_late_as_that_of_the_most_overdue_peer():
    state = scheduler()
    with_ticket(state, "d1", remote_request_id="a")
    beats(state, 0.25)
    assert state.heartbeat_delay_s == 0.25
    with_ticket(state, "d2", remote_request_id="b", remote_engine_id="prefill-1", now_s=4.0)
    assert len(beats(state, 7.0)) == 2
    assert state.heartbeat_delay_s == 3.0  # prefill-1 since 4.0, prefill-0 since 5.25
    assert beats(state, 8.0) == []
    assert state.heartbeat_delay_s == 3.0
    assert len(beats(state, 12.0)) == 2
    assert state.heartbeat_delay_s == 0.0


def test_no_heartbeat_was_due_while_no_request_needed_the_peer():
    state = scheduler()
    with_ticket(state, "d1", remote_request_id="a")
    assert len(beats(state, 0.0)) == 1
    finish(state, "d1", "abort", [[]])
    with_ticket(state, "d2", remote_request_id="b", now_s=300.0)
    assert beats(state, 300.5) == [("prefill-0", ("b",))]
    assert state.heartbeat_delay_s == 0.5


# ---- the next turn reads back


def test_a_decode_hands_its_blocks_back_for_the_next_turn():
    decode = scheduler(engine_id="decode-0", bidirectional=True)
    with_ticket(decode)
    allocate(decode, "d1", [[4, 5, 6]], external=48)
    plan = decode.take_step_plan(now_s=0.0)
    assert (len(plan.reads), plan.expects) == (1, ("d1",))
    decode.report(sent=[], received=["d1"], failed=[])
    assert finish(decode, "d1", "stop", [[4, 5, 6, 7]], 60).params["do_remote_decode"] is True
    assert decode.take_step_plan(now_s=0.0).grants[0].lease_s == 480.0


def test_a_prefill_reads_back_what_is_worth_a_transfer_and_renews_no_lease_for_it():
    state, blocks = scheduler(bidirectional=True), [list(range(13))]
    for name, held, computed, external in (("p2", 60, 0, 0), ("p3", 120, 16, 104)):
        params = consumer_params(do_remote_prefill=False, do_remote_decode=True, remote_num_tokens=held)
        assert state.arrive(name, params, prompt_tokens=200, identity=UNBOUND, now_s=0.0).role == "producer"
        assert state.external_tokens(name, computed_tokens=computed) == external
    allocate(state, "p3", blocks, external=104)
    plan = state.take_step_plan(now_s=0.0)
    assert (plan.heartbeats, [order.request_id for order in plan.reads]) == ((), ["p3"])
    state.report(sent=[], received=["p3"], failed=[])
    allocate(state, "p3", blocks, [[]])
    assert finish(state, "p3", blocks=blocks, tokens=200).params["do_remote_prefill"] is True
