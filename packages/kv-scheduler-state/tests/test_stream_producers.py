"""Streamed hand-overs of a producer, through `SchedulerState`."""

from __future__ import annotations

import pytest
from consumer_helpers import states
from model.invariants import problems
from stream_helpers import DIGEST, HAND_OVER, Prompt, answer_of, early, offered, producer, question, run

from kv_scheduler_state import UNBOUND, SchedulerStateError, TicketReader
from kv_scheduler_state.plan import StreamRun
from kv_scheduler_state.ticket.early import EarlyTicket, early_params
from kv_scheduler_state.ticket.seal import TicketSeal

OPENED = ["arrive", "allocate", "chunk", "plan"]
WHOLE = [*OPENED, "last-chunk", "plan"]


def final_of(ticket):
    """The answer with a final ticket."""
    slot, generation = ticket["kv_fence"]
    return {"kind": "final", "request_id": "p1", "slot": slot, "generation": generation, "ticket": ticket}


def test_an_offer_names_all_but_the_blocks_and_the_lease_goes_on_with_it():
    state, offer = offered()
    ticket = offer["ticket"]
    words = {"slot": 0, "generation": 100, "tag": 100}
    assert offer == {"kind": "offer", "request_id": "p1", "ticket": ticket, **words}
    assert (ticket["remote_block_ids"], ticket["kv_fence"], ticket["kv_prompt"]) == ([[]], [0, 100], DIGEST)
    run(state, ["plan", "last-chunk", "plan"])
    final = run(state, ["length"]).params
    assert (final["kv_fence"], final["kv_nonce"]) == (ticket["kv_fence"], ticket["kv_nonce"])
    assert final["remote_block_ids"] == [[1, 2, 3, 4, 5, 6, 7]]
    (grant,) = state.take_step_plan(now_s=0.0).grants
    assert (grant.fence, grant.nonce) == ((0, 100), final["kv_nonce"])
    state.streams.produced.ask("b", question(2, wants_final=True))
    assert answer_of(state) == final_of(final)
    state.report(sent=["p1"], received=[], failed=[])
    assert (state.streams.produced.slots_used, state.live_count) == (0, 0)
    assert not problems(state)


def test_an_offer_and_its_final_ticket_are_sealed_with_one_nonce():
    secret = b"0123456789abcdef"
    state = producer(peer_networks=())
    state.set_secrets([secret])
    params = {"do_remote_decode": True, "kv_stream": early_params(EarlyTicket(HAND_OVER, "10.0.0.1", 5600), secret)}
    state.arrive("p1", params, prompt_tokens=100, identity=Prompt(), now_s=0.0)
    run(state, WHOLE[1:])
    state.streams.produced.ask("a", question())
    offer, final = answer_of(state)["ticket"], run(state, ["length"]).params
    seal, readers = TicketSeal([secret]), [TicketReader(state.config, takes_offers=each) for each in (True, False)]
    opened = [seal.opened(reader, each, "handoff") for reader, each in zip(readers, (offer, final), strict=True)]
    assert [ticket.nonce for ticket in opened] == [final["kv_nonce"]] * 2


def test_a_prompt_that_reads_besides_is_not_streamed_and_its_reader_learns_so():
    state = producer(peer_networks=("10.0.0.0/8",), stream_slots=1)
    params = {**early(serves=True), "remote_block_ids": [[1]]}
    admission = state.arrive("p1", params, prompt_tokens=100, identity=Prompt(), now_s=0.0)
    assert (admission.role, admission.is_early) == ("producer", False)
    state.streams.produced.ask("a", question())
    assert answer_of(state)["kind"] == "no"


def test_a_question_is_parked_until_there_is_an_answer():
    state = producer()
    state.streams.produced.ask("early", question(1))
    assert answer_of(state) == {"kind": "no", "reason": "unknown-id"}
    run(state, ["arrive"])
    state.streams.produced.ask("a", question(2))
    state.streams.produced.ask("final", question(3, wants_final=True))
    state.streams.produced.ask("gone", question(4))
    state.streams.produced.cancel("gone", HAND_OVER)
    state.streams.produced.cancel("gone", "another")
    assert not state.streams.produced.take_answers()
    run(state, ["allocate", "chunk"])
    ((asker, number, answer),) = state.streams.produced.take_answers()
    assert (asker, number, answer["kind"]) == ("a", 2, "offer")
    run(state, ["abort"])
    assert [(asker, answer["reason"]) for asker, _, answer in state.streams.produced.take_answers()] == [
        ("final", "withdrawn")
    ]
    state.report(sent=["p1"], received=[], failed=[])
    state.streams.produced.ask("late", question(5))
    assert answer_of(state) == {"kind": "no", "reason": "withdrawn"}


