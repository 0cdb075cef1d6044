"""A prompt from engine to engine through all five packages, on the fake fabric and on real NIXL: the same test bodies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import EVERYWHERE, TOKENS, Engine

from vllm_adapter.config import Settings

Make = Callable[..., Engine]


@EVERYWHERE
@pytest.mark.parametrize(("producers", "consumers"), [(1, 1), (1, 2), (4, 2)])
def test_a_prompt_arrives_byte_for_byte_and_the_blocks_come_back(make: Make, producers: int, consumers: int) -> None:
    producer, consumer = make("P", tp=producers), make("D", tp=consumers)
    free = len(producer._free)
    for tokens in (1, TOKENS, 3 * TOKENS + 5):
        consumer.take_over(producer, tokens)
    producer.wait_idle()
    assert len(producer._free) == free


@EVERYWHERE
def test_a_read_after_the_lease_ended_is_void(make: Make) -> None:
    quick = Settings(kv_lease_duration=1.0)
    producer, consumer = make("P", settings=quick), make("D")
    _, warm = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(warm, TOKENS))
    _, ticket = producer.prefill(2 * TOKENS)
    producer.wait_idle()  # no reader came: the lease ends, the blocks are given back and used again
    producer.prefill(2 * TOKENS)
    request = consumer.start_decode(ticket, 2 * TOKENS)
    assert consumer.wait_received(request) is False


def test_engines_of_different_models_refuse_each_other_by_name(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P"), make("D", factors={"model": "m", "dtype": "other"})
    _, ticket = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False
    assert "dtype" in caplog.text


@EVERYWHERE
def test_a_restarted_producer_under_its_old_name_is_connected_anew(make: Make) -> None:
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
