"""vLLM's sleep mode (0.33) by the host's own calls, between whole connectors, over NIXL and its fake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from engine import BLOCK, prompt
from full_engine import CALLS_SLEEP_HOOKS, FullEngine, hand_over
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

from vllm_adapter import KVTransferConnector

Make = Callable[..., FullEngine]
SOME, OTHER = prompt(3 * BLOCK + 5, seed=1), prompt(2 * BLOCK + 3, seed=2)


def _refused(consumer: FullEngine, request_id: str, tokens: list[int], ticket: Any, logs: Any) -> str:
    """Let a read fail; return the code that its log line gives."""
    logs.clear()
    consumer.add(request_id, tokens, params=ticket)
    consumer.until(received=request_id)
    assert not consumer.received[request_id]
    consumer.run()
    (line,) = [
        r.getMessage() for r in logs.records if f"request {request_id}: its KV was not taken over" in r.getMessage()
    ]
    return line.rsplit("(", 1)[1].split(")")[0]


HOOKS = {
    "connector": ("reset_cache", "set_xfer_handshake_metadata_pp_aware"),
    "worker": ("unregister_kv_caches", "restore_kv_caches"),
    "memory": ("fill_",),
}


def _noted(calls: list[str], name: str, hook: Callable[..., Any], *words: Any) -> Any:
    calls.append(name)
    return hook(*words)


@pytest.mark.proves("sleep from vLLM 0.33 on: proof")
@pytest.mark.parametrize("wakes", [(None,), (["weights"], ["kv_cache"])], ids=["at once", "weights first"])
def test_the_first_prompt_after_a_wake_up_is_handed_over(
    make: Make, wakes: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make("P", sleeps=True), make("D", sleeps=True)
    hand_over(producer, consumer, "0", OTHER)
    for engine in (producer, consumer):
        calls: list[str] = []
        for part, names in HOOKS.items():
            for name in names:
                hook = getattr(getattr(engine, part), name)
                monkeypatch.setattr(getattr(engine, part), name, partial(_noted, calls, name, hook))
        engine.sleep(mode="abort")
        assert [engine.wake(tags=tags) for tags in wakes] == [False, True][-len(wakes) :]
        slept = ["reset_cache", "unregister_kv_caches", "fill_"]
        assert calls == [*slept, "fill_", "restore_kv_caches", "set_xfer_handshake_metadata_pp_aware"]
    hand_over(producer, consumer, "1", SOME)
    producer.assert_nothing_left()
    consumer.assert_nothing_left()


@pytest.mark.parametrize("backends", [["UCX"], ["LIBFABRIC"], ["UCX", "POSIX"]], ids=str)
def test_memory_is_let_go_by_the_back_ends_with_which_the_hosts_own_connector_sleeps(backends: list[str]) -> None:
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config={"backends": backends}
    )
    assert KVTransferConnector.supports_sleep_mode(config) is (
        CALLS_SLEEP_HOOKS and NixlConnector.supports_sleep_mode(config)
    )


@pytest.mark.full
def test_a_producer_hands_over_again_after_a_sleep(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer, other = make("P"), make("D"), make("E")
    old = hand_over(producer, other, "1", SOME)
    hand_over(producer, consumer, "0", OTHER)
    producer.sleep()
    producer.wake(weights=2)
    new = hand_over(producer, consumer, "3", SOME)
    assert new["kv_generation"] == old["kv_generation"] + 1
    # Bound to no prompt, so that it is read by this engine, which has not read it before.
    stale = {key: value for key, value in old.items() if key != "kv_prompt"}
    with caplog.at_level(logging.ERROR):
        code = _refused(consumer, "d4", OTHER, {**stale, "remote_num_tokens": len(OTHER)}, caplog)
    assert code in {"generation-mismatch", "fence-mismatch", "nixl-disconnected", "peer-disconnected"}
    hand_over(producer, consumer, "5", OTHER)
    producer.run()
    consumer.assert_nothing_left()


def test_a_read_that_is_under_way_when_its_producer_falls_asleep_fails(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = make("P"), make("D")
    hand_over(producer, consumer, "1", SOME)
    ticket = producer.prefill("p2", OTHER)
    consumer.add("d2", OTHER, params=ticket)
    with consumer.transfers_held():
        consumer.step()
        producer.discard()
    consumer.until(received="d2")
    assert not consumer.received["d2"]
    assert "request d2: its KV was not taken over" in caplog.text
    producer.step()
    producer.step()
    assert producer.sent == ["p1", "p2"], "the blocks of the lease that ended are given back, once"
    producer.worker.restore_kv_caches()
    producer.weights = 2
    producer.run()
    consumer.run()
    producer.connector.reset_cache()
    producer.prefill("p3", prompt(20, seed=9))
    hand_over(producer, consumer, "4", SOME[::-1])
    producer.assert_nothing_left()
    consumer.assert_nothing_left()


@pytest.mark.full
def test_a_ticket_of_the_first_step_after_an_unannounced_sleep_never_brings_wrong_pages(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that does not reset the cache before it discards it: our scheduler's half learns of the sleep too late."""
    producer, consumer = make("P"), make("D")
    hand_over(producer, consumer, "1", SOME)
    producer.discard()
    producer.worker.restore_kv_caches()
    producer.weights = 2
    ticket = producer.prefill("p2", OTHER)
    assert ticket is not None
    with caplog.at_level(logging.ERROR):
        assert _refused(consumer, "d2", OTHER, ticket, caplog)
    hand_over(producer, consumer, "3", SOME[::-1])


def test_a_prompt_that_outlives_the_sleep_is_handed_over_as_computed_after_it(make: Make) -> None:
    producer, consumer = make("P", batch_tokens=2 * BLOCK), make("D")
    producer.add("p1", SOME, max_tokens=1, params={"do_remote_decode": True})
    producer.step()
    producer.sleep()
    producer.wake(weights=2)
    while "p1" not in producer.outputs:
        producer.step()
    consumer.add("d1", SOME, params=producer.ticket("p1"))
    consumer.until(received="d1")
    assert consumer.received["d1"], "its fence word is in the new array"
    consumer.assert_has("d1", SOME, 2)
    producer.until(sent="p1")


def test_hooks_may_come_twice_or_alone(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    producer.worker.restore_kv_caches()
    first = hand_over(producer, consumer, "1", SOME)
    producer.sleep()
    producer.worker.unregister_kv_caches()
    producer.wake()
    producer.worker.restore_kv_caches()
    second = hand_over(producer, consumer, "2", SOME)
    assert second["kv_generation"] == first["kv_generation"] + 1


def test_a_reset_ends_leases_and_voids_their_fences(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = make("P"), make("D")
    hand_over(producer, consumer, "1", SOME)
    ticket = producer.prefill("p2", OTHER)
    assert producer.scheduler.reset_prefix_cache(reset_connector=True) is False, (
        "its blocks are in use until the lease ends"
    )
    producer.until(sent="p2")
    assert producer.scheduler.reset_prefix_cache(reset_connector=True) is True
    producer.weights = 2
    with caplog.at_level(logging.ERROR):
        assert _refused(consumer, "d2", OTHER, ticket, caplog) == "fence-mismatch"
    assert producer.prefill("p3", SOME) is None
    hand_over(producer, consumer, "4", SOME)
    assert producer.sent == ["p1", "p2", "p4"]
    producer.assert_nothing_left()
    consumer.assert_nothing_left()
