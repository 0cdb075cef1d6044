"""A consumer of streamed prompts in every state, for tests."""

from model.invariants import problems
from stream_helpers import Prompt, answer_of, consumer, early, offered, question, run

from kv_scheduler_state import UNBOUND

BLOCKS = [[11, 12, 13, 14, 15, 16, 17]]
RETRY = {"kind": "no", "reason": "busy"}


def arrive(state, *, now_s=0.0, identity=None, request_id="d1", **changes):
    values = {"prompt_tokens": 100, "identity": identity or Prompt(), "now_s": now_s}
    return state.arrive(request_id, early(serves=False, **changes), **values)


def ask(state):
    """The one new question."""
    (found,) = state.streams.take_questions()
    return found


def asking(**changes):
    state = consumer(**changes)
    assert arrive(state) == ("consumer", "", "", 0, True)
    return state, ask(state)


def final_answer():
    """A finished producer's answer."""
    state, _ = offered()
    run(state, ["plan", "last-chunk", "plan"])
    run(state, ["length"])
    state.streams.produced.ask("final", question(2, wants_final=True))
    return answer_of(state)


def load(state, tokens=100, *, computed=0, now_s=0.0):
    assert state.external_tokens("d1", computed_tokens=computed) == tokens
    new = [BLOCKS[0][computed // 16 :]]
    state.allocate("d1", block_ids=BLOCKS, new_block_ids=new, external_tokens=tokens, now_s=now_s)


def at(name, **changes):
    """A consumer in a state, its plan taken, and the number of the question that is out."""
    state, asked = asking(**changes)
    if name != "asking":
        assert state.streams.answered("d1", asked.number, offered()[1], now_s=0.0)
    if name in {"streaming", "awaiting", "stopping"}:
        load(state)
    number = asked.number
    if name in {"awaiting", "stopping"}:
        state.streams.ended("d1", (0, 0), is_done=False)
        number = ask(state).number
    state.take_step_plan(now_s=0.0)
    if name == "asking-final":  # in vain for as long as it waits for room
        state.take_step_plan(now_s=10.0)
        number = ask(state).number
    if name == "stopping":
        state.streams.answered("d1", number, {"kind": "no", "reason": "withdrawn"}, now_s=0.0)
    assert states(state) == [f"consumer-{name}"]
    return state, number


def states(state):
    assert not problems(state)
    return list(state.state_counts())


def finish(state):
    return state.finish("d1", reason="abort", block_ids=BLOCKS, computed_tokens=0, identity=UNBOUND, now_s=5.0)
