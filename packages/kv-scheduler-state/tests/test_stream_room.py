"""Room for the blocks of a prompt that could be read early: where there is none, it is handed over whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from consumer_helpers import BLOCKS, arrive, ask, asking, at, final_answer, finish, load, states
from stream_helpers import Prompt, answer_of, consumer, early, offered, producer, question

from kv_scheduler_state import GroupConfig, SchedulerStateError
from kv_scheduler_state.plan import EMPTY_PLAN


def test_beyond_the_share_or_the_free_blocks_nothing_is_reserved():
    state, _ = at("offered", stream_reserve_fraction=0.3)
    assert state.external_tokens("d1", computed_tokens=0) is None  # 7 of 6
    assert state.external_tokens("d1", computed_tokens=16) == 84
    state.streams.consumed.free_blocks = lambda: 5
    assert state.external_tokens("d1", computed_tokens=16) is None
    assert state.streams.consumed.blocks_held == 0
    state.streams.consumed.free_blocks = lambda: 6
    assert state.external_tokens("d1", computed_tokens=16) == 84


def take_final(state, *, now_s):
    """Answer the question for the final ticket, and load it."""
    asked = ask(state)
    assert asked.wants_final
    assert states(state) == ["consumer-asking-final"]
    assert state.streams.consumed.blocks_held == 0, "others may have its share"
    assert state.take_step_plan(now_s=now_s) == EMPTY_PLAN  # no notification to the peer
    assert state.streams.answered("d1", asked.number, final_answer(), now_s=now_s)
    assert states(state) == ["consumer-queued"]
    load(state, now_s=now_s)
    (read,) = state.take_step_plan(now_s=now_s).reads
    assert [blocks.ids for blocks in read.ticket.peer_blocks] == [(1, 2, 3, 4, 5, 6, 7)]


def test_a_prompt_of_more_blocks_than_the_share_is_read_from_its_final_ticket():
    state, _ = at("offered", stream_reserve_fraction=0.3)
    assert state.external_tokens("d1", computed_tokens=0) is None  # 7 of 6
    take_final(state, now_s=1.0)
    assert [each[1:3] for each in state.streams.consumed.take_outcomes()] == [("over-share", "read-whole")]


def test_a_prompt_without_room_in_time_is_read_from_its_final_ticket():
    """As where all places of the engine's batch are taken."""
    state, _ = at("offered")
    assert state.external_tokens("d1", computed_tokens=0) == 100
    assert state.streams.consumed.blocks_held == 7
    state.take_step_plan(now_s=9.0)
    assert state.streams.take_questions() == []
    state.take_step_plan(now_s=10.0)
    take_final(state, now_s=10.0)


def test_a_peer_without_a_place_for_the_question_is_asked_again_for_the_final_ticket():
    state, first = at("asking-final")
    state.streams.answered("d1", first, {"kind": "no", "reason": "busy"}, now_s=10.0)
    state.preempt("d1", now_s=10.5)
    state.take_step_plan(now_s=11.0)
    take_final(state, now_s=11.0)


@pytest.mark.parametrize("has_expired", [False, True])
def test_an_offered_prompt_whose_allocation_is_refused_is_given_up(has_expired):
    state, _ = at("offered")
    tokens = state.external_tokens("d1", computed_tokens=8)
    with pytest.raises(SchedulerStateError):
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=tokens, now_s=1.0)
    assert state.take_step_plan(now_s=10.0 if has_expired else 1.0).failures == ("d1",)
    assert len(state.streams.take_questions()) == has_expired
    state.report(sent=[], received=["d1"], failed=["d1"])
    assert (states(state), state.external_tokens("d1", computed_tokens=0)) == (["consumer-local"], 0)
    assert state.streams.consumed.blocks_held == 0


@pytest.mark.parametrize("ends", [finish, lambda state: state.reset(now_s=0.0)])
def test_a_question_that_nobody_waits_for_any_more_is_not_asked(ends):
    state = consumer()
    arrive(state)
    ends(state)
    assert state.streams.take_questions() == []


def test_a_window_takes_only_the_blocks_that_it_sees():
    """A full group of 7 blocks and five windows of 32 tokens, of which each takes the blocks from token 68 on, so 3."""
    groups = (GroupConfig(), *(GroupConfig(kind="window", window_tokens=32) for _ in range(5)))
    blocks = [BLOCKS[0], *([[0, 0, 0, 0, 15, 16, 17]] * 5)]
    state, asked = asking(groups=groups, stream_reserve_fraction=1.0, cache_blocks=22)
    peer = producer(groups=groups)
    peer.arrive("p1", early(serves=True), prompt_tokens=100, identity=Prompt(), now_s=0.0)
    peer.allocate("p1", block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    peer.scheduled("p1", new_block_ids=blocks, is_prompt_complete=False, computed_tokens=48)
    peer.streams.produced.ask("a", question())
    state.streams.answered("d1", asked.number, answer_of(peer), now_s=0.0)
    assert state.external_tokens("d1", computed_tokens=0) == 100
    assert state.streams.consumed.blocks_held == 22


def test_an_offer_of_other_blocks_becomes_a_plain_hand_over():
    state, asked = asking()
    _, offer = offered()
    offer["ticket"]["kv_span_tokens"] = [8]
    assert state.streams.answered("d1", asked.number, offer, now_s=1.0)
    assert [each.code for each in state.streams.consumed.take_outcomes()] == ["other-blocks"]
    again = ask(state)
    assert again.wants_final
    assert again.number > asked.number
    assert state.external_tokens("d1", computed_tokens=0) is None
    assert state.streams.answered("d1", again.number, final_answer(), now_s=2.0)
    assert state.external_tokens("d1", computed_tokens=0) == 100


def step_ends(state, *, now_s):
    state.take_step_plan(now_s=now_s)
    assert state.streams.take_questions() == []


@pytest.mark.parametrize(("free_blocks", "answer", "lacks"), [(6, None, True), (7, 100, True), (7, 100, False)])
def test_an_offer_lacks_blocks_that_are_not_free_or_that_the_engine_does_not_give(free_blocks, answer, lacks):
    """The engine keeps free blocks for prompts that run already, for drafts and for a watermark."""
    state, _ = at("offered")
    state.streams.consumed.free_blocks = lambda: free_blocks
    assert not state.streams.consumed.lacks_blocks
    assert state.external_tokens("d1", computed_tokens=0) == answer
    if not lacks:
        state.allocate("d1", block_ids=BLOCKS, new_block_ids=BLOCKS, external_tokens=100, now_s=0.0)
    step_ends(state, now_s=0.1)
    assert state.streams.consumed.lacks_blocks == lacks
    step_ends(state, now_s=0.2)
    assert not state.streams.consumed.lacks_blocks, "nobody asked for it"


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.1])
def test_an_offer_without_blocks_keeps_those_behind_it_for_few_steps(step_s):
    """The engine looks at nobody behind a request that it has no blocks for."""
    state, _ = at("offered")
    answers = []
    for number in range(1, round(2 / step_s)):
        answers.append(state.external_tokens("d1", computed_tokens=0))
        step_ends(state, now_s=number * step_s)
        assert state.streams.consumed.lacks_blocks
        assert state.streams.consumed.blocks_held == 0, "others may have its share"
    assert 4 <= answers.count(100) <= 8
    assert all(None in two for two in pairwise(answers))
    step_ends(state, now_s=3.0)
    load(state, now_s=3.0)
    assert state.streams.consumed.blocks_held == 7
