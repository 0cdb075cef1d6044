"""Streamed hand-overs of a consumer, through `SchedulerState`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from consumer_helpers import BLOCKS, RETRY, arrive, ask, asking, at, final_answer, finish, load, states
from stream_helpers import DIGEST, HAND_OVER, Prompt, answer_of, consumer, early, offered, question, run

from kv_scheduler_state import UNBOUND, GroupConfig, SchedulerStateError
from kv_scheduler_state.plan import EMPTY_PLAN


def test_an_early_ticket_asks_and_parks_without_blocks():
    state, asked = asking()
    assert asked == ("d1", 1, "10.0.0.1", 5600, HAND_OVER, DIGEST, 100, False)
    assert state.external_tokens("d1", computed_tokens=0) is None
    assert (state.take_step_plan(now_s=0.0), state.streams.take_questions()) == (EMPTY_PLAN, [])
    assert state.external_tokens("d1", computed_tokens=112) == 0


def test_a_stream_is_ordered_with_everything_but_the_peers_blocks():
    state, asked = asking()
    _, offer = offered()
    state.streams.answered("d1", asked.number, offer, now_s=0.0)
    load(state, 84, computed=16)
    assert state.streams.consumed.blocks_held == 6
    plan = state.take_step_plan(now_s=0.0)
    (order,) = plan.streams.watches
    read = order.read
    ticket = read.ticket
    assert (order.tag, order.start, ticket.fence, ticket.nonce) == (100, 16, (0, 100), offer["ticket"]["kv_nonce"])
    assert (ticket.peer.engine_id, ticket.peer_request_id, read.tokens) == ("prefill-0", "p1", 100)
    assert [blocks.ids for blocks in ticket.peer_blocks] == [()]
    assert [blocks.ids for blocks in read.local_blocks] == [(12, 13, 14, 15, 16, 17)]
    assert [beat.readers for beat in plan.heartbeats] == [(("p1", read.ticket.nonce),)]
    state.streams.ended("d1", (0, 0), is_done=True)
    assert states(state) == ["consumer-streaming"]
    state.report(sent=[], received=["d1"], failed=[])
    assert (states(state), state.streams.consumed.blocks_held) == (["consumer-local"], 0)
    assert state.take_step_plan(now_s=0.0).streams.ends == ("d1",)


@pytest.mark.parametrize("reason", ["digest-mismatch", "withdrawn", "not-streamed", "unknown-id"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_refusal_is_reported_to_the_engine_only_where_blocks_wait(reason, policy):
    refusal = {"kind": "no", "reason": reason}
    state, number = at("awaiting", load_failure_policy=policy)
    assert state.streams.answered("d1", number, refusal, now_s=1.0)
    assert state.take_step_plan(now_s=1.0).streams.stops == ("d1",)
    assert state.streams.consumed.blocks_held == 7
    state.report(sent=[], received=["d1"], failed=["d1"])
    assert states(state) == ["consumer-failed" if policy == "fail" else "consumer-local"]
    if reason != "unknown-id":
        state, asked = asking(load_failure_policy=policy)
        state.streams.answered("d1", asked.number, refusal, now_s=1.0)
        assert (states(state), state.external_tokens("d1", computed_tokens=0)) == (["consumer-local"], 0)
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=0, now_s=1.0)
        assert state.take_step_plan(now_s=1.0) == EMPTY_PLAN


@pytest.mark.parametrize("name", ["asking", "awaiting"])
def test_a_busy_peer_is_asked_again_and_a_late_answer_means_nothing(name):
    state, first = at(name)
    assert state.streams.answered("d1", first, RETRY, now_s=1.0)
    assert state.streams.take_questions() == []
    state.take_step_plan(now_s=2.0)
    second = ask(state)
    assert second.number == first + 1
    assert not state.streams.answered("d1", first, offered()[1], now_s=2.0)
    assert state.streams.answered("d1", second.number, offered()[1], now_s=2.0)
    assert not state.streams.answered("d1", second.number, offered()[1], now_s=2.0)
    assert not state.streams.answered("other", 1, RETRY, now_s=2.0)


def answered_until_it_ends(name, reason):
    """Answer every question with a no, once a second; return the second in which nobody waits any more, and the state then."""
    state, number = at(name, load_failure_policy="fail")
    begun = 10 if name == "asking-final" else 0
    for second in range(begun, 1000):
        state.take_step_plan(now_s=float(second))
        for asked in state.streams.take_questions():
            number = asked.number
        if states(state) != [f"consumer-{name}"]:
            return second - begun, *states(state)
        state.streams.answered("d1", number, {"kind": "no", "reason": reason}, now_s=float(second))
    return None


@pytest.mark.parametrize(("name", "target"), [("asking", "local"), ("asking-final", "local"), ("awaiting", "stopping")])
@pytest.mark.parametrize(("reason", "end_s"), [("unanswered", 10), ("busy", 100)])
def test_only_the_word_of_a_peer_that_goes_on_moves_the_deadline_and_not_for_ever(name, target, reason, end_s):
    assert answered_until_it_ends(name, reason) == (end_s, f"consumer-{target}")


def test_a_peer_that_does_not_know_the_id_yet_does_not_move_the_deadline():
    assert answered_until_it_ends("asking", "unknown-id") == (10, "consumer-local")


@pytest.mark.parametrize("name", ["asking", "awaiting"])
def test_a_deadline_counts_from_the_last_word(name):
    state, number = at(name)
    state.streams.answered("d1", number, RETRY, now_s=8.0)
    state.take_step_plan(now_s=17.9)
    number = ask(state).number
    assert states(state) == [f"consumer-{name}"]
    state.take_step_plan(now_s=18.0)
    assert state.streams.take_questions() == []
    assert state.streams.consumed.take_cancels() == [("d1", number)]


BAD: dict[str, tuple[dict[str, Any] | None, dict[str, Any], str]] = {
    "another prompt": ({"kv_prompt": "e" * 64}, {}, "ticket-prompt"),
    "other tokens": ({"remote_num_tokens": 99}, {}, "ticket-prompt"),
    "another slot": ({}, {"slot": 1}, "ticket-range"),
    "another tag": ({}, {"tag": 1}, "ticket-range"),
    "another request": ({}, {"request_id": "p2"}, "ticket-range"),
    "no fence": ({"kv_fence": None}, {"slot": 0, "generation": 0, "tag": 0}, "ticket-missing"),
    "a readback": ({"do_remote_decode": True, "do_remote_prefill": False}, {}, "ticket-flags"),
    "no ticket": (None, {}, "ticket-not-mapping"),
    "another network": ({"remote_host": "192.0.2.1"}, {}, "ticket-host"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_that_cannot_be_trusted_is_a_refusal(case):
    ticket, changes, code = BAD[case]
    state, asked = asking()
    _, offer = offered()
    answer = {**offer, **changes, "ticket": 7 if ticket is None else {**offer["ticket"], **ticket}}
    assert state.streams.answered("d1", asked.number, answer, now_s=0.0)
    assert states(state) == ["consumer-local"]
    assert state.explain("d1", now_s=0.0)["rejected_code"] == code


def test_an_answer_of_an_unknown_kind_is_refused():
    state, asked = asking()
    with pytest.raises(SchedulerStateError, match="must be an offer"):
        state.streams.answered("d1", asked.number, {"kind": "maybe"}, now_s=0.0)
    assert states(state) == ["consumer-asking"]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Prompt, str]] = {
    "off": ({"stream_reserve_fraction": 0.0}, {}, Prompt(), "ticket-early-off"),
    "address": ({}, {"host": "192.0.2.1"}, Prompt(), "ticket-host"),
    "uncovered": ({"peer_networks": ()}, {}, Prompt(), "ticket-early-uncovered"),
    "identity": ({}, {}, Prompt(refusal="ticket-prompt-unidentified"), "ticket-prompt-unidentified"),
    "no digest": ({}, {}, Prompt(None), "ticket-prompt-unidentified"),
    "a withdrawal": ({}, {"withdraw": True}, Prompt(), "ticket-flags"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_early_ticket_that_is_refused_is_computed_here(case):
    settings, changes, identity, code = REFUSED[case]
    state = consumer(**settings)
    admission = arrive(state, identity=identity, **changes)
    assert (admission.role, admission.rejected_code) == ("none", code)
    assert state.streams is None or state.streams.take_questions() == []


def test_an_id_serves_one_request_at_a_time():
    state, _ = asking()
    assert arrive(state, request_id="d2").rejected_code == "ticket-early-shared"
    finish(state)
    assert arrive(state, request_id="d3").role == "consumer"


def test_a_whole_ticket_beside_an_early_one_is_read_plain():
    state = consumer()
    params = {**final_answer()["ticket"], "kv_stream": early(serves=False)["kv_stream"]}
    assert state.arrive("d1", params, prompt_tokens=100, identity=Prompt(), now_s=0.0).role == "consumer"
    assert states(state) == ["consumer-queued"]
    params = {**params, "remote_block_ids": [[-1]]}
    admission = state.arrive("d2", params, prompt_tokens=100, identity=Prompt(), now_s=0.0)
    assert (admission.role, admission.rejected_code) == ("none", "ticket-blocks")


WINDOW = GroupConfig("window", 16, window_tokens=34)


@pytest.mark.never_wrong("A8")
@pytest.mark.parametrize(
    ("settings", "tokens", "is_asked"),
    [
        ({"state_backoff_tokens": 1}, 1, False),  # the only token is computed here in any case
        ({"state_backoff_tokens": 1}, 2, True),
        # At the end of 49 tokens the peer gives up tokens 0 to 15, of which token 48 sees the last; at the end of 48 not.
        ({"groups": (GroupConfig(), WINDOW)}, 48, True),
        ({"groups": (GroupConfig(), WINDOW)}, 49, False),
        # As the block of tokens 16 to 31, of which token 48 sees 31.
        ({"groups": (GroupConfig(), GroupConfig("window", 16, window_tokens=18))}, 49, False),
        ({"groups": (GroupConfig(), GroupConfig("window", 16, window_tokens=18))}, 50, True),
    ],
)
def test_a_prompt_of_which_nothing_can_be_read_is_not_asked_for(settings, tokens, is_asked):
    state = consumer(**settings)
    admission = state.arrive("d1", early(serves=False), prompt_tokens=tokens, identity=Prompt(), now_s=0.0)
    assert len(state.streams.take_questions()) == is_asked
    assert (admission.role, admission.rejected_code) == ("consumer" if is_asked else "none", "")
    outcomes = [(each.request_id, each.code, each.result) for each in state.streams.consumed.take_outcomes()]
    assert outcomes == ([] if is_asked else [("d1", "nothing-to-read", "computed-here")])
    blocks = [[1, 2, 3, 4]] * len(settings.get("groups", (0,)))
    if not is_asked:  # the engine treats it as any other prompt
        assert state.external_tokens("d1", computed_tokens=0) == 0
        state.allocate("d1", block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
        state.finish("d1", reason="stop", block_ids=blocks, computed_tokens=tokens, identity=UNBOUND, now_s=0.0)
        assert (states(state), state.take_step_plan(now_s=0.0)) == ([], EMPTY_PLAN)


def test_waiting_early_requests_are_bounded():
    state = consumer()
    roles = [arrive(state, request_id=f"d{n}", hand_over_id=f"{n:032x}").role for n in range(1030)]
    assert roles == ["consumer"] * 1024 + ["none"] * 6
    assert len(state.streams.take_questions()) == 1024
    assert {(each.code, each.result) for each in state.streams.consumed.take_outcomes()} == {
        ("too-many", "computed-here")
    }
    finish(state)
    assert arrive(state, request_id="next", hand_over_id="f" * 32).role == "consumer"


WAITING = {f"consumer-{name}" for name in ("asking", "offered", "streaming", "awaiting")}


@pytest.mark.parametrize("seed", range(200))
def test_no_answers_of_a_lying_producer_keep_a_request_for_ever(seed):
    """It offers, hands over, refuses and is silent as it likes, and breaks every stream; the request ends within its waits."""
    draw = random.Random(seed)
    state, asked = asking(stream_max_breaks=draw.choice((1, 2, 3)))
    ended_s, now_s, fence_seed = 200.0, 0.0, 100
    questions, is_loading, is_refused = [asked], False, False
    while not is_refused and "consumer-reading" not in state.state_counts():
        now_s += draw.choice((0.1, 1.0, 3.0))
        assert now_s < ended_s, state.state_counts()
        if questions and draw.random() < 0.7:
            fence_seed += 10
            answer = draw.choice((offered(fence_seed=fence_seed)[1], offered(fence_seed=fence_seed)[1], RETRY, None))
            if answer is not None:
                state.streams.answered("d1", questions.pop().number, answer, now_s=now_s)
        if not is_loading and state.external_tokens("d1", computed_tokens=0):
            load(state, now_s=now_s)
            is_loading = True
        state.take_step_plan(now_s=now_s)
        if is_loading and "consumer-streaming" in state.state_counts():
            state.streams.ended("d1", (0, 0), is_done=False)
        questions = [*state.streams.take_questions(), *questions][:1]
        is_refused = WAITING.isdisjoint(state.state_counts())


def streamed(state, offer, ending):
    """Let `d1` read a stream to its end, well or badly, and end."""
    assert state.streams.answered("d1", ask(state).number, offer, now_s=0.0)
    load(state)
    if ending == "good, of an aborted request":
        finish(state)
    elif ending == "good, given up meanwhile":
        state.reset(now_s=0.0)
    state.take_step_plan(now_s=0.0)
    state.streams.ended("d1", (0, 0), is_done=ending != "bad")
    if ending == "bad":
        number = ask(state).number
        state.streams.answered("d1", number, {"kind": "no", "reason": "withdrawn"}, now_s=0.0)
    state.report(sent=[], received=["d1"], failed=["d1"] if ending == "bad" else [])
    if ending != "good, of an aborted request":
        finish(state)
    state.take_step_plan(now_s=5.0)


@pytest.mark.parametrize("late", ["a plain ticket", "an offer", "the final ticket"])
@pytest.mark.parametrize("ending", ["good", "good, of an aborted request", "good, given up meanwhile", "bad"])
def test_a_prompt_that_was_streamed_is_read_by_nobody_who_comes_late(late, ending):
    """Its peer frees the blocks: a read of them fails, and the policy may end the request."""
    peer, offer = offered()
    run(peer, ["plan", "last-chunk", "plan"])
    params = run(peer, ["length"]).params
    peer.streams.produced.ask("final", question(2))
    final = answer_of(peer)
    state = consumer(load_failure_policy="fail")
    arrive(state)
    streamed(state, offer, ending)
    if late == "a plain ticket":
        state.arrive("d2", params, prompt_tokens=100, identity=Prompt(), now_s=5.0)
    else:
        arrive(state, request_id="d2", now_s=5.0)
        assert state.streams.answered("d2", ask(state).number, offer if late == "an offer" else final, now_s=5.0)
    assert state.external_tokens("d2", computed_tokens=0) == (100 if ending == "bad" else 0)
    if ending != "bad":
        state.allocate("d2", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=0, now_s=5.0)
        assert states(state) == ["consumer-local"]
        assert state.take_step_plan(now_s=5.0) == EMPTY_PLAN
