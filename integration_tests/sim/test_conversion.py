"""Prompts between engines whose pages differ in order or size: read whole and put in order on receipt, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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


FACTORS = {"model": "m", "dtype": "f", "vllm_version": "0.32.0"}
HALF, WHOLE = ({**FACTORS, "cache_dtype": name} for name in ("float16", "auto"))
NEGOTIATED = Settings(compatibility_policy="negotiated")


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("has_mirror", [False, True], ids=["device", "mirror"])
@pytest.mark.parametrize("theirs", [{}, {"order": "NHD"}, {"tokens": 48}, {"tp": 2}], ids=str)
def test_pages_of_narrower_elements_are_read_and_cast(make: Make, theirs: dict[str, Any], *, has_mirror: bool) -> None:
    """As a decode engine with 16 bits reads a prefill engine with 8; NumPy has no type of 8 bits."""
    producer = make("P", dtype=np.float16, factors=HALF, **theirs)
    consumer = make("D", factors=WHOLE, settings=NEGOTIATED, has_mirror=has_mirror)
    for tokens, hits in ((90, 0), (96, 2)):
        source, ticket = producer.prefill(tokens)
        request = consumer.start_decode(ticket, tokens, hit_blocks=hits)
        assert consumer.wait_received(request)
        consumer.assert_has(request, source, tokens, hit_blocks=hits, stored=np.float16)
    observed = consumer.workers[0].take_stats()
    assert observed is not None
    moved = 4 * 3 * 2 * 16 * (2 * 8) * (6 + 4)  # heads, layers, bytes; tokens and contents of ten blocks
    assert sum(observed["bytes_transferred"]) == moved
    producer.wait_idle()


@pytest.mark.proves("one element type to another otherwise: proof = element-types-differ")
@pytest.mark.parametrize(
    ("ours", "theirs", "settings", "code"),
    [
        ({"factors": WHOLE}, {"factors": HALF, "dtype": np.float16}, Settings(), "hash-mismatch"),
        ({"factors": HALF, "dtype": np.float16}, {"factors": WHOLE}, NEGOTIATED, "element-types-differ"),
    ],
    ids=["by default", "of more bytes"],
)
def test_elements_that_were_not_asked_for_or_would_lose_digits_are_refused(
    make: Make, caplog: pytest.LogCaptureFixture, ours: Any, theirs: Any, settings: Settings, code: str
) -> None:
    producer, consumer = make("P", **theirs), make("D", settings=settings, **ours)
    _, ticket = producer.prefill(32)
    assert consumer.wait_received(consumer.start_decode(ticket, 32)) is False
    assert code in caplog.text
    assert "float16" in caplog.text
