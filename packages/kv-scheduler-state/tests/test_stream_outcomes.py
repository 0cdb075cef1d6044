"""Decisions against streaming a prompt: each is told once, with its reason and what becomes of the prompt."""

from __future__ import annotations

import pytest
from consumer_helpers import RETRY, ask, asking, at, final_answer, finish
from stream_helpers import offered


def outcomes(state):
    """The decisions against streaming since the last call: (code, result)."""
    state.take_stream_questions()
    return [(each.code, each.result) for each in state.take_stream_outcomes()]


@pytest.mark.parametrize("name", ["asking", "asking-final", "awaiting"])
@pytest.mark.parametrize(
    "event", ["refused", "refused with a code", "of another prompt", "silent", "unanswered", "busy"]
)
def test_a_prompt_that_is_not_streamed_has_one_outcome_with_its_reason(name, event):
    """In every state that waits for an answer: what becomes of the prompt, and the last word of the peer as the reason."""
    state, number = at("offered" if name == "asking-final" else name, load_failure_policy="recompute")
    now_s = 1.0
    if name == "asking-final":
        now_s = 31.0
        state.take_step_plan(now_s=now_s)
        number = ask(state).number
        assert [(each.code, each.result) for each in state.take_stream_outcomes()] == [("no-room", "read-whole")]
    assert outcomes(state) == []
    due = {"refused": "withdrawn", "refused with a code": "ask-unsupported", "silent": "no-answer", "busy": "busy"}
    if event == "refused":
        state.stream_answered("d1", number, {"kind": "no", "reason": "withdrawn"}, now_s=now_s)
    elif event == "refused with a code":
        no = {"kind": "no", "reason": "not-streamed", "code": "ask-unsupported"}
        state.stream_answered("d1", number, no, now_s=now_s)
    elif event == "of another prompt":
        answer = final_answer()
        ticket = {**answer["ticket"], "kv_prompt": "0" * 64}
        state.stream_answered("d1", number, {**answer, "ticket": ticket}, now_s=now_s)
        due[event] = "ticket-prompt"
    else:
        words = {"unanswered": {"kind": "no", "reason": "unanswered", "code": "timed-out"}, "busy": RETRY}
        if event in words:
            state.stream_answered("d1", number, words[event], now_s=now_s)
        due["unanswered"] = "timed-out"
        state.take_step_plan(now_s=now_s + 400.0)
    result = "given-up" if name == "awaiting" else "computed-here"
    assert outcomes(state) == [(due[event], result)]
    assert outcomes(state) == []


def test_an_offer_that_no_share_holds_and_one_of_other_blocks_are_read_whole():
    state, _ = at("offered", stream_reserve_fraction=0.3)
    state.external_tokens("d1", computed_tokens=0)
    assert outcomes(state) == [("over-share", "read-whole")]
    state, asked = asking()
    _, offer = offered()
    ticket = {**offer["ticket"], "kv_span_tokens": [8]}
    state.stream_answered("d1", asked.number, {**offer, "ticket": ticket}, now_s=0.0)
    assert outcomes(state) == [("other-blocks", "read-whole")]


def test_a_stream_that_is_read_or_that_its_client_leaves_has_no_outcome():
    state, asked = asking()
    state.stream_answered("d1", asked.number, final_answer(), now_s=1.0)
    assert outcomes(state) == []
    state, _ = asking()
    finish(state)
    assert outcomes(state) == []


@pytest.mark.parametrize("kind", ["offer", "final"])
def test_an_engine_reads_no_stream_of_its_own(kind):
    """A router sent both requests to one engine: the prompt is computed once more, and nothing is read or reserved."""
    state, asked = asking(engine_id="prefill-0")
    answer = offered()[1] if kind == "offer" else final_answer()
    assert state.stream_answered("d1", asked.number, answer, now_s=0.0)
    assert outcomes(state) == [("ticket-own-engine", "computed-here")]
    assert state.external_tokens("d1", computed_tokens=0) == 0
