"""Requests that are handed over to another engine, in vLLM's own scheduler: tickets, and blocks kept just long enough."""

from __future__ import annotations

from typing import Any

import pytest
from engine import FULL, PREFILL, STATE, WINDOW, hand_over, prompt
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_adapter.host import vllm as vllm_seam


def test_a_remote_decode_keeps_its_blocks_until_they_were_read(producer) -> None:
    ticket = hand_over(producer, "p", prompt(40))
    assert producer.outputs["p"][-1].finish_reason == FinishReason.LENGTH
    assert (ticket["remote_request_id"], ticket["remote_engine_id"]) == ("p", "P")
    assert (ticket["remote_num_tokens"], len(ticket["remote_block_ids"][0])) == (40, 3)
    assert producer.free_blocks == 63 - 3
    producer.step()
    (grant,) = producer.orders("grants")
    assert (grant.request_id, list(grant.fence)) == ("p", ticket["kv_fence"])
    assert producer.free_blocks == 63 - 3
    producer.step(sent=["p"])
    producer.assert_nothing_left()


def test_a_prefix_hit_hands_over_all_blocks_of_the_prompt(producer) -> None:
    first = hand_over(producer, "p1", prompt(40))
    second = hand_over(producer, "p2", prompt(60))
    assert len(second["remote_block_ids"][0]) == 4
    assert second["remote_block_ids"][0][:2] == first["remote_block_ids"][0][:2]
    producer.step(sent=["p1"])
    assert producer.free_blocks == 63 - 4  # the blocks that both had are still kept for the second
    producer.step(sent=["p2"])
    producer.assert_nothing_left()


def test_a_reader_that_is_faster_than_the_grant(producer) -> None:
    """The workers may report the read before the scheduler has ordered the lease."""
    hand_over(producer, "p", prompt(40))
    producer.step(sent=["p"])
    producer.assert_nothing_left()
    producer.step()
    producer.assert_nothing_left()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_before_the_ticket_frees_the_blocks_at_once(make_engine, steps: int) -> None:
    engine = make_engine("P", batch_tokens=32)
    engine.add("p", prompt(100), max_tokens=1, params=dict(PREFILL))
    for _ in range(steps):
        engine.step()
    engine.abort("p")
    engine.step()
    engine.assert_nothing_left()
    assert engine.orders("grants") == []


def test_an_abort_after_the_ticket_does_not_break_the_promise(producer) -> None:
    hand_over(producer, "p", prompt(40))
    producer.abort("p")
    producer.step()
    assert producer.free_blocks == 63 - 3
    producer.step(sent=["p"])
    producer.assert_nothing_left()


def test_a_lease_that_ends_unread_frees_the_blocks_like_one_that_was_read(producer) -> None:
    """The workers report both alike: to the scheduler it makes no difference why the blocks are free."""
    for number in range(4):
        hand_over(producer, f"p{number}", prompt(40, seed=number))
    producer.step(sent=["p2", "p0"])
    assert producer.free_blocks == 63 - 6
    producer.step(sent=["p1", "p3"])
    producer.assert_nothing_left()


# -------------------------------------------------------------------------------------------------------- other endings


ENDS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_REPETITION: "stop",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_IGNORED: "error",
    RequestStatus.FINISHED_ERROR: "error",
}


def test_every_end_that_vllm_knows_is_translated() -> None:
    assert set(ENDS) == {status for status in RequestStatus if RequestStatus.is_finished(status)}
    assert {status.name: reason for status, reason in ENDS.items()} == vllm_seam.END_REASONS


@pytest.mark.parametrize("status", [status for status in ENDS if status != RequestStatus.FINISHED_IGNORED])
def test_a_prompt_is_handed_over_if_its_request_ended_well(producer, status: RequestStatus) -> None:
    request = producer.add("p", prompt(40), max_tokens=9, params=dict(PREFILL))
    producer.step()
    request.status = status
    keeps_blocks, ticket = producer.connector.request_finished_all_groups(request, producer.blocks("p"))
    assert keeps_blocks is (ticket is not None) is (ENDS[status] in {"stop", "length"})


# ------------------------------------------------------------------------------------------------------------- sessions


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (STATE, FULL)], ids=["dense", "sliding", "state"])
@pytest.mark.parametrize("kind", ["prefill", "read", "early"])
def test_a_session_is_neither_handed_over_nor_read(
    make_engine, caplog: pytest.LogCaptureFixture, kind: str, specs: tuple[Any, ...]
) -> None:
    options = {"specs": specs, "prefix_caching": False}
    ticket = hand_over(make_engine("other", **options), "o", prompt(40))
    early = {"kv_stream": {"id": "0" * 32, "host": "10.0.0.1", "port": 5600}}
    params = {"prefill": PREFILL, "read": ticket, "early": {**PREFILL, **early}}[kind]
    engine = make_engine("P", **options)
    engine.add("s", prompt(40), max_tokens=1, params=dict(params), is_session=True)
    assert engine.step() == {"s": 40}
    engine.add("s", prompt(20, seed=1), max_tokens=3, is_session=True)
    assert engine.step() == {"s": 20}
    for _ in range(3):
        engine.step()
    engine.add("s", prompt(1), max_tokens=1)
    engine.run()
    assert len(engine.outputs["s"]) >= 4
    assert all(output.kv_transfer_params is None for output in engine.outputs["s"])
    assert [engine.orders(orders) for orders in ("reads", "grants")] == [[], []]
    assert caplog.text.count("ticket-session") == 1


def test_a_session_without_params_is_not_warned_of(producer, caplog: pytest.LogCaptureFixture) -> None:
    producer.add("s", prompt(40), max_tokens=1, is_session=True)
    producer.step()
    assert "ticket-session" not in caplog.text
