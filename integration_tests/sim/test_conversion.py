"""Prompts between engines whose pages differ in order or size: read whole and put in order on receipt, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import Engine

from vllm_adapter.config import Settings

Make = Callable[..., Engine]


def test_insisting_refuses_a_peer_whose_pages_cannot_be_read_whole(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make("P", tokens=48)
    consumer = make("D", settings=Settings(receive_conversion="always"))
    _, ticket = producer.prefill(48)
    assert consumer.wait_received(consumer.start_decode(ticket, 48)) is False
    assert "not-stageable" in caplog.text


def test_a_failed_conversion_is_that_requests_failure(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P", order="NHD"), make("D")
    _, ticket = producer.prefill(32)
    consumer.converters[0].refusal = MemoryError("no room")
    assert consumer.wait_received(consumer.start_decode(ticket, 32)) is False
    assert "conversion-failed" in caplog.text
    observed = consumer.workers[0].take_stats()
    assert observed is not None
    assert (len(observed["num_failed_conversions"]), "conversion_duration" in observed) == (1, False)
    consumer.converters[0].refusal = None
    consumer.take_over(producer, 32)
    observed = consumer.workers[0].take_stats()
    assert observed is not None
    assert len(observed["conversion_duration"]) == 1
    producer.wait_idle()


def test_a_void_read_is_never_put_in_order(make: Make) -> None:
    """The fence comes first: pages of an ended lease stay as they came, and the request fails for that reason."""
    producer, consumer = make("P", order="NHD", settings=Settings(kv_lease_duration=1.0)), make("D")
    consumer.take_over(producer, 16)
    done = consumer.converters[0].pages_converted
    _, ticket = producer.prefill(32)
    producer.wait_idle()
    assert consumer.wait_received(consumer.start_decode(ticket, 32)) is False
    assert consumer.converters[0].pages_converted == done
