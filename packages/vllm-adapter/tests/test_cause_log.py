"""Log lines that a client can cause by the thousand."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from factories import facts
from fakes import order
from scheduler_engine import BLOCK, PREFILL, TEXT, Engine, streaming

from kv_handshake import Codec
from kv_handshake.wire.asks import encode_ask_refusal, parse_answer
from kv_nixl_agent import AgentError
from kv_scheduler_state import UNBOUND
from kv_topology import InvalidBlocks
from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.config import Settings
from vllm_adapter.errors import code_of, message_of
from vllm_adapter.observe import recorder
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.followed import Arrival
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.wiring import make_worker
from vllm_adapter.worker.engine_thread import WorkerSide

OTHER = TEXT.replace("forty", "sixty")
TAKEN = "its KV was not taken over"
TOLD = "could not notify"


def worker(rank: int = 0) -> WorkerSide:
    here = facts(tp=2, rank=rank)
    return make_worker(here, Settings())


def fail(side: WorkerSide, request_id: str, code: str, **changes: Any) -> Any:
    """Let a read end badly on a rank; return the rank's report."""
    end = ReadEnd(
        order(request_id, peer_request_id=request_id, **changes), code, "the peer is gone", ReadTimes(0.0), 1.0
    )
    side._ends.reads.append(end)
    return side.take_report()


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for text in caplog.messages if words in text]


def test_refused_tickets_log_few_lines_and_the_number_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT) or {}
    for number in range(300):
        consumer.admit(f"d{number}", ticket, OTHER)
    assert consumer.refusals() == ["ticket-prompt"] * 300, "each is counted"
    assert len(lines(caplog, "its hand-over ticket is refused")) == 10
    consumer.admit("another-cause", {**ticket, "remote_port": 80}, TEXT)
    assert len(lines(caplog, "ticket-host")) == 1, "a flood of one cause hides no other"
    consumer.now_s += 11
    consumer.admit("later", ticket, OTHER)
    assert_last(caplog, "later")


def assert_last(caplog: pytest.LogCaptureFixture, request_id: str) -> None:
    assert f"request {request_id}" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; 290 more like this not logged")


@pytest.mark.proves("push: proof = ticket-mode")
def test_a_producer_in_push_mode_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT) or {}
    for number in range(30):
        consumer.admit(f"d{number}", {**ticket, "transfer_mode": "push", "remote_engine_id": f"P{number % 2}"}, TEXT)
    assert consumer.refusals() == ["ticket-mode"] * 30
    assert len(lines(caplog, "its hand-over ticket is refused")) == 2
    assert len(lines(caplog, "transfer_mode of engine 'P1' is 'push'")) == 1


def test_causes_beyond_the_most_share_their_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MOST_CAUSES", 3)
    log = Recorder(now_s=lambda: 0.0)
    for number in range(50):
        cause = f"cause-{number}"
        log.warning(cause, "number %d", number)
    assert len(caplog.messages) == 3 + 10


def test_failed_reads_log_few_lines_per_code_and_the_number_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer, ranks = Engine("P"), Engine("D"), (worker(0), worker(1))
    ticket = producer.prefill("p", TEXT)

    def read(request_id: str, *codes: str) -> None:
        consumer.admit(request_id, ticket, TEXT)
        consumer.allocate(request_id, [1, 2, 3], external=consumer.side.external_tokens(request_id, 0)[0] or 0)
        assert [each.request_id for each in consumer.step().reads if each.is_reported] == [request_id]
        first, second = (fail(side, request_id, code) for side, code in zip(ranks, codes, strict=True))
        reported = replace(first.aggregate(second), received=[request_id], failed=[request_id])
        consumer.side.update_output(reported)

    with caplog.at_level(logging.ERROR):
        for number in range(300):
            read(f"d{number}", "peer-silent", "peer-silent")
        assert len(lines(caplog, TAKEN)) == 10
        assert not lines(caplog, "not logged")
        read("another-cause", "fence-mismatch", "fence-mismatch")
        assert "request another-cause: its KV was not taken over by ranks 0.0, 0.1 from" in caplog.messages[-1]
        read("one-rank", "peer-silent", "fence-mismatch")
        assert "request one-rank: its KV" in caplog.messages[-1], "a rank's flood hides no other rank's reason"
        consumer.now_s += 11
        read("later", "peer-silent", "peer-silent")
    assert_last(caplog, "later")
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    counted = (consumer.side.take_stats() or {})["num_failed_reads"]
    assert len(counted) == 303, "each is counted once, by the code of its first rank"


def test_failed_notifications_log_few_lines_per_code_and_the_number_of_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    first, second = worker(0), worker(1)
    with caplog.at_level(logging.INFO):
        for number in range(300):
            fail(first, f"d{number}", "connection-refused", is_reported=False)
        assert len(lines(caplog, TOLD)) == 10
        fail(first, "another-cause", "peer-lost", is_reported=False)
        assert "could not notify request another-cause of engine" in caplog.messages[-1], (
            "a flood of one code hides no other"
        )
        now_s[0] += 11
        fail(first, "later", "connection-refused", is_reported=False)
        assert_last(caplog, "later")
        fail(second, "other-rank", "connection-refused", is_reported=False)
    assert [record.levelname for record in caplog.records][-2:] == ["WARNING", "INFO"], "one rank warns for all"
    stats = first.take_stats()
    assert stats is not None
    assert len(stats["num_failed_notifications"]) == 302, "each is counted"


