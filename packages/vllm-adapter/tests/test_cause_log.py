"""Warnings that a client can cause by the thousand."""

from __future__ import annotations

import pytest
from scheduler_engine import TEXT, Engine

from vllm_adapter.scheduler import cause_log
from vllm_adapter.scheduler.cause_log import CauseLog

OTHER = TEXT.replace("forty", "sixty")


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for text in caplog.messages if words in text]


def test_refused_tickets_log_few_lines_and_the_number_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = Engine("P"), Engine("D")
    ticket = producer.prefill("p", TEXT)
    for number in range(300):
        consumer.admit(f"d{number}", ticket, OTHER)
    assert consumer.refusals() == ["ticket-prompt"] * 300, "each is counted"
    assert len(lines(caplog, "its hand-off ticket is refused")) == 10
    consumer.admit("another-cause", {**(ticket or {}), "remote_port": 80}, TEXT)
    assert len(lines(caplog, "ticket-host")) == 1, "a flood of one cause hides no other"
    consumer.now_s += 11
    consumer.admit("later", ticket, OTHER)
    assert "request later" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("; 290 more like this were not logged")


def test_causes_beyond_the_most_share_their_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cause_log, "_MOST_CAUSES", 3)
    log = CauseLog(lambda: 0.0)
    for number in range(50):
        cause = f"cause-{number}"
        log.warning(cause, "number %d", number)
    assert len(caplog.messages) == 3 + 10
