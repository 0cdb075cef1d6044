"""Peers that go away: one blip, a closed port, a process that is gone, on the fake fabric and on real NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from awake import AwakeClock
from engines import EVERYWHERE, TOKENS, Engine

from kv_nixl_agent import AgentError
from vllm_adapter.config import Settings

Make = Callable[..., Engine]


class Blip:
    """A NIXL port whose next transfers are reported as disconnected, as often as `armed` says."""

    armed = 0

    def __init__(self, port: Any) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def check(self, transfer: Any) -> Any:
        progress = self._port.check(transfer)
        if Blip.armed:
            Blip.armed -= 1
            raise AgentError("nixl-disconnected", "injected")
        return progress

    def post(self, transfer: Any) -> Any:
        progress = self._port.post(transfer)
        # A transfer that is done at once is never checked.
        if progress == "done" and Blip.armed:
            Blip.armed -= 1
            raise AgentError("nixl-disconnected", "injected")
        return progress


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    yield
    Blip.armed = 0


def statistics(engine: Engine) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    halves: list[Any] = [*engine.workers, engine.side]
    for half in halves:
        for key, values in (half.take_stats() or {}).items():
            found.setdefault(key, []).extend(values)
    return found


@EVERYWHERE
@pytest.mark.never_wrong("B5")
@pytest.mark.parametrize("producers", [1, 2])
def test_one_disconnect_is_mended_by_a_second_attempt(make: Make, producers: int) -> None:
    producer, consumer = make("P", tp=producers), make("D", wrap=Blip)
    source, ticket = producer.prefill(2 * TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, 2 * TOKENS))
    source, ticket = producer.prefill(3 * TOKENS)
    Blip.armed = 1
    request = consumer.start_decode(ticket, 3 * TOKENS)
    assert consumer.wait_received(request)
    consumer.assert_has(request, source, 3 * TOKENS)
    found = statistics(consumer)
    assert sum(found["num_retried_reads"]) == 1
    assert found["read_failure_codes"] == []
    producer.wait_idle()
    assert sum(statistics(producer).get("num_refused_notifications", [])) == 0, "no rank was notified twice"


def test_without_retries_one_disconnect_fails_the_request(make: Make) -> None:
    producer, consumer = make("P"), make("D", wrap=Blip, settings=Settings(read_retries=0))
    _, ticket = producer.prefill(TOKENS)
    Blip.armed = 1
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False


@EVERYWHERE
@pytest.mark.never_wrong("B4")
def test_a_closed_port_fails_each_of_many_requests_at_once_and_names_the_cause(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    tickets = [producer.prefill(TOKENS)[1] for _ in range(10)]
    producer.listener.close()
    clock = AwakeClock()
    for ticket in tickets:
        began_s = clock()
        assert consumer.wait_received(consumer.start_decode(ticket, TOKENS)) is False
        assert clock() - began_s < 0.5
    clock.close()
    codes = statistics(consumer)["read_failure_codes"]
    assert codes[0] == "connection-refused"
    assert set(codes) <= {"connection-refused", "recently-failed"}


@pytest.mark.never_wrong("B12")
def test_an_idle_engine_whose_process_is_gone_is_let_go_within_seconds(make: Make) -> None:
    settings = Settings(kv_lease_duration=3.0)
    producer, consumer = make("P", settings=settings), make("D", settings=settings)
    _, ticket = producer.prefill(TOKENS)
    assert consumer.wait_received(consumer.start_decode(ticket, TOKENS))
    registration: Any = consumer.workers[0]._registration
    reads = registration.reads
    assert reads.snapshot()["engines"] == 1
    time.sleep(3.5)
    assert reads.snapshot()["engines"] == 1, "it answers its probes"
    producer.close()
    until_s = time.monotonic() + 10
    while reads.snapshot()["engines"]:
        assert time.monotonic() < until_s, "a dead engine is kept"
        time.sleep(0.1)
    assert sum(statistics(consumer)["num_dropped_engines"]) == 1
