"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import consumer_params, scheduler, with_ticket

from kv_scheduler_state import SchedulerState
from kv_scheduler_state.records import ConsumerRecord, HandOver
from kv_scheduler_state.scheduler.sharing import HandOvers, key_of
from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress


def joined(
    hand_overs: HandOvers, engine: str, request_id: str, nonce: str, fence: tuple[int, int] | None = None
) -> ConsumerRecord:
    """Return a new holder of a ticket."""
    peer = PeerAddress(engine, "127.0.0.1", 5600)
    ticket = HandoffTicket("handoff", peer, request_id, (), nonce=nonce, fence=fence)
    record = ConsumerRecord("queued", ticket, 48)
    hand_overs.join(record)
    return record


def read(hand_overs: HandOvers, hand_over: HandOver, *, is_passed: bool = False, is_good: bool = False) -> None:
    hand_over.waiting -= 1
    hand_over.reading += 1
    hand_overs.read_ended(hand_over, is_passed=is_passed, is_good=is_good)


def held(record: ConsumerRecord) -> HandOver:
    assert record.hand_over is not None
    return record.hand_over


@given(
    st.lists(
        st.tuples(st.sampled_from("AB"), st.sampled_from("xy"), st.sampled_from("12"), st.integers(0, 3)), max_size=30
    )
)
def test_holders_are_those_of_equal_tickets(events: list[tuple[str, str, str, int]]) -> None:
    hand_overs, waiting = HandOvers(), list[ConsumerRecord]()
    for engine, request_id, nonce, leaving in events:
        if leaving == 0 and waiting:
            hand_overs.leave(held(waiting.pop(0)))
        else:
            waiting.append(joined(hand_overs, engine, request_id, nonce))
        by_key: dict[object, list[ConsumerRecord]] = {}
        for record in waiting:
            by_key.setdefault(key_of(record.ticket), []).append(record)
        assert len(hand_overs._live) == len(by_key)
        assert len({id(record.hand_over) for record in waiting}) == len(by_key)
        for records in by_key.values():
            assert {held(record).waiting for record in records} == {len(records)}
    for record in waiting:
        hand_overs.leave(held(record))
    assert len(hand_overs._live) == 0


def test_a_ticket_that_was_read_to_the_end_is_read_only_once() -> None:
    """As the second child of a request with n > 1 that arrives after the first one's read: a slow machine, or a fast wire."""
    hand_overs = HandOvers()
    first = held(joined(hand_overs, "A", "x", "1"))
    read(hand_overs, first, is_good=True)
    late, later = (held(joined(hand_overs, "A", "x", "1")) for _ in range(2))
    assert late.is_spent
    assert later.is_spent
    assert late.is_wanted_by_others, "the peer is not notified a second time"
    hand_overs.leave(late)
    again = joined(hand_overs, "A", "x", "2")
    assert not held(again).is_spent, "a later hand-over by the same id is another one"
    assert len(hand_overs._live) == 1


@pytest.mark.parametrize("fence", [(0, 7), None])
@pytest.mark.parametrize("is_passed", [False, True])
def test_a_ticket_whose_read_failed_or_was_passed_on_may_be_read_again(
    fence: tuple[int, int] | None, is_passed: bool
) -> None:
    """Except that without a fence nothing would tell that the peer has freed the blocks, as it may after a failure."""
    hand_overs = HandOvers()
    first = held(joined(hand_overs, "A", "x", "1", fence))
    read(hand_overs, first, is_passed=is_passed)
    second = held(joined(hand_overs, "A", "x", "1", fence))
    assert second.is_spent is (fence is None and not is_passed)


BLOCKS = [[7, 8, 9]]


def _read(state: SchedulerState, request_id: str) -> None:
    tokens = state.external_tokens(request_id, computed_tokens=0)
    assert tokens == 48
    state.allocate(request_id, block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=tokens, now_s=0.0)
    assert [order.request_id for order in state.take_step_plan(now_s=0.0).reads] == [request_id]


def _end(
    state: SchedulerState, reason: Literal["length", "abort"], *, reported: tuple[list[str], list[str]] | None = None
) -> None:
    if reported is not None:
        state.report(sent=[], received=reported[0], failed=reported[1])
    state.finish("d1", reason=reason, block_ids=BLOCKS, computed_tokens=0, now_s=1.0)


