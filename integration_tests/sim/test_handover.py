"""A prompt from engine to engine through all five packages, on the fake fabric and on real NIXL: the same test bodies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from engines import EVERYWHERE, TOKENS, Engine, Prompt

from vllm_adapter.config import Settings
from vllm_adapter.scheduler.hooks import Arrival, Ending

Make = Callable[..., Engine]


@EVERYWHERE
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (4, 2)])
def test_a_prompt_arrives_byte_for_byte_and_the_blocks_come_back(make: Make, producers: int, consumers: int) -> None:
    producer, consumer = make("P", tp=producers), make("D", tp=consumers)
    free = len(producer._free)
    for tokens in (1, TOKENS, 3 * TOKENS + 5):
        source, ticket = producer.prefill(tokens)
        request = consumer.start_decode(ticket, tokens)
        assert consumer.wait_received(request)
        consumer.assert_has(request, source, tokens)
        consumer.finish(request)
    producer.wait_idle()
    assert len(producer._free) == free


@EVERYWHERE
def test_many_requests_at_once_over_two_producers(make: Make) -> None:
    producers, consumer = [make("P1"), make("P2")], make("D")
    running = []
    for number in range(12):
        source, ticket = producers[number % 2].prefill(2 * TOKENS)
        running.append((consumer.start_decode(ticket, 2 * TOKENS), source))
    for request, source in running:
        assert consumer.wait_received(request)
        consumer.assert_has(request, source, 2 * TOKENS)
    for producer in producers:
        producer.wait_idle()


@EVERYWHERE
def test_a_prefix_hit_reads_only_the_tail(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    source, ticket = producer.prefill(4 * TOKENS)
    request = consumer.start_decode(ticket, 4 * TOKENS, hit_blocks=3)
    assert consumer.wait_received(request)
    consumer.assert_has(request, source, 4 * TOKENS, hit_blocks=3)
    assert np.isnan(consumer.memory[0][0][consumer.held[request][0]]).all()
    producer.wait_idle()


def test_a_full_hit_only_notifies(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    _, ticket = producer.prefill(2 * TOKENS)
    request = consumer.start_decode(ticket, 2 * TOKENS, hit_blocks=2)
    producer.wait_idle()
    consumer.step()
    assert request not in consumer.received


def test_an_abort_before_allocation_frees_the_producer(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    _, ticket = producer.prefill(2 * TOKENS)
    consumer.side.arrived(Arrival("gone", ticket, 2 * TOKENS, identity=Prompt(2 * TOKENS)))
    consumer.side.finished(Ending("gone", "abort", 0), [[]])
    consumer.step()
    producer.wait_idle()
    consumer.step()
    assert "gone" not in consumer.received


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_prefill_that_is_aborted_hands_nothing_over(make: Make, reason: str) -> None:
    producer = make("P")
    free = len(producer._free)
    _, ticket = producer.prefill(2 * TOKENS, reason=reason)
    assert ticket is None
    assert len(producer._free) == free


def test_a_stopped_first_token_hands_over(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    source, ticket = producer.prefill(TOKENS, reason="stop")
    request = consumer.start_decode(ticket, TOKENS)
    assert consumer.wait_received(request)
    consumer.assert_has(request, source, TOKENS)


@EVERYWHERE
def test_a_read_after_the_lease_ended_is_void(make: Make) -> None:
    quick = Settings(kv_lease_duration=1.0)
    producer, consumer = make("P", settings=quick), make("D")
    _, warm = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(warm, TOKENS))
    _, ticket = producer.prefill(2 * TOKENS)
    producer.wait_idle()  # nobody asked: the lease ends, the blocks are given back and used again
    producer.prefill(2 * TOKENS)
    request = consumer.start_decode(ticket, 2 * TOKENS)
    assert consumer.wait_received(request) is False


def test_engines_of_different_models_refuse_each_other_by_name(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P"), make("D", factors={"model": "m", "dtype": "other"})
    _, ticket = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False
    assert "dtype" in caplog.text


def test_a_dead_side_channel_fails_the_request_and_delays_no_other(make: Make) -> None:
    quick = Settings(handshake_timeout_s=5.0, handshake_attempts=1)
    dead, alive, consumer = make("P1"), make("P2"), make("D", settings=quick)
    _, dead_ticket = dead.prefill(TOKENS)
    dead.listener.close()
    waiting = consumer.start_decode(dead_ticket, TOKENS)
    source, ticket = alive.prefill(TOKENS)
    request = consumer.start_decode(ticket, TOKENS)
    assert consumer.wait_received(request)
    consumer.assert_has(request, source, TOKENS)
    assert consumer.wait_received(waiting) is False


@EVERYWHERE
def test_a_restarted_producer_under_its_old_name_is_met_anew(make: Make) -> None:
    consumer = make("D", settings=Settings(read_timeout_s=2.0))
    first = make("P")
    _, ticket = first.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS))
    first.close()
    second = make("P")
    source, ticket = second.prefill(2 * TOKENS)
    lost = consumer.start_decode(ticket, 2 * TOKENS)
    if not consumer.wait_received(lost):  # the first read may still go to the old incarnation, and then it must fail
        source, ticket = second.prefill(2 * TOKENS)
        lost = consumer.start_decode(ticket, 2 * TOKENS)
        assert consumer.wait_received(lost)
    consumer.assert_has(lost, source, 2 * TOKENS)


HOSTILE: list[dict[str, object]] = [
    {"remote_block_ids": [[10**9]]},
    {"remote_block_ids": [[1], [2]]},
    {"remote_block_ids": "x"},
    {"tp_size": 3},
    {"tp_size": -1},
    {"remote_host": 7},
    {"remote_port": 99999},
    {"remote_engine_id": "someone else"},
    {"remote_request_id": None},
    {"kv_fence": [0, 0]},
    {"kv_fence": [10**6, 5]},
    {"kv_dialect": 10**6},
]


def test_a_hostile_ticket_is_refused_or_fails_and_the_next_one_is_served(make: Make) -> None:
    quick = Settings(handshake_timeout_s=5.0, handshake_attempts=1, read_timeout_s=5.0)
    producer, consumer = make("P"), make("D", settings=quick)
    for change in HOSTILE:
        _, ticket = producer.prefill(TOKENS)
        assert ticket is not None
        request = consumer.start_decode({**ticket, **change}, TOKENS)
        if consumer.state.external_tokens(request, computed_tokens=0):
            assert consumer.wait_received(request) is False, change
        source, ticket = producer.prefill(2 * TOKENS)
        good = consumer.start_decode(ticket, 2 * TOKENS)
        assert consumer.wait_received(good), change
        consumer.assert_has(good, source, 2 * TOKENS)
