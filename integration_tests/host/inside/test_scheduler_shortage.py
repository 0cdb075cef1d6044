"""Blocks that leases keep, in vLLM's own scheduler: which requests give way, and which go on."""

from __future__ import annotations

from typing import Any

import pytest
from engine import hand_over, prompt
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason


@pytest.mark.never_wrong("B13")
@pytest.mark.parametrize("asks", [{}, {"prompt_logprobs": 1}], ids=["plain", "computed whole"])
def test_a_read_gives_way_whatever_request_waits_for_leased_blocks_in_front(
    make_engine, producer, asks: dict[str, Any]
) -> None:
    engine, clock = make_engine("D", blocks=1 + 8), iter(range(1000))
    engine.connector._scheduler_side._now_s = lambda: 0.1 * next(clock)
    ticket = hand_over(producer, "p", prompt(40))
    hand_over(engine, "lease", prompt(100))  # keeps 7 of 8 blocks
    engine.add("front", prompt(60, seed=3), **asks)
    engine.add("d", prompt(40), params=ticket)
    for _ in range(50):
        assert engine.step() == {}
    assert [order.ticket.peer_request_id for order in engine.notifications] == ["p"]
    engine.run(sent=["lease"])


def test_no_read_gives_way_in_an_engine_that_is_paused(make_engine, producer, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that was read does not go on then, although nearly all blocks are free."""
    engine, clock = make_engine("D"), iter(range(1000))
    engine.connector._scheduler_side._now_s = lambda: 0.1 * next(clock)
    hand_over(engine, "lease", prompt(100))
    engine.take_over(producer, prompt(40))
    engine.add("waits", prompt(40, seed=1), params=hand_over(producer, "p1", prompt(40, seed=1)))
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step(received=["d"])
    for _ in range(50):
        assert engine.step() == {}
    assert engine.notifications == []
    assert "blocks-leased" not in caplog.text
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.step()
    engine.run(received=["waits"], sent=["lease"])


@pytest.mark.never_wrong("B10")
def test_an_answer_that_needs_blocks_kept_for_another_next_turn_goes_on(make_engine, producer) -> None:
    """They are kept for 480 s, whether that turn comes or not; an answer in progress would stand still as long."""
    engine, clock = make_engine("D", blocks=1 + 8, bidirectional_kv_xfer=True), iter(range(10_000))
    engine.connector._scheduler_side._now_s = lambda: 0.1 * next(clock)
    engine.add("turn", prompt(60), params=hand_over(producer, "p1", prompt(60)))
    engine.step()
    engine.step(received=["turn"])
    for _ in range(5):
        engine.step()
    assert engine.outputs["turn"][-1].finish_reason == FinishReason.LENGTH
    engine.add("other", prompt(40, seed=5), max_tokens=60, params=hand_over(producer, "p2", prompt(40, seed=5)))
    engine.step()
    engine.step(received=["other"])
    for _ in range(200):
        engine.step(sent=engine.plans[-1].plan.revokes)
    assert engine.orders("revokes") == ["turn"]
    assert engine.outputs["other"][-1].finish_reason == FinishReason.LENGTH
