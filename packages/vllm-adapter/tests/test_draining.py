"""From the host's signal on no ticket is given; leases that are open go on; their blocks are counted."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prompts import Prompt
from scheduler_engine import BLOCK, PREFILL, TEXT, Engine

from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.host.shutdown import warn_of_short_drain, watch_for_shutdown
from vllm_adapter.scheduler.followed import Arrival

BLOCK_BYTES = 4096


GROUP = CacheGroup("attention", BLOCK, 0, 0, ("layers.0",), block_bytes=BLOCK_BYTES)


class Producer(Engine):
    """A prefill engine whose host can be asked to end."""

    def __init__(self) -> None:
        self.was_asked_to_end = False
        super().__init__("P", groups=(GROUP,), is_ending=lambda: self.was_asked_to_end)

    def begin(self, request_id: str) -> None:
        self.side.arrived(Arrival(request_id, PREFILL, len(TEXT), Prompt(TEXT)))
        self.allocate(request_id, [1, 2, 3])
        self.step()

    def levels(self) -> tuple[float, float]:
        """Return the changes of the two gauges since the last call."""
        stats = self.side.take_stats() or {}
        return sum(stats.get("leased_blocks", ())), sum(stats.get("leased_bytes", ()))


def test_from_the_signal_on_no_ticket_is_given_not_even_for_a_prompt_that_runs() -> None:
    producer = Producer()
    producer.begin("running")
    assert producer.prefill("before", TEXT) is not None
    producer.was_asked_to_end = True
    assert producer.end("running", TEXT, [1, 2, 3]) is None
    plan = producer.step()
    assert [grant.request_id for grant in plan.grants] == ["before"]
    assert plan.revokes == ()


def test_leased_blocks_are_a_level_of_blocks_and_bytes() -> None:
    producer = Producer()
    producer.begin("p")
    assert producer.levels() == (0, 0)
    producer.end("p", TEXT, [1, 2, 3])
    assert producer.levels() == (3, 3 * BLOCK_BYTES)
    producer.report(sent=("p",))
    assert producer.levels() == (-3, -3 * BLOCK_BYTES)


def test_a_drain_says_what_is_still_to_be_read_and_an_end_what_will_not_be(caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer()
    producer.prefill("p", TEXT)
    producer.was_asked_to_end = True
    with caplog.at_level(logging.INFO, logger="vllm.vllm_adapter"):
        producer.step()
        producer.step()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "unread requests: 1, blocks: 3 (12288 bytes" in caplog.records[0].getMessage()
        producer.side.close()
        producer.side.close()
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "its unread tickets are lost (requests: 1, " in caplog.records[1].getMessage()


def test_an_operator_revokes_the_leases_that_there_are_and_no_later_one(caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer()
    none = {"leases": 0, "leased_blocks": 0, "leased_bytes": 0}
    assert producer.side.revoke_leases() == none
    producer.begin("p")
    assert producer.end("p", TEXT, [1, 2, 3]) is not None
    assert not producer.step().revokes
    assert producer.side.revoke_leases() == {**none, "leases": 1, "leased_blocks": 3, "leased_bytes": 3 * BLOCK_BYTES}
    with caplog.at_level(logging.INFO):
        assert producer.step().revokes == ("p",)
    assert "engine P revokes all leases, as an operator asked (leases: 1, blocks: 3)" in caplog.text
    producer.begin("later")
    assert producer.end("later", TEXT, [1, 2, 3]) is not None
    assert not producer.step().revokes


# ------------------------------------------------------------------------------------------------------- the signal


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Handlers as vLLM's engine core installs them; yields the signals that reach them."""
    heard: list[int] = []

    def handler(number: int, _: Any) -> None:
        heard.append(number)

    handler.__module__ = "vllm.v1.engine.core"
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    yield heard
    for number, former in before.items():
        signal.signal(number, former)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_hosts_signal_is_heard_and_passed_on(handlers: list[int], number: int) -> None:
    first, second = watch_for_shutdown(), watch_for_shutdown()  # two connectors of one engine
    assert not first()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)
    assert handlers == [number, number]
    assert (first(), second()) == (True, True)


def test_handlers_that_are_not_the_hosts_are_left_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    watch_for_shutdown()
    assert {number: signal.getsignal(number) for number in before} == before


def test_outside_of_the_main_thread_nothing_is_installed(handlers: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=watch_for_shutdown)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------------- the warning


@pytest.mark.parametrize(
    ("timeout_s", "is_producer", "warnings"),
    [(0, True, 1), (0, False, 0), (59, True, 1), (59, False, 0), (60, True, 0), (61, True, 0), (None, True, 1)],
)
def test_an_engine_that_gives_tickets_and_may_end_within_two_leases_is_warned_of(
    caplog: pytest.LogCaptureFixture, timeout_s: int | None, is_producer: bool, warnings: int
) -> None:
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=is_producer))
    if timeout_s is not None:
        config.shutdown_timeout = timeout_s
    warn_of_short_drain(config, 30.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
    when = f"{timeout_s} s after" if timeout_s else "on"
    said = (
        f"--shutdown-timeout {timeout_s or 0}: unread tickets are lost {when} SIGTERM; set 60 or more (twice the lease)"
    )
    assert all(said in record.getMessage() for record in caplog.records)
