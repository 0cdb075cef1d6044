"""Requests whose prompt another engine computed, in vLLM's own scheduler: from arrival to the last free block."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from engine import BLOCK, FULL, STATE, WINDOW, hand_over, ids, prompt, tokens_of
from vllm.config.kv_transfer import KVRole
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_adapter.steps import ReadFailure, StepReport

FAMILIES = {"dense": (FULL,), "sliding": (FULL, WINDOW, WINDOW), "state": (STATE, FULL)}


def test_a_remote_prefill_waits_for_its_read_and_recomputes_one_token(consumer, producer) -> None:
    request = consumer.add("d", prompt(40), params=hand_over(producer, "p", prompt(40)))
    assert consumer.step() == {}
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (read,) = consumer.reads
    assert (read.ticket.peer_request_id, tokens_of(read)) == ("p", 40)
    assert ids(read.local_blocks) == consumer.blocks("d")
    assert consumer.step() == {}  # nothing happens until the workers say so
    assert consumer.step(received=["d"]) == {}
    assert consumer.step() == {"d": 1}
    consumer.run()
    first, *_, last = consumer.outputs["d"]
    assert first.prefill_stats.num_external_cached_tokens == 40
    assert first.prefill_stats.num_computed_tokens == 0
    assert last.finish_reason == FinishReason.LENGTH


@pytest.mark.never_wrong("A5")
@pytest.mark.parametrize("role", get_args(KVRole))
def test_a_role_for_which_vllm_keeps_no_freed_block_reads_nothing(
    make_engine, producer, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    consumer = make_engine("D", role=role)
    consumer.add("d", prompt(40), params=hand_over(producer, "p", prompt(40)))
    reads = consumer.config.kv_transfer_config.is_kv_consumer
    assert consumer.step() == ({} if reads else {"d": 40})
    assert bool(consumer.orders("reads")) is reads
    assert ("ticket-role" in caplog.text) is not reads
    consumer.run(received=["d"] * reads)
    assert len(consumer.outputs["d"]) == 4


@pytest.mark.never_wrong("B2")
@pytest.mark.parametrize(
    "asks", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=lambda it: next(iter(it))
)
@pytest.mark.parametrize("overrules", [True, False], ids=["0.31", "0.30"])
def test_a_prompt_that_must_be_computed_whole_is_not_read_and_its_lease_ends_at_once(
    consumer, producer, asks: dict[str, Any], overrules: bool
) -> None:
    """vLLM 0.30 believes a connector that offers tokens for such a prompt, and ends when it makes the logprobs."""
    ticket = hand_over(producer, "p", prompt(40))
    request = consumer.add("d", prompt(40), params=ticket, **asks)
    assert request.skip_reading_prefix_cache
    request.skip_reading_prefix_cache = overrules  # the scheduler of 0.30 does not look at it
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert consumer.step() == {"d": 40}
    assert consumer.reads == []
    assert [order.ticket.peer_request_id for order in consumer.notifications] == ["p"]
    consumer.run()
    assert len(consumer.outputs["d"]) == 4


def test_blocks_that_are_being_read_are_no_prefix_for_others(consumer, producer) -> None:
    consumer.take_over(producer, prompt(64))
    consumer.add("same", prompt(64))
    assert consumer.step() == {"same": 64}
    consumer.run(received=["d"])
    assert consumer.outputs["same"][0].prefill_stats.num_cached_tokens == 0


def test_a_partial_prefix_hit_reads_the_rest(consumer, producer) -> None:
    consumer.add("warm", prompt(2 * BLOCK))
    consumer.run()
    consumer.take_over(producer, prompt(4 * BLOCK + 5))
    (read,) = consumer.reads
    assert read.local_blocks[0].first_token == 2 * BLOCK
    assert ids(read.local_blocks) == (consumer.blocks("d")[0][2:],)
    assert tokens_of(read) == 2 * BLOCK + 5
    consumer.step(received=["d"])
    assert consumer.step() == {"d": 1}
    consumer.run()
    assert consumer.outputs["d"][0].prefill_stats.num_local_cached_tokens == 2 * BLOCK


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("warm", [0, 4 * BLOCK])
def test_a_block_of_several_context_ranks_stands_for_that_many_more_tokens(
    make_engine, theirs: int, ours: int, warm: int
) -> None:
    producer, consumer = make_engine("P", dcp=theirs), make_engine("D", dcp=ours)
    if warm:
        consumer.add("warm", prompt(warm))
        consumer.run()
    tokens = prompt(9 * BLOCK + 5)
    consumer.take_over(producer, tokens)
    (read,) = consumer.reads
    hits, span = warm // (ours * BLOCK), ours * BLOCK
    assert len(consumer.blocks("d")[0]) == -(-len(tokens) // span)
    assert ids(read.local_blocks) == (consumer.blocks("d")[0][hits:],)
    assert (read.local_blocks[0].first_token, tokens_of(read)) == (hits * span, len(tokens) - hits * span)
    assert (read.ticket.peer.tp, read.ticket.peer.dcp) == (theirs, theirs)
    (peer,) = read.ticket.peer_blocks
    assert (len(peer.ids), peer.first_token) == (-(-len(tokens) // (theirs * BLOCK)), 0)


def test_a_hit_of_all_that_the_peer_holds_only_notifies_the_peer(consumer, producer) -> None:
    consumer.add("warm", prompt(4 * BLOCK))
    consumer.run()
    consumer.add("d", prompt(4 * BLOCK + 6), params=hand_over(producer, "p", prompt(4 * BLOCK)))
    assert consumer.step() == {"d": 6}
    assert consumer.reads == []
    (order,) = consumer.notifications
    assert order.ticket.peer_request_id == "p"
    assert not any(ids(order.local_blocks))
    consumer.run()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read_is_counted_and_logged_whatever_the_policy(
    make_engine, producer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Under "fail" vLLM ends the request before it passes the report of its read on; that was no cancellation."""
    consumer = make_engine("D", policy=policy)
    monkeypatch.setattr(consumer.connector, "get_kv_connector_stats", lambda: None)  # keeps the figures for the test
    consumer.take_over(producer, prompt(100))
    output, ran = consumer._run(set(), set(), {"d"}, 0)
    failure = ReadFailure("d", (0, 0), "timed-out", "request p of engine P: no answer (timed-out)")
    ran.kv_connector_output.kv_connector_worker_meta = StepReport(failures=(failure,))
    consumer._take(output, ran)
    assert (consumer.outputs.get("d", []) != []) is (policy == "fail")
    found = consumer.connector._scheduler_side.take_stats()
    assert (found["num_failed_reads"], "num_cancelled_reads" in found) == (["timed-out"], False)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "request d: its KV was not taken over by rank 0.0" in line
    consumer.run()


