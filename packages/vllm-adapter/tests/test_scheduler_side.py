"""The scheduler side with the real request machines and plain values in place of a host."""

from __future__ import annotations

from typing import Any

import pytest
from prompts import Prompt
from scheduler_engine import BLOCK, PREFILL, TEXT, Engine

from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.scheduler.chunks import ScheduledTokens
from vllm_adapter.scheduler.followed import Arrival
from vllm_adapter.steps import RankRegistration, StepReport

STATE_GROUP = CacheGroup("state", BLOCK, 0, 0, ("layers.1",))


@pytest.mark.never_wrong("A5")
@pytest.mark.parametrize(
    "ending", [{"computed_tokens": 40, "known_tokens": 39}, {"computed_tokens": 41, "in_flight_tokens": 1}]
)
def test_a_state_that_has_seen_tokens_which_are_not_kept_is_not_handed_over(ending: Any) -> None:
    engine = Engine("P", groups=(CacheGroup("attention", BLOCK, 0, 0, ("layers.0",)), STATE_GROUP))
    engine.side.arrived(Arrival("p", PREFILL, 41, Prompt(TEXT + "."), drop_tail=bool))
    engine.allocate("p", [1, 2, 3])
    engine.step()
    assert engine.end("p", TEXT, [1, 2, 3], **ending) is None


def test_a_prompt_beyond_the_lease_quota_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    producer = Engine("P", max_leases=1)
    assert producer.prefill("p0", TEXT) is not None
    assert producer.prefill("p1", TEXT) is None
    assert (producer.side.take_stats() or {})["num_withheld_tickets"] == ["lease-quota"]
    assert "p1" not in caplog.text
    producer.report(sent=("p0",))
    assert producer.prefill("p2", TEXT) is not None


def test_a_refused_allocation_of_a_parked_request_is_reported_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    consumer, producer = Engine("D"), Engine("P")
    consumer.admit("d", producer.prefill("p", TEXT), TEXT)
    consumer.side.external_tokens("d", 0)
    consumer.allocate("d", [1, 2, 3], external=1000)
    assert "allocation failed" in caplog.text
    plan = consumer.step()
    assert (plan.failures, plan.reads) == (("d",), ())
    consumer.report(received=("d",), failed=("d",))
    assert consumer.side.external_tokens("d", 0) == (0, False)
    assert [order.is_notify_only for order in consumer.step().reads] == [True]


def test_a_refused_arrival_ends_without_a_word_to_the_machines(caplog: pytest.LogCaptureFixture) -> None:
    """Its id is that of a request whose last orders no worker has heard yet: the end must not be reported for that one."""
    producer = Engine("P")
    assert producer.prefill("p", TEXT, reason="abort") is None
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    assert "arrival failed" in caplog.text
    assert "p" not in producer.side.followed
    caplog.clear()
    assert producer.end("p", TEXT, [4, 5, 6]) is None
    assert not caplog.records
    assert producer.step().releases == ("p",)
    assert producer.prefill("p", TEXT) is not None


def test_a_copy_to_the_mirror_that_was_refused_keeps_the_ticket_back(caplog: pytest.LogCaptureFixture) -> None:
    producer = Engine("P", is_mirrored=True)
    producer.side.arrived(Arrival("p", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.allocate("p", [1, 2, 3])
    plan = producer.step(scheduled=(ScheduledTokens("p", [[1, 2]], True, 0, 24),))
    assert (plan.saves, plan.completes) == ((("p", ((1, 2),)),), ())
    plan = producer.step(scheduled=(ScheduledTokens("p", [[3]], False, 24, 16),))
    assert (plan.saves, plan.completes) == ((("p", ((2, 3),)),), ("p",))
    producer.side.arrived(Arrival("q", PREFILL, len(TEXT), Prompt(TEXT)))
    producer.step(scheduled=(ScheduledTokens("q", [[1, 2, 3]], True, 0, 40),))  # never allocated
    assert "copy to the mirror failed" in caplog.text
    assert producer.end("p", TEXT, [1, 2, 3]) is not None
    producer.allocate("q", [1, 2, 3])
    assert producer.end("q", TEXT, [1, 2, 3]) is None


def test_reports_of_other_connectors_are_left_to_them(caplog: pytest.LogCaptureFixture) -> None:
    """Beside other connectors each gets the ids of all: a load of another one was an error with a traceback."""
    engine = Engine()
    text = "x" * 2 * BLOCK
    assert engine.prefill("leased", text) is not None
    engine.side.arrived(Arrival("busy", PREFILL, len(text), Prompt(text)))
    engine.allocate("busy", [4, 5])
    engine.step()
    for ids in (("unheard of",), ("busy",), ("leased",)):
        engine.side.update_output(StepReport(received=ids, failed=ids))
    for ids in (("unheard of",), ("busy",)):
        engine.side.update_output(StepReport(sent=ids))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert engine.state.live_count == 2
    engine.side.update_output(StepReport(sent=("leased", "unheard of")))
    assert engine.state.live_count == 1


def test_ranks_whose_metadata_another_connector_kept_back_are_asked_for_it() -> None:
    """vLLM's MultiConnector passes on the metadata of its first child that has any, to all children."""
    engine = Engine()
    ranks = [(0, 0), (0, 1)]
    engine.side.serve({}, ranks)
    orders = engine.side.build_step((), ())
    assert orders.question
    assert engine.prefill("early", "x" * 20) is None, "nobody could read from this engine yet"
    for rank in ranks:
        answer = RankRegistration(engine.facts.generation, b"envelope of %d" % rank[1], orders.question)
        engine.side.update_output(StepReport(registrations={rank: answer}))
    assert engine.listener.served[-1] == {(0, 0): b"envelope of 0", (0, 1): b"envelope of 1"}
    assert engine.side.build_step((), ()).question == 0
    assert engine.prefill("later", "x" * 20) is not None
