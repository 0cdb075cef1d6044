"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

from typing import Literal

import pytest
from scheduler_helpers import consumer_params, scheduler, with_ticket

from kv_scheduler_state import UNBOUND

BLOCKS = [[7, 8, 9]]


@pytest.mark.never_wrong("B7")
@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    "end", ["good", "failed", "aborted while reading", "aborted before the order", "aborted while queued", "hit"]
)
def test_a_ticket_without_a_fence_is_not_read_after_its_peer_was_notified(
    end: str, policy: Literal["fail", "recompute"]
) -> None:
    """Truth: vLLM's own peer frees the blocks at the first notification, and its tickets have no fence to tell so."""
    state = scheduler(load_failure_policy=policy)
    with_ticket(state, "d1")
    is_aborted, is_read = end.startswith("aborted"), end not in {"aborted while queued", "hit"}
    state.external_tokens("d1", computed_tokens=0 if is_read else 48)
    if end != "aborted while queued":
        new = BLOCKS if is_read else [[]]
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=new, external_tokens=48 * is_read, now_s=0.0)
    if is_read and end != "aborted before the order":
        assert [order.request_id for order in state.take_step_plan(now_s=0.0).reads] == ["d1"]
    if is_aborted:
        state.finish("d1", reason="abort", block_ids=BLOCKS, computed_tokens=0, identity=UNBOUND, now_s=1.0)
    with_ticket(state, "meanwhile")
    assert not state.external_tokens("meanwhile", computed_tokens=0)
    state.finish("meanwhile", reason="abort", block_ids=BLOCKS, computed_tokens=0, identity=UNBOUND, now_s=1.0)
    if is_read:
        state.report(sent=[], received=["d1"], failed=["d1"] if is_aborted or end == "failed" else [])
    if not is_aborted:
        state.finish("d1", reason="length", block_ids=BLOCKS, computed_tokens=0, identity=UNBOUND, now_s=1.0)
    state.take_step_plan(now_s=1.0)
    with_ticket(state, "d2")
    assert state.external_tokens("d2", computed_tokens=0) == 0
    state.allocate("d2", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=0, now_s=1.0)
    assert state.take_step_plan(now_s=1.0).reads == (), "the peer is notified once"
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
        admission = state.arrive(name, params, prompt_tokens=49, identity=UNBOUND, now_s=0.0)
        assert admission.rejected_code == code
        assert bool(state.external_tokens(name, computed_tokens=0)) is not bool(code)


def test_the_tickets_that_are_remembered_are_bounded() -> None:
    state = scheduler()
    for number in range(1025):
        with_ticket(state, f"d{number}", remote_request_id=f"x{number}")
        state.finish(f"d{number}", reason="abort", block_ids=BLOCKS, computed_tokens=0, identity=UNBOUND, now_s=1.0)
    for name, tokens in (("x0", 48), ("x1", 0)):
        with_ticket(state, name, remote_request_id=name)
        assert state.external_tokens(name, computed_tokens=0) == tokens
