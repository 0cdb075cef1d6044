"""Engines that may not read from each other, or no longer: through all five packages, on the fake fabric and on real NIXL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import EVERYWHERE, TOKENS, Engine

from vllm_adapter.config import Settings

Make = Callable[..., Engine]


def test_engines_of_different_models_refuse_each_other_by_name(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P"), make("D", factors={"model": "m", "dtype": "other"})
    _, ticket = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False
    assert "dtype" in caplog.text


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize(
    ("release", "settings", "code"),
    [
        ("0.33.0", Settings(), "hash-mismatch"),
        ("0.33.0", Settings(may_differ="minor"), ""),
        ("0.34.0", Settings(may_differ="minor"), "release-differs"),
        ("0.34.0", Settings(compatibility_policy="off"), ""),
    ],
)
def test_a_reader_decides_which_releases_it_reads(
    make: Make, caplog: pytest.LogCaptureFixture, release: str, settings: Settings, code: str
) -> None:
    """Its own keys count: the producer, which takes patch levels alone, serves all."""
    known = {"model": "m", "dtype": "f"}
    producer = make("P", factors={**known, "vllm_version": release, "nixl_connector_version": 15})
    older = {**known, "vllm_version": "0.32.0", "nixl_connector_version": 14}
    consumer = make("D", factors=older, settings=settings)
    source, ticket = producer.prefill(TOKENS)
    read = consumer.start_decode(ticket, TOKENS)
    assert consumer.wait_received(read) is not bool(code)
    assert code in caplog.text
    if not code:
        consumer.assert_has(read, source, TOKENS)


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
