"""Defects that were found from outside, by the number under which they were reported; each fails on version 0.1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from model.invariants import problems
from scheduler_helpers import (
    FULL,
    STATE,
    WINDOW,
    TokenPrompt,
    allocate,
    config,
    consumer_params,
    finish,
    hand_over,
    ids,
    scheduler,
    with_ticket,
)
from stream_helpers import early

from kv_scheduler_state import (
    UNBOUND,
    BlockList,
    GroupConfig,
    LeaseTable,
    StepPlan,
    TicketReader,
    prefill_request_params,
    prompt_digest,
)
from kv_scheduler_state.errors import TicketError
from kv_scheduler_state.plan import FenceOrder, GrantOrder
from kv_scheduler_state.worker.state import WorkerState

NULLS = {"null_block": 0}


# ---- A1: a ticket belongs to one prompt


# Append only: digests that version 0.2 wrote must stay what they are.
GOLDEN: dict[str, tuple[list[int], dict[str, Any]]] = {
    "067f77c7c0460166ce4e540ad1fef8dd53999863aec7d262e96ea611b7add61e": ([], {}),
    "d18405e2face606e800846e6fa3c36d1f3115fd6ab3aabd3ff1e4b57ffae30c5": ([1, 2, 3], {}),
    "51713103c30e79cf64d22e9b883e2ec3140188fedf51693baf39ad63a8280a91": (
        [151643, 9707],
        {"lora": "sql", "media": [("ab12", 0, 4)], "salt": "t", "embeds": "ff"},
    ),
}


@pytest.mark.never_wrong("A1")
@pytest.mark.parametrize("digest", GOLDEN)
def test_digests_are_the_golden_ones(digest):
    tokens, rest = GOLDEN[digest]
    assert prompt_digest(tokens, **rest) == digest


@pytest.mark.never_wrong("A1")
def test_a_ticket_serves_the_prompt_that_it_was_written_for():
    params = hand_over(scheduler(engine_id="prefill-0"), [[1]], tokens=3, identity=TokenPrompt([1, 2, 3])).params
    assert params["kv_prompt"] == prompt_digest([1, 2, 3])
    for identity, code in (
        (TokenPrompt([1, 2, 3]), ""),
        (TokenPrompt([1, 2, 3, 4]), ""),
        (TokenPrompt([1, 2, 4]), "ticket-prompt"),
        (TokenPrompt([1, 2]), "ticket-prompt"),
        (UNBOUND, "ticket-prompt"),
    ):
        admission = scheduler().arrive("d1", params, prompt_tokens=4, identity=identity, now_s=0.0)
        assert admission.rejected_code == code
    unsaid = {**(params or {}), "remote_num_tokens": None}
    assert scheduler().arrive("d1", unsaid, prompt_tokens=3, identity=TokenPrompt([1, 2, 3]), now_s=0.0).rejected_code
    unbound = {key: value for key, value in params.items() if key != "kv_prompt"}
    assert not scheduler().arrive("d1", unbound, prompt_tokens=3, identity=TokenPrompt([9]), now_s=0.0).rejected_code


@pytest.mark.never_wrong("A1")
def test_a_readback_ticket_of_another_conversation_costs_only_the_read():
    decode = scheduler(bidirectional=True, engine_id="decode-0")
    turn, other = TokenPrompt([*range(100)]), TokenPrompt([*range(1, 101)])
    decode.arrive("d1", consumer_params(), prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    decode.allocate("d1", block_ids=[[1]], new_block_ids=[[]], external_tokens=0, now_s=0.0)
    blocks = [list(range(1, 8))]
    back = decode.finish("d1", reason="stop", block_ids=blocks, computed_tokens=99, identity=turn, now_s=0.0).params
    state = scheduler(bidirectional=True)
    admission = state.arrive("p1", back, prompt_tokens=100, identity=other, now_s=0.0)
    assert (admission.role, admission.rejected_code) == ("producer", "ticket-prompt")
    state.arrive("p2", back, prompt_tokens=100, identity=turn, now_s=0.0)
    assert state.external_tokens("p2", computed_tokens=0) == 99


@pytest.mark.never_wrong("A1")
def test_the_digest_covers_every_part_and_confuses_no_two():
    variants: list[dict[str, Any]] = [{}, {"lora": "a"}, {"salt": "a"}, {"embeds": "a"}, {"lora": "ab"}]
    variants += [{"media": [(name, first, count)]} for name, first, count in (("a", 0, 1), ("a", 1, 1), ("a", 0, 2))]
    variants += [{"media": [("a", 0, 1), ("b", 1, 1)]}, {"lora": "a", "salt": "b"}]
    digests = [prompt_digest([1, 2, 3], **each) for each in variants]
    digests += [prompt_digest(tokens) for tokens in ([], [0], [1, 2])]
    assert len(set(digests)) == len(digests)
    assert digests[0] == prompt_digest(iter((1, 2, 3)), lora="", media=(), salt="", embeds="")


# ---- A3: lists begin where they say


@pytest.mark.never_wrong("A3")
def test_a_list_says_with_which_token_it_begins_on_both_sides():
    """Blocks of 16, a window of 32: of 6 blocks the last 3 are offered, behind a hit of 32 tokens 4 are wanted."""
    groups = (FULL, WINDOW)
    blocks = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9]]
    params = hand_over(scheduler(groups=groups, engine_id="prefill-0", **NULLS), blocks, tokens=90).params
    assert (params["kv_first_tokens"], params["kv_span_tokens"], params["kv_null_block"]) == ([0, 48], [16, 16], 0)
    state = scheduler(groups=groups, **NULLS)
    state.arrive("d1", params, prompt_tokens=90, identity=UNBOUND, now_s=0.0)
    assert state.external_tokens("d1", computed_tokens=32) == 58
    local, new = [[11, 12, 13, 14, 15, 16], [0, 0, 0, 17, 18, 19]], [[13, 14, 15, 16], [17, 18, 19]]
    allocate(state, "d1", local, new, external=58)
    (order,) = state.take_step_plan(now_s=0.0).reads
    assert order.local_blocks == (BlockList((13, 14, 15, 16), 32, 0), BlockList((17, 18, 19), 48, 0))
    assert order.ticket.peer_blocks == (BlockList((1, 2, 3, 4, 5, 6), 0, 0), BlockList((7, 8, 9), 48, 0))
    assert order.tokens == 90


@pytest.mark.never_wrong("A3")
@pytest.mark.parametrize(
    ("held", "prompt", "loaded"),
    [(90, 90, 90), (90, 80, 80), (90, 70, 0), (90, 95, 90), (64, 64, 64), (64, 63, 0), (79, 79, 0)],
)
def test_a_regenerated_turn_is_only_read_back_if_the_window_reaches_back(held, prompt, loaded):
    """The peer went on to 90 tokens; its window of 32 begins with token 59, its blocks with 48. A prompt of 70 needs 39 to 69."""
    groups = (FULL, WINDOW)
    state = scheduler(groups=groups, bidirectional=True, recompute_threshold_tokens=0, **NULLS)
    count = -(-held // 16)
    nulls = [0] * max(0, (held - 31) // 16)
    window = [*nulls, *range(11, 11 + count - len(nulls))]
    first = max(0, count - 3)
    params = consumer_params(
        do_remote_prefill=False,
        do_remote_decode=True,
        remote_num_tokens=held,
        remote_block_ids=[list(range(1, count + 1)), window[first:]],
        kv_first_tokens=[0, first * 16],
        kv_span_tokens=[16, 16],
        kv_null_block=0,
    )
    state.arrive("p1", params, prompt_tokens=prompt, identity=UNBOUND, now_s=0.0)
    assert state.external_tokens("p1", computed_tokens=0) == loaded


@pytest.mark.never_wrong("A3")
def test_null_blocks_of_a_whole_group_are_no_prefix_hit():
    """Attention in chunks: blocks of earlier chunks are null from the start, and nothing of the prompt is a hit."""
    state = scheduler(**NULLS)
    with_ticket(state, prompt_tokens=64, remote_num_tokens=64, remote_block_ids=[[0, 0, 3, 4]])
    state.external_tokens("d1", computed_tokens=0)
    allocate(state, "d1", [[0, 0, 5, 6]], [[5, 6]], external=64)
    (order,) = state.take_step_plan(now_s=0.0).reads
    assert order.local_blocks == (BlockList((0, 0, 5, 6), 0, 0),)


@pytest.mark.never_wrong("A3")
def test_where_a_foreign_window_list_begins_is_derived_or_refused():
    reader = TicketReader(config(groups=(FULL, WINDOW), **NULLS))
    # A block that was only allocated ahead is in both lists; see `test_peer_block_sizes` for all others.
    ticket = reader.read(consumer_params(remote_block_ids=[[1, 2, 3, 4], [5, 7, 8, 9]]), "handoff")
    assert [blocks.first_token for blocks in ticket.peer_blocks] == [0, 0]
    alone = TicketReader(config(groups=(WINDOW,), **NULLS))
    with pytest.raises(TicketError) as caught:
        alone.read(consumer_params(remote_block_ids=[[7, 8, 9]]), "handoff")
    assert caught.value.code == "ticket-first-token"
    assert alone.read(consumer_params(remote_block_ids=[[7, 8, 9]], kv_first_tokens=[16]), "handoff").peer_blocks == (
        BlockList((7, 8, 9), 16),
    )
    states = TicketReader(config(groups=(GroupConfig("state", scratch_blocks=2),)))
    foreign = states.read(consumer_params(remote_block_ids=[[1, 2, 3]]), "handoff")
    assert ids(foreign.peer_blocks) == ((1,),)
    with pytest.raises(TicketError):
        states.read(consumer_params(remote_block_ids=[[1, 2, 3]], kv_first_tokens=[0]), "handoff")


@pytest.mark.never_wrong("A3")
@pytest.mark.parametrize("kept", [[0], [0, 0, 0], ["0", 0], "00", [True, 0], [-1, 0], [0, 1 << 32]])
def test_first_tokens_that_cannot_be_are_refused(kept):
    reader = TicketReader(config(groups=(FULL, WINDOW)))
    with pytest.raises(TicketError) as caught:
        reader.read(consumer_params(remote_block_ids=[[1], [2]], kv_first_tokens=kept), "handoff")
    assert caught.value.code in {"ticket-first-token", "ticket-type"}
    with pytest.raises(TicketError):
        reader.read(consumer_params(remote_block_ids=[[1], [2]], kv_first_tokens=[0, 0], kv_null_block=-1), "handoff")
    for name, value in (("kv_nonce", "a b"), ("kv_nonce", ""), ("kv_prompt", "ff"), ("kv_prompt", 7)):
        with pytest.raises(TicketError):
            reader.read(consumer_params(remote_block_ids=[[1], [2]], **{name: value}), "handoff")


# ---- B3: numbers that routers round


@pytest.mark.never_wrong("B3")
def test_every_number_of_a_ticket_survives_a_reader_of_doubles():
    largest = (1 << 53) - 1
    state = scheduler(fence_seed=largest, generation=largest, dialect=15)
    for name in ("p1", "p2"):
        params = hand_over(state, [[1, 2, 3]], tokens=48, name=name).params
        doubles = json.loads(json.dumps(params), parse_int=lambda text: int(float(text)))
        assert doubles == json.loads(json.dumps(params))
        assert json.loads(json.dumps(params)) == params
    assert params["kv_fence"][1] == 1  # and the one after the largest begins anew


@pytest.mark.never_wrong("B3")
def test_larger_generations_of_version_0_1_are_still_read():
    reader = TicketReader(config())
    ticket = reader.read(consumer_params(kv_fence=[0, (1 << 62) + 1], kv_generation=1 << 55), "handoff")
    assert (ticket.fence, ticket.peer.generation) == ((0, (1 << 62) + 1), 1 << 55)


# ---- B2: ids that no notification can name


@pytest.mark.never_wrong("B2")
def test_an_id_that_cannot_be_notified_is_refused_at_arrival():
    state = scheduler(reserved_id_prefixes=("HB:", "PUSH_REG:"), bidirectional=True)
    for name in ("HB:x", "PUSH_REG:", "HB:"):
        for own, params in (("d1", consumer_params(remote_request_id=name)), (name, prefill_request_params())):
            admission = state.arrive(own, params, prompt_tokens=48, identity=UNBOUND, now_s=0.0)
            assert (admission.role, admission.rejected_code) == ("none", "ticket-id-reserved")
            finish(state, own, "length", [[1]], 16)
    assert state.take_step_plan(now_s=0.0).is_empty


# ---- C1: no slot, no hand-over; a ticket covers the blocks of its tokens


@pytest.mark.never_wrong("C1")
def test_a_ticket_covers_computed_blocks_only():
    for tokens, prompt, kept in ((33, 33, 3), (32, 32, 2), (37, 32, 2), (48, 48, 3)):
        params = hand_over(scheduler(), [[1, 2, 3, 4]], tokens=tokens, prompt_tokens=prompt).params
        assert (len(params["remote_block_ids"][0]), params["remote_num_tokens"]) == (kept, min(tokens, prompt))


@pytest.mark.never_wrong("C1")
def test_a_state_that_ran_on_beyond_the_prompt_is_not_handed_over():
    state = scheduler(groups=(STATE,))
    assert hand_over(state, [[1]], tokens=12, prompt_tokens=10) == (False, None, "state-too-long")


# ---- C4: renewals in the queue of a process that stood still


@pytest.mark.never_wrong("C4")
@pytest.mark.parametrize("lease_s", [1.0, 3.0, 6.0, 7.0, 10.0, 30.0])
def test_a_renewed_lease_survives_a_process_that_stood_still_for_a_minute(lease_s):
    table = LeaseTable()
    table.grant("p1", lease_s=lease_s, fence=None, now_s=0.0)
    steps, now_s = 60, 0.0
    for step in range(steps):
        now_s = step * lease_s / 12
        assert table.take_ended(now_s=now_s) == ()
        if step % 2 == 0:
            table.renew("p1", now_s=now_s)
    # The worst moment: just before the next renewal. Timers run before the renewals of that minute are read.
    stopped_s = now_s + 60
    assert table.take_ended(now_s=stopped_s) == ()
    assert table.renew("p1", now_s=stopped_s)
    silent = [end for step in range(13) for end in table.take_ended(now_s=stopped_s + step * lease_s / 12)]
    assert [end.reason for end in silent] == ["expired"]


@pytest.mark.never_wrong("C4")
def test_the_bound_on_pauses_follows_the_shortest_live_lease():
    table = LeaseTable()
    table.grant("long", lease_s=480.0, fence=None, now_s=0.0)
    table.grant("short", lease_s=3.0, fence=None, now_s=0.0)
    assert table._clock.max_step_s == 0.5
    table.grant("short too", lease_s=3.0, fence=None, now_s=0.0)
    table.release("short", now_s=0.0)
    assert table._clock.max_step_s == 0.5
    table.release("short too", now_s=0.0)
    assert table._clock.max_step_s == 5.0
    assert problems(table) == []


# ---- C6: a nonce per grant, consumers apart


@pytest.mark.never_wrong("C6")
def test_a_late_notification_does_not_touch_the_next_lease_of_its_id():
    table = LeaseTable()
    table.grant("p1", lease_s=30.0, fence=None, nonce="one", now_s=0.0)
    assert table.read_complete("p1", reader="a", reader_count=1, nonce="one", now_s=0.0) == "complete"
    table.take_ended(now_s=0.0)
    table.expect("p1", now_s=1.0)
    assert table.read_complete("p1", reader="a", reader_count=1, nonce="one", now_s=1.0) == "complete"  # not known yet
    table.grant("p1", lease_s=30.0, fence=None, nonce="two", now_s=1.0)
    assert table.take_ended(now_s=1.0) == ()
    assert table.read_complete("p1", reader="a", reader_count=1, nonce="one", now_s=1.0) == "stale"
    assert not table.renew("p1", nonce="one", now_s=1.0)
    assert table.renew("p1", nonce="two", now_s=1.0)
    assert table.live_count() == 1
    # vLLM's own readers send no nonce.
    assert table.read_complete("p1", reader="a", reader_count=1, now_s=1.0) == "complete"


@pytest.mark.never_wrong("C6")
def test_ranks_of_two_consumers_never_add_up():
    table = LeaseTable()
    table.grant("p1", lease_s=30.0, fence=None, nonce="n", now_s=0.0)
    count: dict[str, Any] = {"reader_count": 2, "nonce": "n", "now_s": 0.0}
    assert table.read_complete("p1", reader="d1/0", consumer="d1", **count) == "counted"
    assert table.read_complete("p1", reader="d2/1", consumer="d2", **count) == "counted"
    assert table.take_ended(now_s=0.0) == ()
    assert table.read_complete("p1", reader="d2/0", consumer="d2", **count) == "complete"
    (end,) = table.take_ended(now_s=0.0)
    assert (end.reason, end.readers_done) == ("read", 3)
    table.grant("p2", lease_s=30.0, fence=None, nonce="n", now_s=0.0)
    verdicts = [table.read_complete("p2", reader="r", consumer=f"d{n}", **count) for n in range(70)]
    assert (verdicts.count("counted"), verdicts.count("too-many-consumers")) == (64, 6)


@pytest.mark.never_wrong("C6")
def test_every_grant_has_a_nonce_of_its_own():
    one, other = scheduler(nonce_seed="a", fence_slots=0), scheduler(nonce_seed="b", fence_slots=0)
    nonces = [
        hand_over(state, [[1]], tokens=3, name=f"p{n}").params["kv_nonce"] for n in range(20) for state in (one, other)
    ]
    assert len(set(nonces)) == 40
    grants = [grant.nonce for grant in one.take_step_plan(now_s=0.0).grants]
    assert grants == nonces[-2:-1]


# ---- C7: a restart has a new generation


@pytest.mark.never_wrong("C7")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_restart_has_a_new_generation(is_late):
    state = scheduler()
    state.arrive("p1", prefill_request_params(), prompt_tokens=48, identity=UNBOUND, now_s=0.0)
    blocks = {"block_ids": [[1, 2, 3]], "new_block_ids": [[1, 2, 3]], "external_tokens": 0, "now_s": 0.0}
    state.allocate("p1", **blocks)
    (first,) = state.take_step_plan(now_s=0.0).fences
    if not is_late:
        state.preempt("p1", now_s=0.0)
    state.allocate("p1", preemptions=1, **blocks)
    if is_late:
        state.preempt("p1", now_s=0.0)
    state.allocate("p1", preemptions=1, **blocks)
    plan = state.take_step_plan(now_s=0.0)
    assert plan.restarts == ("p1",)
    assert plan.fences == (FenceOrder("p1", first.slot, first.generation + 1),)
    state.preempt("p1", now_s=0.0)  # the next one is a preemption of its own
    state.allocate("p1", preemptions=2, **blocks)
    assert state.take_step_plan(now_s=0.0).restarts == ("p1",)


@pytest.mark.never_wrong("C7")
def test_words_of_announced_requests_are_lost_with_the_memory_until_they_start_again():
    worker = WorkerState()
    plan = StepPlan(expects=("p1", "p2", "p3"), fences=(FenceOrder("p1", 0, 7), FenceOrder("p2", 1, 8)))
    assert worker.apply(plan) == plan
    assert worker.announced == ("p1", "p2", "p3")
    assert [worker.fence_slot(request_id) for request_id in ("p1", "p3", "p9")] == [0, None, None]
    worker.lose()
    restart = StepPlan(restarts=("p1",), fences=(FenceOrder("p1", 0, 9),))
    assert worker.apply(restart) == restart
    grants = StepPlan(grants=tuple(GrantOrder(name, 30.0, None) for name in ("p1", "p2")), releases=("p3",))
    assert worker.apply(grants) == grants._replace(revokes=("p2",))
    assert not worker.announced


# ---- the lease table's own check


@pytest.mark.never_wrong("C8")
def test_an_id_that_returns_before_its_end_was_taken_breaks_no_promise():
    table = LeaseTable()
    table.expect("p1", now_s=0.0)
    table.release("p1", now_s=0.0)
    table.expect("p1", now_s=0.0)
    assert problems(table) == []


# ---- roles


READ_BY: dict[str, dict[str, object]] = {
    "plain": consumer_params(),
    "early": early(serves=False),
    "readback": {**consumer_params(), "do_remote_prefill": False, "do_remote_decode": True},
}


@pytest.mark.never_wrong("A9")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kind", READ_BY)
def test_an_engine_that_only_produces_reads_nothing(kind: str, reads: bool) -> None:
    more = {"peer_networks": ("10.0.0.0/8",), "stream_reserve_fraction": 0.5, "cache_blocks": 64, "bidirectional": True}
    state = scheduler(reads=reads, **more)
    admission = state.arrive("d1", READ_BY[kind], prompt_tokens=100, identity=TokenPrompt([*range(100)]), now_s=0.0)
    assert admission.rejected_code == ("" if reads else "ticket-role")
    assert any(name.startswith("consumer") for name in state.state_counts()) is reads
    if not reads:
        assert state.external_tokens("d1", computed_tokens=0) == 0
        assert not state.streams.take_questions()
        assert not state.take_step_plan(now_s=0.0).reads