@pytest.mark.never_wrong("B7")
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    "end", ["good", "failed", "aborted while reading", "aborted before the order", "aborted while queued", "hit"]
)
def test_a_ticket_without_a_fence_is_not_read_after_its_peer_was_told(
    end: str, policy: Literal["fail", "recompute"]
) -> None:
    """Truth: vLLM's own peer frees the blocks at the first notification, and its tickets have no fence to tell so."""
    state = scheduler(load_failure_policy=policy)
    with_ticket(state, "d1")
    if end == "aborted while queued":
        _end(state, "abort")
    elif end == "hit":
        state.external_tokens("d1", computed_tokens=48)
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=[[]], external_tokens=0, now_s=0.0)
        _end(state, "length")
    elif end == "aborted before the order":
        tokens = state.external_tokens("d1", computed_tokens=0)
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=tokens or 0, now_s=0.0)
        _end(state, "abort")
        state.report(sent=[], received=["d1"], failed=["d1"])
    else:
        _read(state, "d1")
        if end == "aborted while reading":
            _end(state, "abort")
            with_ticket(state, "meanwhile")
            assert not state.external_tokens("meanwhile", computed_tokens=0)
            state.report(sent=[], received=["d1"], failed=["d1"])
        else:
            _end(state, "length", reported=(["d1"], ["d1"] if end == "failed" else []))
    state.take_step_plan(now_s=1.0)
    with_ticket(state, "d2")
    assert state.external_tokens("d2", computed_tokens=0) == 0
    state.allocate("d2", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=0, now_s=1.0)
    assert state.take_step_plan(now_s=1.0).reads == (), "the peer is not told a second time"
    with_ticket(state, "d3", remote_request_id="another")
    assert state.external_tokens("d3", computed_tokens=0) == 48


def test_a_read_that_is_passed_on_is_read_by_the_next_holder_and_not_after_that() -> None:
    state = scheduler()
    with_ticket(state, "d1")
    with_ticket(state, "d2")
    _read(state, "d1")
    _end(state, "abort")
    state.take_step_plan(now_s=1.0)
    state.report(sent=[], received=["d1"], failed=["d1"])
    _read(state, "d2")
    state.report(sent=[], received=["d2"], failed=["d2"])
    with_ticket(state, "d3")
    assert state.external_tokens("d3", computed_tokens=0) == 0


def test_a_read_that_no_worker_has_seen_is_passed_on_without_a_notification() -> None:
    state = scheduler()
    with_ticket(state, "d1")
    with_ticket(state, "d2")
    state.external_tokens("d1", computed_tokens=0)
    state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=48, now_s=0.0)
    _end(state, "abort")
    plan = state.take_step_plan(now_s=1.0)
    assert (plan.reads, plan.cancels, plan.failures) == ((), (), ("d1",))
    state.report(received=["d1"], failed=["d1"])
    assert state.external_tokens("d2", computed_tokens=0) == 48
    state.finish("d2", reason="abort", block_ids=BLOCKS, computed_tokens=0, now_s=2.0)
    assert [order.is_notify_only for order in state.take_step_plan(now_s=2.0).reads] == [True]


@pytest.mark.never_wrong("B7")
@pytest.mark.parametrize("is_readback", [False, True])
def test_an_engine_does_not_read_from_itself(is_readback: bool) -> None:
    """As where a router sends both halves of a request to one engine that does both."""
    state = scheduler(bidirectional=True, engine_id="E", recompute_threshold_tokens=0)
    flags = {"do_remote_prefill": not is_readback, "do_remote_decode": is_readback}
    for name, code in (("E", "ticket-own-engine"), ("E_dp1", "")):
        params = consumer_params(remote_engine_id=name, **flags)
        admission = state.arrive(name, params, prompt_tokens=49, now_s=0.0)
        assert admission.rejected_code == code
        assert bool(state.external_tokens(name, computed_tokens=0)) is not bool(code)


def test_the_tickets_that_are_remembered_are_bounded() -> None:
    hand_overs = HandOvers()
    for number in range(1025):
        read(hand_overs, held(joined(hand_overs, "A", f"x{number}", "1")), is_good=True)
    assert not held(joined(hand_overs, "A", "x0", "1")).is_spent
    assert held(joined(hand_overs, "A", "x1", "1")).is_spent
    assert len(hand_overs._live) == 1
