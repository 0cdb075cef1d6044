"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_helpers import consumer_params, scheduler, with_ticket

from kv_scheduler_state import SchedulerState
from kv_scheduler_state._handovers import HandOver, HandOvers, key_of
from kv_scheduler_state._ticket import HandoffTicket, PeerAddress


class Record:
    """A holder of a ticket, as `HandOvers` sees one."""

    def __init__(self, engine: str, request_id: str, nonce: str, fence: tuple[int, int] | None = None) -> None:
        peer = PeerAddress(engine, "127.0.0.1", 5600, 1, 1, 1, None, None)
        self.ticket = HandoffTicket("handoff", peer, request_id, (), nonce=nonce, fence=fence)
        self.state = "queued"
        self.hand_over: HandOver | None = None


@given(
    st.lists(
        st.tuples(st.sampled_from("AB"), st.sampled_from("xy"), st.sampled_from("12"), st.integers(0, 3)), max_size=30
    )
)
def test_holders_are_those_of_equal_tickets(events: list[tuple[str, str, str, int]]) -> None:
    hand_overs, waiting = HandOvers(), list[Record]()
    for engine, request_id, nonce, leaving in events:
        if leaving == 0 and waiting:
            hand_overs.leave(waiting.pop(0))
        else:
            waiting.append(Record(engine, request_id, nonce))
            hand_overs.join(waiting[-1])
        by_key: dict[object, list[Record]] = {}
        for record in waiting:
            by_key.setdefault(key_of(record.ticket), []).append(record)
        assert len(hand_overs) == len(by_key)
        shared = [{id(record.hand_over) for record in records} for records in by_key.values() if len(records) > 1]
        assert all(len(each) == 1 for each in shared)
        assert len(set().union(*shared)) == len(shared)
        for records in by_key.values():
            hand_over = records[0].hand_over
            assert hand_over.waiting == len(records) if hand_over else len(records) == 1
    for record in waiting:
        hand_overs.leave(record)
    assert len(hand_overs) == 0


def test_a_ticket_that_was_read_to_the_end_is_read_by_nobody_else() -> None:
    """As the second child of a request with n > 1 that arrives after the first one's read: a slow machine, or a fast wire."""
    hand_overs = HandOvers()
    first, late, later = Record("A", "x", "1"), Record("A", "x", "1"), Record("A", "x", "1")
    hand_overs.join(first)
    hand_overs.read_ended(first, is_passed=False, is_good=True)
    for record in (late, later):
        hand_overs.join(record)
        assert record.hand_over is not None
        assert record.hand_over.is_spent
        assert record.hand_over.is_wanted_by_others, "the peer is not told a second time"
    hand_overs.leave(late)
    again = Record("A", "x", "2")
    hand_overs.join(again)
    assert again.hand_over is None, "a later hand-over by the same id is another one"
    assert len(hand_overs) == 1


@pytest.mark.parametrize("fence", [(0, 7), None])
@pytest.mark.parametrize("is_passed", [False, True])
def test_a_ticket_whose_read_failed_or_was_passed_on_may_be_read_again(
    fence: tuple[int, int] | None, is_passed: bool
) -> None:
    """Except that without a fence nothing would tell that the peer has freed the blocks, as it may after a failure."""
    hand_overs = HandOvers()
    first, second = Record("A", "x", "1", fence), Record("A", "x", "1", fence)
    hand_overs.join(first)
    hand_overs.read_ended(first, is_passed=is_passed)
    hand_overs.join(second)
    is_used_up = fence is None and not is_passed
    assert (second.hand_over is not None and second.hand_over.is_spent) is is_used_up


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
        record = Record("A", f"x{number}", "1")
        hand_overs.join(record)
        hand_overs.read_ended(record, is_passed=False, is_good=True)
    oldest, next_one = Record("A", "x0", "1"), Record("A", "x1", "1")
    hand_overs.join(oldest)
    hand_overs.join(next_one)
    assert oldest.hand_over is None
    assert next_one.hand_over is not None
    assert len(hand_overs) == 1
