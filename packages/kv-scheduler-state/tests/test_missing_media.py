"""Prompts whose images only the prefill engine got, and requests whose ids do not travel."""

from __future__ import annotations

from typing import Any

import pytest
from consumer_helpers import arrive, ask
from scheduler_helpers import FULL, SEEDS, TokenPrompt, config, hand_over
from stream_helpers import answer_of, consumer, early, producer, question, run

from kv_scheduler_state import GrantOrder, LeaseTable, SchedulerConfig, SchedulerState, StepPlan, prompt_digest

BLOCKS = [[7, 8, 9]]
IMAGES = (("cat", 1, 4), ("dog", 9, 4))
SECRETS = (b"a fleet secret, 16+",)


def prompt_of(images=IMAGES, *, token=5, refusal=""):
    """Return a prompt of equal tokens with images, of which this side got some."""
    return TokenPrompt([token] * 100, images, refusal=refusal)


def prefill(prompt, request_id="p1", secrets=SECRETS) -> dict[str, Any]:
    state = SchedulerState(config(engine_id="p0", groups=(FULL,), tp=1), secrets=secrets)
    params = hand_over(state, BLOCKS, identity=prompt, name=request_id).params
    assert params is not None
    return dict(params)


def admitted(ticket, prompt, secrets=SECRETS):
    state = SchedulerState(SchedulerConfig("d0", "10.0.0.2", 5600, tp=1, **SEEDS), secrets=secrets)
    return state, state.arrive("d1", ticket, prompt_tokens=48, identity=prompt, now_s=0.0)


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize(
    ("own", "code"),
    [
        (prompt_of(), ""),
        (prompt_of(IMAGES[:1]), "ticket-media-missing"),
        (prompt_of(()), "ticket-media-missing"),
        (prompt_of(refusal="ticket-media-unidentified"), "ticket-media-unidentified"),
        (prompt_of((), refusal="ticket-media-unidentified"), "ticket-media-missing"),
        (prompt_of((("cat", 1, 4), ("cow", 9, 4))), "ticket-prompt"),
        (prompt_of((*IMAGES, ("cow", 20, 4))), "ticket-prompt"),
        (prompt_of((), token=6), "ticket-prompt"),
    ],
)
def test_a_prompt_must_fail_where_it_has_fewer_images_than_were_computed(own, code):
    ticket = prefill(prompt_of())
    assert ticket["kv_media"] == [2, prompt_digest([5] * 48)]
    state, admission = admitted(ticket, own)
    assert admission.rejected_code == code
    assert state.must_fail("d1") == (code == "ticket-media-missing")
    assert not state.must_fail("another")
    # A refused ticket whose seal proves its writer is released there; the engine reads nothing.
    (order,) = state.take_step_plan(now_s=0.0).reads if code else (None,)
    if order is not None:
        assert (order.ticket.peer_request_id, [len(blocks.ids) for blocks in order.local_blocks]) == ("p1", [0])
        assert not order.is_reported


@pytest.mark.never_wrong("A13")
def test_a_ticket_of_a_prompt_without_images_names_none():
    assert "kv_media" not in prefill(prompt_of(()))


@pytest.mark.never_wrong("A13")
@pytest.mark.parametrize(
    "value",
    [None, 2, "2", [], [2], [2, None], [None, "d"], ["2", "d"], [2, "another"], [0, ""], {"2": "d"}, [1e400, 7]],
)
@pytest.mark.parametrize("tokens", [48, None, "48", -1, 1e300])
def test_a_value_that_names_no_missing_image_refuses_no_request(value, tokens):
    changes = {"kv_media": value, "kv_prompt": "e" * 64, "remote_num_tokens": tokens}
    state, admission = admitted({**prefill(prompt_of(), secrets=()), **changes}, prompt_of(()), secrets=())
    assert admission.rejected_code not in {"", "ticket-media-missing"}
    assert (admission.rejected_code == "ticket-prompt") == (tokens in {48, None})
    assert not state.must_fail("d1")
    assert state.take_step_plan(now_s=0.0).reads == (), "without a seal a client may have made the ticket up"


@pytest.mark.never_wrong("A13")
def test_a_streamed_prompt_must_fail_where_it_has_fewer_images():
    producing, reading = producer(), consumer()
    producing.arrive("p1", early(serves=True), prompt_tokens=100, identity=prompt_of(), now_s=0.0)
    arrive(reading, identity=prompt_of(()))
    asked = ask(reading)
    producing.streams.produced.ask("a", question(asked.number, digest=asked.digest))
    answer = answer_of(producing)
    assert (answer["reason"], answer["media"]) == ("digest-mismatch", (2, prompt_digest([5] * 100)))
    assert reading.streams.answered("d1", asked.number, answer, now_s=0.0)
    assert [(each.code, each.result) for each in reading.streams.consumed.take_outcomes()] == [
        ("ticket-media-missing", "fails")
    ]
    assert reading.must_fail("d1")


def test_an_offer_names_the_images_of_its_prompt():
    state = producer()
    state.arrive("p1", early(serves=True), prompt_tokens=100, identity=prompt_of(), now_s=0.0)
    run(state, ["allocate", "chunk"])
    state.streams.produced.ask("a", question(digest=prompt_of().digest(100)))
    assert answer_of(state)["ticket"]["kv_media"] == [2, prompt_digest([5] * 100)]


# ---------------------------------------------------------------------------------------------------------- request ids


IDS = {"cmpl-1": True, "r" * 512: True, "r" * 513: False, "\u56fe": False, "a\tb": False, "kv-id-1": False}


@pytest.mark.parametrize(("request_id", "is_plain"), IDS.items())
def test_peers_know_a_request_by_a_short_id_where_its_own_is_not_plain(request_id, is_plain):
    named = prefill(prompt_of(()), request_id)["remote_request_id"]
    assert (named == request_id) == is_plain
    assert is_plain or (named.startswith("kv-id-") and len(named) == 38)
    table = LeaseTable()
    for number, each in enumerate((request_id, *map(str, range(1024)), "last")):
        table.apply(StepPlan(grants=(GrantOrder(each, 30.0, (number, 7)),)), now_s=0.0)
        if not number:
            assert table.request_of(named) == request_id
        table.release(each, now_s=1.0)
        assert len(table.take_ended(now_s=1.0)) == 1
    assert table.request_of(named) == named, "forgotten with the lease"