@pytest.mark.parametrize("inner", ["fail", "recompute"])
@pytest.mark.parametrize("outer", ["fail", "recompute"])
@pytest.mark.parametrize("specs", FAMILIES.values(), ids=FAMILIES)
def test_a_failed_read_ends_as_the_outer_policy_says(
    make_engine, caplog: pytest.LogCaptureFixture, specs: tuple[Any, ...], outer: str, inner: str
) -> None:
    producer = make_engine("P", specs=specs, prefix_caching=False)
    consumer = make_engine("D", specs=specs, prefix_caching=False, policy=inner)
    consumer.scheduler.recompute_kv_load_failures = outer == "recompute"  # as of a MultiConnector around ours
    consumer.take_over(producer, prompt(100))
    consumer.step(failed=["d"])
    if outer == "recompute":
        assert consumer.step() == {"d": 100}
        consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    consumer.run()
    end = FinishReason.LENGTH if outer == "recompute" else FinishReason.ERROR
    assert consumer.outputs["d"][-1].finish_reason == end
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_blocks_of_a_failed_read_are_no_prefix_for_anyone(consumer, producer) -> None:
    consumer.take_over(producer, prompt(64))
    consumer.run(failed=["d"])
    consumer.add("same", prompt(64))
    assert consumer.step() == {"same": 64}
    consumer.run()


def test_a_failed_read_beside_good_ones_concerns_no_other_request(make_engine, producer) -> None:
    consumer = make_engine("D", policy="recompute")
    for number in range(3):
        tokens = prompt(40, seed=number)
        consumer.add(f"d{number}", tokens, params=hand_over(producer, f"p{number}", tokens))
    consumer.add("local", prompt(40, seed=9))
    consumer.step()
    consumer.step(received=["d0", "d2"], failed=["d1"])
    consumer.run()
    cached = {name: outputs[0].prefill_stats.num_external_cached_tokens for name, outputs in consumer.outputs.items()}
    assert cached == {"d0": 40, "d1": 0, "d2": 40, "local": 0}


def test_an_abort_before_anything_was_scheduled_lets_the_producer_free_its_blocks(consumer, producer) -> None:
    consumer.add("d", prompt(40), params=hand_over(producer, "p", prompt(40)))
    consumer.abort("d")
    consumer.step()
    (order,) = consumer.orders("reads")
    assert (order.ticket.peer_request_id, order.is_reported) == ("p", False)
    assert not any(ids(order.local_blocks))
    consumer.assert_nothing_left()


def test_a_preempted_request_is_computed_here_and_read_only_once(make_engine, producer) -> None:
    consumer = make_engine("D", blocks=1 + 9)
    tokens = prompt(4 * BLOCK - 1)
    consumer.add("local", prompt(4 * BLOCK - 1, seed=1), max_tokens=40)
    consumer.step()
    request = consumer.take_over(producer, tokens, max_tokens=40)
    consumer.step(received=["d"])
    consumer.run(steps=200)
    assert request.num_preemptions == 1
    assert [len(consumer.outputs[name]) for name in ("d", "local")] == [40, 40]
    assert len(consumer.reads) == 1


def test_only_the_flag_of_a_ticket_means_local_prefill(consumer) -> None:
    consumer.add("d", prompt(40), params={"do_remote_prefill": True})
    assert consumer.step() == {"d": 40}
    consumer.run()


def test_a_step_that_comes_late_shows_how_late_its_heartbeats_are(consumer, producer) -> None:
    side, clock, seen = consumer.connector._scheduler_side, [1000.0], []
    side._now_s = lambda: clock[0]
    side._recorder.observe = lambda key, value: seen.append((key, value))
    consumer.add("d", prompt(40), params=hand_over(producer, "p", prompt(40)))
    for wait_s in (0.25, 5.0, 1.0, 10.0):
        clock[0] += wait_s
        consumer.step()
    assert [value for key, value in seen if key == "heartbeat_delay_seconds"] == [0.25, 0.0, 6.0]
    assert len(consumer.orders("heartbeats")) == 3
    consumer.run(received=["d"])