def test_refused_calls_of_the_host_log_few_lines_with_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    for number in range(300):
        engine.allocate(f"never-seen-{number}", [1])
    refused = lines(caplog, "allocation failed")
    assert len(refused) == 10
    assert all("Traceback" in (record.exc_text or "") for record in caplog.records)
    engine.now_s += 11
    engine.allocate("later", [1])
    assert_last(caplog, "later")


def test_prompts_that_cannot_be_shortened_log_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(groups=(CacheGroup("state", BLOCK, 0, 0, ("layers.0",)),))
    for number in range(300):
        engine.side.arrived(Arrival(f"r{number}", PREFILL, 41, UNBOUND))
    assert len(lines(caplog, "could not be left out here")) == 10


def test_lines_of_a_rank_are_limited_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    """300 hand-overs that expire at once, or tickets that name 300 dead engines, fill no disk."""
    recorder = Recorder(is_lead=False)
    with caplog.at_level(logging.INFO):
        for number in range(300):
            recorder.warning("lease-ended", f"request {number}: its lease ended")
            recorder.info("engine-let-go", f"engine {number} is let go")
            recorder.error("mirror-copy", f"request {number}: its blocks could not be copied")
    assert [len(lines(caplog, words)) for words in ("lease ended", "let go", "not be copied")] == [10, 10, 10]
    assert [record.levelname for record in caplog.records[:3]] == ["INFO", "INFO", "ERROR"], "one rank warns for all"


def hostile_texts() -> Iterator[str]:
    """Texts that begin another line, command a terminal, reverse a line, are odd or are long."""
    draw = random.Random(4)
    odd = "\n\r\0\x7f\x85\u2028\u202e\ufeff\ud800", "\x1b[2J", "\x1b]0;x\a", "%s", "{0}"
    odd = (*odd[0], *odd[1:])
    for each in odd:
        yield f"ERROR{each}ERROR"
    for length in (3, 30, 5_000):
        yield "".join(draw.choice((*odd, "a", " ")) for _ in range(length))


def by_a_question(text: str) -> None:
    reported = {"hand_over_id": "0f" * 16, "number": 1, "nonce": "a1" * 16, "digest": "d1" * 32, "tokens": 9}
    _, body = msgspec.msgpack.decode(Codec().question_payload({**reported, "wants_final": False}, ()))
    more = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), text.encode(errors="replace").decode(): 1})
    channel()._on_question(1, msgspec.msgpack.encode((b"", more)))


def by_the_code_of_an_answer(text: str) -> None:
    here = channel()
    for said in (text.encode(errors="replace").decode()[:64], "ask-unsupported"):
        code = parse_answer(encode_ask_refusal(1, said)).code
        here._on_answer(("d", 1), ("10.0.0.1", 5600), {"wants_final": False}, code, b"")
    assert [*here._recorder._periods] == ["ask-unsupported"], "a cause is no text of a peer's"


def by_a_ticket(text: str) -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    for key in ticket or {}:
        consumer.admit(f"of-{key}", {**(ticket or {}), key: text}, TEXT)
    consumer.admit("of-a-key", {**(ticket or {}), text: text}, TEXT)
    consumer.admit("of-all", text, TEXT)


def by_a_read_that_failed(text: str) -> None:
    consumer, side = Engine("D"), worker()
    ticket = Engine("P").prefill("p", TEXT)
    consumer.admit("d", ticket, TEXT)
    consumer.allocate("d", [1, 2, 3], external=consumer.side.external_tokens("d", 0)[0] or 0)
    consumer.step()
    side._ends.reads.append(ReadEnd(order("d"), "peer-silent", text, ReadTimes(0.0), 1.0))
    consumer.side.update_output(side.take_report())


def by_a_notification_that_failed(text: str) -> None:
    end = ReadEnd(order("d", peer_request_id=text, is_reported=False), "peer-silent", text, ReadTimes(0.0), 1.0)
    side = worker()
    side._ends.reads.append(end)
    side.take_report()


def by_a_line_of_a_rank(text: str) -> None:
    recorder = Recorder()
    recorder.info("cause", f"a line of {text}")
    recorder.warning("cause", f"a line of {text}")
    recorder.error("cause", f"a line of {text}")
    recorder.trouble("heartbeat", ValueError("odd"), text)


def channel() -> Any:
    nothing: Any = SimpleNamespace()
    return streaming(nothing, recorder=Recorder(now_s=lambda: 0.0))


@pytest.mark.parametrize(
    "way",
    [
        by_a_question,
        by_the_code_of_an_answer,
        by_a_ticket,
        by_a_read_that_failed,
        by_a_notification_that_failed,
        by_a_line_of_a_rank,
    ],
)
def test_no_text_of_a_stranger_begins_a_line_or_commands_a_terminal(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for text in hostile_texts():
            caplog.clear()
            way(text)
            assert caplog.messages, text
            assert all(line.isprintable() and len(line) < 5_000 for line in caplog.messages), text


@pytest.mark.parametrize(
    "error", [AgentError("queue-full", "a (b)"), InvalidBlocks("group-count", "a (b)"), ValueError("a (b)")]
)
def test_a_record_that_keeps_the_code_apart_has_the_sentence_alone(error: Exception) -> None:
    assert message_of(error) == "a (b)"
    assert code_of(error) in {"queue-full", "group-count", "ValueError"}
