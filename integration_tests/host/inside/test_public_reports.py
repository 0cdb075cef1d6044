"""Inputs of public bug reports in vLLM's own scheduler; the table of all of them is in docs/never-wrong.md."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from engine import SOME_TOKEN, hand_over, prompt, tokens_of
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("more", [[], [SOME_TOKEN], [SOME_TOKEN, 3, 5]], ids=len)
def test_a_prompt_of_token_ids_may_go_on_behind_what_was_computed(
    make_engine, producer, more: list[int], drafts: int
) -> None:
    """Routers that speak token ids send decode the prompt, or the prompt and the tokens that prefill has sampled.

    The decode engine may draft although the prefill engine does not.
    """
    consumer = make_engine("D", draft_tokens=drafts)
    consumer.add("d", [*prompt(40), *more], params=hand_over(producer, "p", prompt(40)))
    assert consumer.step() == {}
    assert tokens_of(consumer.reads[0]) == 40
    consumer.step(received=["d"])
    assert consumer.step() == {"d": max(1, len(more))}
    consumer.run()


def test_the_threshold_of_readbacks_does_not_touch_a_prefilled_prompt(make_engine, producer) -> None:
    consumer = make_engine("D", bidirectional_kv_xfer=True, kv_recompute_threshold=1000)
    consumer.add("d", prompt(40), params=hand_over(producer, "p", prompt(40)))
    assert consumer.step() == {}
    assert tokens_of(consumer.reads[0]) == 40
    consumer.step(received=["d"])
    while "d" not in consumer.outputs or not consumer.outputs["d"][-1].finished:
        consumer.step()
    consumer.run(sent=["d"])


def test_a_request_that_waits_for_its_grammar_is_read_afterwards_and_keeps_its_lease(make_engine, producer) -> None:
    consumer = make_engine("D", kv_lease_duration=5)
    grammar = SimpleNamespace(accept_tokens=lambda *_: True, is_terminated=lambda: False)
    waiting = [
        consumer.add(f"d{n}", prompt(40, n), params=hand_over(producer, f"p{n}", prompt(40, n))) for n in range(4)
    ]
    for request in waiting:
        request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert consumer.step() == {}
    assert not consumer.orders("reads")
    renewed = {peer_id for order in consumer.orders("heartbeats") for peer_id, _ in order.readers}
    assert renewed == {f"p{n}" for n in range(4)}
    for request in waiting:
        request.structured_output_request.grammar = grammar
    assert consumer.step() == {}
    assert len(consumer.reads) == 4
    consumer.step(received=[f"d{n}" for n in range(4)])
    assert consumer.step() == {f"d{n}": 1 for n in range(4)}
    for request in waiting:
        request.structured_output_request = None  # no tokenizer here that a grammar could advance with
    consumer.run()


def test_reads_and_clients_that_leave_while_decode_is_paused_leave_nothing(consumer, producer) -> None:
    for number in range(3):
        names = [f"{number}{name}" for name in ("read", "left", "queued")]
        for name in names[:2]:
            consumer.add(name, prompt(40, number), params=hand_over(producer, f"p{name}", prompt(40, number)))
        consumer.step()
        consumer.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        consumer.add(
            names[2], prompt(40, number + 9), params=hand_over(producer, f"p{names[2]}", prompt(40, number + 9))
        )
        consumer.abort(names[1])
        assert consumer.step(received=[names[0]], failed=[names[1]]) == {}
        consumer.scheduler.set_pause_state(PauseState.UNPAUSED)
        consumer.step()
        consumer.run(received=[names[2]])
    consumer.assert_nothing_left()


def test_prefix_cache_events_name_the_blocks_of_a_read_as_those_of_the_engine_that_computed_them(
    consumer, producer
) -> None:
    published: dict[Any, list[Any]] = {producer: [], consumer: []}
    for engine, batches in published.items():
        engine.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        engine.scheduler.kv_event_publisher = SimpleNamespace(publish=batches.append)
    consumer.take_over(producer, prompt(40))
    consumer.step(received=["d"])
    consumer.step()
    computed, read = (
        [block for batch in batches for event in batch.events for block in event.block_hashes]
        for batches in published.values()
    )
    assert len(computed) == 2
    assert read == computed
    consumer.run()


def test_neither_statistics_nor_debug_lines_are_needed(consumer, producer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "vllm.vllm_adapter")
    for engine in (producer, consumer):
        engine.scheduler.log_stats = False
    consumer.take_over(producer, prompt(40))
    consumer.run(received=["d"])
    producer.run(sent=["p"])
    for engine in (producer, consumer):
        engine.assert_nothing_left()
