"""Questions about prompts that have begun and are not finished, through `SchedulerState`."""

from __future__ import annotations

import pytest
from stream_helpers import HAND_OVER, Prompt, early, producer, question, run

OPENED = ["arrive", "allocate", "chunk", "plan"]
BEGUN = {
    "opening": ["arrive", "allocate"],
    "offered": OPENED,
    "complete": [*OPENED, "last-chunk", "plan"],
    "voided": [*OPENED, "preempt"],
}


@pytest.mark.parametrize(("ask_s", "silence_s"), [(30.0, 2.0), (3.0, 1.0)])
@pytest.mark.parametrize("state_name", ["early", "plain", *BEGUN])
def test_readers_that_wait_for_a_begun_prompt_are_notified(state_name, ask_s, silence_s):
    """In time: a peer that hears nothing gives up. Of a prompt in the queue there is nothing to tell."""
    state = producer(stream_slots=1, stream_ask_s=ask_s)
    if state_name == "plain":
        state.arrive("p0", early(serves=True, hand_over_id="a" * 32), prompt_tokens=100, identity=Prompt(), now_s=0.0)
        run(state, ["allocate"], "p0")
    run(state, BEGUN.get(state_name, ["arrive", "allocate"] if state_name == "plain" else ["arrive"]))
    assert f"producer-{state_name}" in state.state_counts()
    state.streams.produced.ask("a", question(1, wants_final=True))
    state.take_step_plan(now_s=silence_s - 0.1)
    assert state.streams.produced.take_answers() == []
    state.streams.produced.ask("b", question(2, wants_final=True))
    state.take_step_plan(now_s=silence_s)
    reported = [("a", 1, {"kind": "no", "reason": "busy"})] if state_name != "early" else []
    assert state.streams.produced.take_answers() == reported
    state.streams.produced.cancel("a", HAND_OVER)
    state.take_step_plan(now_s=2 * silence_s)
    assert [each.asker for each in state.streams.produced.take_answers()] == (["b"] if state_name != "early" else [])
