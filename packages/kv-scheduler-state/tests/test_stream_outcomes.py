"""Decisions against streaming a prompt: each is reported once, with its reason and what becomes of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from consumer_helpers import RETRY, asking, at, final_answer, finish
from stream_helpers import HAND_OVER, Prompt, answer_of, offered, producer, question

from kv_scheduler_state import UNBOUND
from kv_scheduler_state.ticket.early import EarlyTicket, early_params


def outcomes(state):
    """The decisions against streaming since the last call: (code, result)."""
    state.streams.take_questions()
    return [(each.code, each.result) for each in state.streams.consumed.take_outcomes()]


def of_another_prompt():
    answer = final_answer()
    return {**answer, "ticket": {**answer["ticket"], "kv_prompt": "0" * 64}}


ANSWERS: dict[str, Callable[[], Any]] = {
    "withdrawn": lambda: {"kind": "no", "reason": "withdrawn"},
    "ask-unsupported": lambda: {"kind": "no", "reason": "not-streamed", "code": "ask-unsupported"},
    "ticket-prompt": of_another_prompt,
    "timed-out": lambda: {"kind": "no", "reason": "unanswered", "code": "timed-out"},
    "busy": lambda: RETRY,
    "no-answer": lambda: None,
}


@pytest.mark.parametrize("name", ["asking", "asking-final", "awaiting"])
@pytest.mark.parametrize("reason", ANSWERS)
def test_a_prompt_that_is_not_streamed_has_one_outcome_with_its_reason(name, reason):
    """In every state that waits for an answer: the result for the prompt, with the peer's latest answer as the reason."""
    state, number = at(name, load_failure_policy="recompute")
    now_s = 11.0
    assert outcomes(state) == ([("no-room", "read-whole")] if name == "asking-final" else [])
    answer = ANSWERS[reason]()
    if answer is not None:
        state.streams.answered("d1", number, answer, now_s=now_s)
    if reason in {"timed-out", "busy", "no-answer"}:
        state.take_step_plan(now_s=now_s + 400.0)
    assert outcomes(state) == [(reason, "given-up" if name == "awaiting" else "computed-here")]
    assert outcomes(state) == []


def test_a_stream_that_is_read_or_that_its_client_leaves_has_no_outcome():
    state, asked = asking()
    state.streams.answered("d1", asked.number, final_answer(), now_s=1.0)
    assert outcomes(state) == []
    state, _ = asking()
    finish(state)
    assert outcomes(state) == []


@pytest.mark.parametrize("kind", ["offer", "final"])
def test_an_engine_reads_no_stream_of_its_own(kind):
    """A router sent both requests to one engine: the prompt is computed once more, and nothing is read or reserved."""
    state, asked = asking(engine_id="prefill-0")
    answer = offered()[1] if kind == "offer" else final_answer()
    assert state.streams.answered("d1", asked.number, answer, now_s=0.0)
    assert outcomes(state) == [("ticket-own-engine", "computed-here")]
    assert state.external_tokens("d1", computed_tokens=0) == 0


def withdraw(state, hand_over_id=HAND_OVER, secret=None, **changes):
    """Send the request by which a router withdraws a hand-over; return its admission."""
    stream = early_params(EarlyTicket(hand_over_id, "10.0.0.1", 5600), secret)
    params = {"do_remote_decode": True, "kv_stream": {**stream, "withdraw": True, **changes}}
    return state.arrive("w", params, prompt_tokens=1, identity=Prompt(), now_s=0.0)


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_a_withdrawn_hand_over_is_refused_at_once_and_leases_nothing(secret):
    state = producer()
    if secret:
        state.set_secrets((secret,))
    state.streams.produced.ask("a", question())
    assert answer_of(state) == {"kind": "no", "reason": "unknown-id"}
    assert withdraw(state, secret=secret) == ("none", "", "", 0, False)
    assert [each.answer for each in state.streams.produced.take_standings()] == [{"kind": "no", "reason": "withdrawn"}]
    state.streams.produced.ask("a", question(2))
    assert answer_of(state) == {"kind": "no", "reason": "withdrawn"}
    decision = state.finish("w", reason="length", block_ids=[[1]], computed_tokens=1, identity=UNBOUND, now_s=0.0)
    assert (decision.keep_blocks, decision.params, state.live_count) == (False, None, 0)


def test_a_withdrawal_ends_no_hand_over_whose_prompt_has_come():
    state, _ = offered()
    assert withdraw(state).role == "none"
    state.streams.produced.ask("b", question(2))
    assert answer_of(state)["kind"] == "offer"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mac": "0" * 64}, "ticket-seal"),
        ({"host": "192.0.2.1"}, "ticket-host"),
        ({"withdraw": False}, "ticket-type"),
        ({"withdraw": 1}, "ticket-type"),
        ({"why": "timeout"}, "ticket-type"),
    ],
)
def test_a_withdrawal_is_checked_as_an_early_ticket_is(changes, code):
    state = producer()
    if "mac" in changes:
        state.set_secrets((b"s" * 32,))
    assert withdraw(state, **changes).rejected_code == code
