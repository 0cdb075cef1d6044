"""vLLM's own drain and pause: its loop goes on while a finished prompt keeps blocks, and ends with the last lease."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import full_engine
import pytest
from engine import BLOCK, hand_over, prompt
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import RequestStatus

from kv_nixl_agent.testing import FakeFabric


@pytest.fixture
def engine_core_handler() -> Iterator[list[int]]:
    """A SIGTERM handler from vLLM's module, as its engine core has one before it makes the scheduler; yields what it heard."""
    heard: list[int] = []
    names: dict[str, Any] = {"__name__": core.__name__, "heard": heard}
    exec("def handler(number, frame):\n    heard.append(number)\n", names)
    former = signal.signal(signal.SIGTERM, names["handler"])
    yield heard
    signal.signal(signal.SIGTERM, former)


def drain_loop(engine: Any, *, timeout_s: int) -> Any:
    """Return vLLM's engine core as far as its loop asks whether to go on."""
    loop: Any = SimpleNamespace(
        shutdown_state=EngineShutdownState.REQUESTED,
        vllm_config=SimpleNamespace(shutdown_timeout=timeout_s),
        scheduler=engine.scheduler,
        engines_running=False,
        batch_queue=None,
        _send_abort_outputs=lambda _: None,
    )
    loop.has_work = lambda: EngineCoreProc.has_work(loop)
    return loop


def goes_on(loop: Any) -> bool:
    return EngineCoreProc._handle_shutdown(loop)


def test_the_loop_goes_on_until_the_last_lease_has_ended(make_engine, engine_core_handler: list[int]) -> None:
    engine = make_engine("P")
    hand_over(engine, "p", prompt(40))
    os.kill(os.getpid(), signal.SIGTERM)
    assert engine_core_handler == [signal.SIGTERM]
    loop = drain_loop(engine, timeout_s=60)
    for _ in range(5):
        assert goes_on(loop)
        engine.step()
    engine.step(sent=["p"])
    engine.step()
    assert not goes_on(loop)
    engine.assert_nothing_left()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_waits_for_an_unread_lease_until_an_operator_revokes_it(make, mode: str) -> None:
    engine = make("P")
    assert engine.prefill("p", prompt(40)) is not None
    loop = drain_loop(engine, timeout_s=60)
    loop._idle_state_callbacks = []
    loop._pause_complete = lambda: EngineCoreProc._pause_complete(loop)
    assert EngineCoreProc.pause_scheduler(loop, mode=mode) is not None, "vLLM answers when it is idle"
    for _ in range(5):
        engine.step()
        assert loop.has_work()
    assert engine.connector._scheduler_side.revoke_leases()["leases"] == 1
    engine.until(sent="p", within_s=60)
    engine.step()
    assert not loop.has_work()
    engine.assert_nothing_left()


def test_the_engine_core_installs_its_handlers_before_it_makes_the_scheduler() -> None:
    """The connector extends the handlers that it finds, so their order in vLLM's source matters."""
    source = inspect.getsource(EngineCoreProc.run_engine_core)
    installed = re.search(r"signal\.signal\(signal\.SIGTERM, signal_handler\)", source)
    made = re.search(r"engine_core = (DP)?EngineCoreProc\(", source)
    assert installed is not None
    assert made is not None
    assert installed.start() < made.start()


@pytest.mark.parametrize("fabric", ["fake"], indirect=True)
@pytest.mark.parametrize("how", ["client left", "engine paused"])
def test_reads_that_are_aborted_midway_are_cancelled_and_did_not_fail(
    make, fabric: FakeFabric, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM ends all requests at once for /pause?mode=abort. The producer stands still, so that no read ends before that."""
    producer, consumer = make("P"), make("D")
    full_engine.hand_over(producer, consumer, "first", prompt(40))
    seen: Counter[str] = Counter()
    for half in (consumer.worker, consumer.connector):
        half.get_kv_connector_stats = partial(_noted, half.get_kv_connector_stats, seen)
    prompts = {f"d{number}": prompt(20 * BLOCK, seed=number) for number in range(3)}
    tickets = {name: producer.prefill(f"p-{name}", tokens) for name, tokens in prompts.items()}
    caplog.clear()
    fabric.agent(producer.agent_name).stop()
    for name, tokens in prompts.items():
        consumer.add(name, tokens, params=tickets[name])
    consumer.step()
    assert [order.request_id for order in consumer.orders("reads") if order.is_reported] == ["dfirst", *prompts]
    left = prompts if how == "client left" else None
    consumer.scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)
    consumer.step()
    assert sorted(consumer.orders("cancels")) == list(prompts)
    reads = consumer.side._registration.reads._transfers
    while sum(read.is_cancelled for read in list(reads.values())) < len(prompts):
        time.sleep(0.001)  # the transfer thread has posted the reads and begun to cancel them
    fabric.agent(producer.agent_name).resume()
    with caplog.at_level(logging.INFO):
        for name in prompts:
            consumer.until(received=name)
            producer.until(sent=f"p-{name}")
        consumer.step()
    assert [consumer.received[name] for name in prompts] == [False] * 3
    assert seen["num_cancelled_reads:request-ended"] == 3
    assert not [name for name in seen if name.startswith("num_failed")]
    assert {record.levelname for record in caplog.records if "its read" in record.getMessage()} == {"INFO"}
    consumer.assert_nothing_left()


def _noted(take: Any, seen: Counter[str]) -> Any:
    """Take a half's statistics, and count what is in them."""
    stats = take()
    for key, values in (stats.data if stats is not None else {}).items():
        seen.update(f"{key}:{value}" if isinstance(value, str) else key for value in values)
    return stats