def test_questions_are_answered_for_the_same_prompt_only_and_are_bounded():
    state = producer()
    run(state, ["arrive"])
    state.streams.produced.ask("a", question(digest="e" * 64))
    assert answer_of(state) == {"kind": "no", "reason": "digest-mismatch"}
    for index in range(9):
        state.streams.produced.ask(f"a{index}", question(index + 1))
    ((asker, _, answer),) = state.streams.produced.take_answers()
    assert (asker, answer["reason"]) == ("a8", "busy")


REFUSED = {
    "no slots": "ticket-early-off",
    "no identity": "ticket-prompt-unidentified",
    "id in use": "ticket-early-shared",
    "declined": "",
    "bad ticket": "ticket-range",
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_streamed_is_handed_over_plain_and_says_so(case):
    state = producer(stream_slots=0 if case == "no slots" else 2)
    identity = UNBOUND if case == "no identity" else Prompt()
    if case == "id in use":
        run(state, ["arrive"], "p0")
    bad = {"port": 0} if case == "bad ticket" else {}
    params = {"do_remote_decode": True} if case == "declined" else early(serves=True, **bad)
    if case == "declined":
        state._producers.streams.decline(HAND_OVER)
    admission = state.arrive("p1", params, prompt_tokens=100, identity=identity, now_s=0.0)
    assert (admission.role, states(state)[-1]) == ("producer", "producer-waiting")
    assert (admission.rejected_code, admission.is_early) == (REFUSED[case], False)
    assert (state.streams is None) == (case == "no slots")
    if case in {"no identity", "declined", "bad ticket"}:  # or its reader would ask until its deadline
        state.streams.produced.ask("a", question())
        assert answer_of(state) == {"kind": "no", "reason": "not-streamed"}


@pytest.mark.parametrize("stream", [None, 7, "x", {"id": 7}, {"id": "x" * 32}, {"id": ["a"]}, "bad seal"])
def test_an_early_ticket_without_an_id_or_a_valid_seal_leaves_nothing_behind(stream):
    state = producer()
    params = {"do_remote_decode": True, "kv_stream": stream}
    if stream == "bad seal":
        state.set_secrets((b"s" * 32,))
        params = early(serves=True, mac="0" * 64)
    state.arrive("p1", params, prompt_tokens=100, identity=Prompt(), now_s=0.0)
    assert (states(state), standings(state)) == (["producer-waiting"], [])


@pytest.mark.parametrize(("way", "event"), [(["arrive"], "chunk"), (OPENED, "length"), (["arrive"], "preempt")])
def test_an_event_out_of_turn_is_refused_and_changes_nothing(way, event):
    state = producer()
    run(state, way)
    before = states(state)
    with pytest.raises(SchedulerStateError):
        run(state, [event])
    assert states(state) == before


def saves_of(state):
    plan = state.take_step_plan(now_s=0.0)
    return [(request_id, blocks[0]) for request_id, blocks in plan.saves], plan


@pytest.mark.parametrize("slots", [2, 0])
def test_a_streamed_prompt_is_saved_like_any_other(slots):
    """Without a slot it is read once it is finished, from the same mirror."""
    state = producer(uses_host_buffer=True, stream_slots=slots or 1)
    run(state, ["arrive", *([] if slots else ["whole"]), "allocate", "chunk"])
    saves, plan = saves_of(state)
    assert (saves, plan.completes) == ([("p1", (1, 2, 3))], ())
    run(state, ["last-chunk"])
    saves, plan = saves_of(state)
    assert (saves, plan.completes) == ([("p1", (4, 5, 6, 7))], ("p1",))


def test_blocks_that_a_chunk_writes_again_are_saved_and_not_published():
    state = producer(uses_host_buffer=True)
    run(state, ["arrive", "allocate"])
    state.scheduled("p1", new_block_ids=[[3]], touched_block_ids=[[2, 3]], is_prompt_complete=False, computed_tokens=40)
    saves, plan = saves_of(state)
    assert saves == [("p1", (2, 3))]
    assert plan.streams.chunks[0].runs == (StreamRun(0, (3,)),)


@pytest.mark.parametrize(
    "events",
    [
        ["arrive", "allocate", "chunk"],
        ["arrive", "allocate", "chunk", "last-chunk"],
        ["arrive", "allocate", "chunk", "reset"],
        ["arrive", "whole", "allocate", "chunk"],
    ],
    ids=["offered", "complete", "stale", "plain"],
)
def test_a_preempted_stream_saves_nothing_of_blocks_that_are_gone(events):
    state = producer(uses_host_buffer=True)
    run(state, [*events, "preempt"])
    plan = state.take_step_plan(now_s=0.0)
    assert (plan.saves, plan.completes) == ((), ())


def test_a_request_that_is_handed_over_whole_answers_with_its_final_ticket():
    state = producer()
    run(state, ["arrive", "whole"])
    state.streams.produced.ask("a", question())
    run(state, ["allocate", "chunk", "plan", "last-chunk", "plan"])
    assert not state.streams.produced.take_answers()
    assert state.streams.produced.slots_used == 0
    final = run(state, ["length"]).params
    assert answer_of(state) == final_of(final)
    with pytest.raises(SchedulerStateError):
        state.streams.produced.hand_over_whole("unknown")


def standings(state):
    return [(each.hand_over_id, each.digest, each.answer) for each in state.streams.produced.take_standings()]


def test_an_offer_stands_from_the_first_step_until_the_words_move():
    state = producer()
    run(state, ["arrive", "allocate"])
    assert standings(state) == []
    run(state, ["chunk"])
    state.streams.produced.ask("a", question())
    offer = answer_of(state)
    assert standings(state) == [(HAND_OVER, DIGEST, offer)]
    run(state, ["plan", "last-chunk", "plan"])
    assert standings(state) == [], "it stands as it did"
    run(state, ["preempt"])
    assert standings(state) == [(HAND_OVER, "", None)]
    run(state, ["plan", "allocate", "chunk"])
    ((_, _, again),) = standings(state)
    assert (again["kind"], again["generation"]) == ("offer", 101), "the same prompt under its next generation"
    run(state, ["plan", "abort"])
    assert standings(state) == [(HAND_OVER, "", None)]
    run(state, ["plan"])
    state.report(sent=["p1"], received=[], failed=[])
    assert standings(state) == [(HAND_OVER, "", {"kind": "no", "reason": "withdrawn"})]


def test_the_final_ticket_stands_while_it_is_leased():
    state = producer()
    run(state, WHOLE)
    ((_, _, offer),) = standings(state)
    assert offer["kind"] == "offer"
    final = run(state, ["length"]).params
    assert standings(state) == [(HAND_OVER, DIGEST, final_of(final))]
    assert standings(state) == []
    state.report(sent=["p1"], received=[], failed=[])
    assert standings(state) == [(HAND_OVER, "", {"kind": "no", "reason": "withdrawn"})]
    run(state, ["arrive"])
    assert standings(state) == [(HAND_OVER, "", None)], "it lives again"


def test_a_ticket_that_was_taken_back_never_stands():
    state = producer()
    run(state, [*WHOLE, "length"])
    run(state, ["plan", "revoke_all"])
    assert standings(state) == [(HAND_OVER, "", {"kind": "no", "reason": "withdrawn"})]


def test_answers_that_stand_are_bounded_whether_or_not_anybody_takes_them():
    for takes in (False, True):
        state, board = producer(), {}
        for index in range(1500):
            state._producers.streams.decline(f"{index:032x}")
            for hand_over_id, _, answer in standings(state) if takes else ():
                board.pop(hand_over_id, None)
                if answer is not None:
                    board[hand_over_id] = answer
        left = board or {hand_over_id: answer for hand_over_id, _, answer in standings(state)}
        assert len(left) == 1024
        assert f"{1499:032x}" in left
        assert f"{0:032x}" not in left
