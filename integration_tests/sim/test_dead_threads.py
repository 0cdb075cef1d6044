"""Transfer threads that die: the engine steps on, every request is answered, and no block stays leased."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from engines import EVERYWHERE, TOKENS, Engine

from vllm_adapter.config import Settings

Make = Callable[..., Engine]
PROMPT = 4 * TOKENS


def kill(engine: Engine, rank: int = 0) -> None:
    """End the transfer thread of a rank as an error that it cannot get over does."""
    agent: Any = engine.workers[rank]._registration.agent

    def turn(_agent: object) -> None:
        raise SystemExit("killed by the test")

    agent._turn = turn
    with suppress(Exception):  # its next turn may come first
        agent.call_soon(lambda: None)  # wakes it
    until_s = time.monotonic() + 60
    while agent._thread.is_alive():
        assert time.monotonic() < until_s
        time.sleep(0.005)


def codes(engine: Engine) -> set[str]:
    return set((engine.side.take_stats() or {}).get("num_failed_reads", ()))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_decode_engine_whose_thread_is_dead_answers_every_request(make: Make, tp: int) -> None:
    producer, consumer = make("P", tp=tp), make("D", tp=tp)
    source, ticket = producer.prefill(PROMPT)
    good = consumer.start_decode(ticket, PROMPT)
    assert consumer.wait_received(good)
    consumer.assert_has(good, source, PROMPT)
    kill(consumer, tp - 1)
    for _ in range(3):
        _, ticket = producer.prefill(PROMPT)
        request_id = consumer.start_decode(ticket, PROMPT)
        assert not consumer.wait_received(request_id)
        consumer.finish(request_id)
    assert "thread-dead" in codes(consumer)


@EVERYWHERE
def test_a_read_on_the_wire_when_its_thread_dies_is_answered_once(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    _, ticket = producer.prefill(PROMPT)
    request_id = consumer.start_decode(ticket, PROMPT)
    kill(consumer)
    consumer.wait_received(request_id)  # good if it had ended before, and never reported twice
    for _ in range(5):
        consumer.step()


@pytest.mark.parametrize("place", ["_plan", "_post", "_on_result"])
def test_a_signal_while_the_engines_thread_reads_leaves_no_request_without_an_answer(
    make: Make, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may catch what its handler raised, and go on."""
    producer, consumer = make("P"), make("D")
    assert consumer.wait_received(consumer.start_decode(producer.prefill(PROMPT)[1], PROMPT))
    tickets = [producer.prefill(PROMPT)[1] for _ in range(2)]
    registration: Any = consumer.workers[0]._registration
    build, agent = consumer.side.build_step, registration.agent
    monkeypatch.setattr(consumer.side, "build_step", lambda *a, **k: replace(build(*a, **k), rest_s=0.5))
    is_result = place == "_on_result"
    owner = agent if is_result else registration.reads
    call, calls = getattr(owner, place), itertools.count()

    def interrupted(*arguments: object) -> Any:
        if next(calls) == (not is_result):
            raise KeyboardInterrupt
        return call(*arguments)

    if is_result:
        monkeypatch.setattr(agent, place, interrupted)
    else:
        monkeypatch.setattr(type(owner), place, lambda _, *arguments: interrupted(*arguments))
    until_s = time.monotonic() + 60
    while agent._agent.has_work:
        assert time.monotonic() < until_s
    step, consumer.step = consumer.step, lambda *_, **__: None
    requests = [consumer.start_decode(ticket, PROMPT) for ticket in tickets]
    consumer.step = step
    with pytest.raises(KeyboardInterrupt):
        consumer.step()
    for request_id in requests:
        consumer.wait_received(request_id)
    assert False in [consumer.received[request_id] for request_id in requests]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_prefill_engine_whose_thread_is_dead_gives_its_blocks_back(make: Make, tp: int) -> None:
    producer, consumer = make("P", tp=tp), make("D", tp=tp, settings=Settings(handshake_timeout_s=1.0))
    _, ticket = producer.prefill(PROMPT)
    for rank in range(tp):
        kill(producer, rank)
    producer.wait_idle()
    request_id = consumer.start_decode(ticket, PROMPT)
    assert not consumer.wait_received(request_id)
    for _ in range(3):
        _, ticket = producer.prefill(PROMPT)
        assert ticket is None, "there is nothing to read"
        producer.wait_idle()
