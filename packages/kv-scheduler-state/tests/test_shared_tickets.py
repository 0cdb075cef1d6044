"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

from typing import Literal

import pytest
from scheduler_helpers import consumer_params, scheduler, with_ticket

from kv_scheduler_state import SchedulerState

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
    state = scheduler()
    for number in range(1025):
        with_ticket(state, f"d{number}", remote_request_id=f"x{number}")
        state.finish(f"d{number}", reason="abort", block_ids=BLOCKS, computed_tokens=0, now_s=1.0)
    for name, tokens in (("x0", 48), ("x1", 0)):
        with_ticket(state, name, remote_request_id=name)
        assert state.external_tokens(name, computed_tokens=0) == tokens
