"""Pairs that once went wrong, by name: each is a case of the byte oracle that must be read, and read right."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from oracle.geometry import Case, Group, Model, Request, Side
from oracle.runner import Play, Router, run

FULL = (Group("full"),)
LATENT = (Group("latent", layers=2),)
MAMBA = (Group("state", state="MAMBA2"), Group("full"))


def case(
    groups: tuple[Group, ...], producer: int, consumer: int, *requests: Request, block: int = 4, peer_block: int = 4,
    seed: int = 1, **model: int,
) -> Case:  # fmt: skip
    """A pair of engines that differ in nothing but what is named."""

    def side(tp: int, size: int) -> Side:
        sizes = tuple(64 if group.kind == "state" else size for group in groups)
        return Side(tp, sizes, tuple(0 for _ in groups), conversion="never")

    return Case(
        seed,
        Model(groups, **model),
        side(producer, peer_block),
        side(consumer, block),
        requests or (Request(prompt=11),),
    )


def assert_read(one: Case) -> None:
    outcome = run(one)
    assert outcome.read == len(one.requests), outcome


def changed(one: Case, side: str, **changes: Any) -> Case:
    return replace(one, **{side: replace(getattr(one, side), **changes)})


@pytest.mark.parametrize(("producer", "consumer"), [(2, 1), (4, 2), (1, 2), (8, 1), (5, 4)])
def test_latent_caches_between_any_sizes(producer: int, consumer: int) -> None:
    """Ranks that are only notified are wired up without rows."""
    assert_read(case(LATENT, producer, consumer))


@pytest.mark.parametrize(("producer", "consumer"), [(4, 1), (8, 2), (2, 8), (8, 4)])
def test_fewer_heads_than_ranks(producer: int, consumer: int) -> None:
    assert_read(case(FULL, producer, consumer, heads=2))


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (2, 4), (1, 8), (3, 2)])
def test_states_with_fewer_groups_than_ranks(producer: int, consumer: int) -> None:
    """The groups of B and C are replicated where they are fewer than the ranks (Granite-4, Bamba)."""
    assert_read(
        case(MAMBA, producer, consumer, heads=6 if 3 in (producer, consumer) else 8, state_heads=24, state_groups=1)
    )


@pytest.mark.parametrize(
    ("producer", "consumer"), [((1, 1), (2, 2)), ((2, 2), (1, 1)), ((4, 4), (4, 2)), ((8, 4), (2, 2))]
)
@pytest.mark.parametrize("block", [2, 64])
def test_context_parallel_ranks_take_turns_block_by_block(
    producer: tuple[int, int], consumer: tuple[int, int], block: int
) -> None:
    """60 of 64 tokens landed wrong from one context rank to two with blocks of 64 tokens, dealt token by token."""
    one = case(LATENT, producer[0], consumer[0], Request(prompt=70), block=block, peer_block=block)
    assert_read(changed(changed(one, "producer", dcp=producer[1]), "consumer", dcp=consumer[1]))


@pytest.mark.parametrize("group", [Group("full"), Group("window", reach=3), Group("window", reach=40)])
@pytest.mark.parametrize("hit_blocks", [0, 1])
def test_a_spare_local_block_shifts_nothing(group: Group, hit_blocks: int) -> None:
    """8 tokens in blocks of 4, one block hit, and one more for the token to come: 5 <- 2, not 5 <- 1."""
    assert_read(case((group,), 1, 1, Request(prompt=8, hit_blocks=hit_blocks, spare_local=1, consumer_nulls=0.5)))


@pytest.mark.parametrize("further", [1, 2, 9])
def test_a_producer_that_decoded_on_shifts_nothing(further: int) -> None:
    """Blocks beyond the prompt stay with the producer, in window groups too."""
    window = (Group("window", reach=6), Group("full"))
    assert_read(case(window, 1, 1, Request(prompt=8, further=further, spare_peer=1), block=2, peer_block=2))
    assert_read(case(window, 2, 1, Request(prompt=8, further=further), block=4, peer_block=2, heads=2))


def test_a_window_peer_with_exactly_the_needed_tokens() -> None:
    for tokens in range(6, 14):
        assert_read(
            case(
                (Group("window", reach=5),),
                1,
                1,
                Request(prompt=tokens, producer_nulls=1.0, consumer_nulls=1.0),
                block=2,
            )
        )


def test_null_blocks_of_groups_that_share_memory() -> None:
    """The null block stands in several lists, several times, and is written by none of them."""
    window = (Group("window", layers=2, reach=3), Group("window", layers=2, reach=3), Group("full", layers=2))
    assert_read(case(window, 1, 1, Request(prompt=20, producer_nulls=1.0, consumer_nulls=1.0), block=2, peer_block=2))


def test_null_blocks_of_a_chunked_first_group_are_no_prefix_hit() -> None:
    """Llama 4: prompts beyond one chunk."""
    chunked = (Group("chunked", reach=4), Group("full"))
    for tokens in (5, 8, 9, 17):
        assert_read(
            case(chunked, 1, 1, Request(prompt=tokens, producer_nulls=1.0, consumer_nulls=1.0), block=2, peer_block=2)
        )


def test_a_lease_that_ends_while_its_read_is_on_the_wire_is_never_trusted() -> None:
    """Other content lands in the blocks at once; a read is right, or failed with a code, in 40 orders of events."""
    codes = [run(case(FULL, 2, 2, Request(prompt=9, fate="expired"), heads=2, seed=seed)).codes for seed in range(40)]
    refused = [code for code in codes if code]
    assert refused
    assert all("fence-mismatch" in next(iter(code)) for code in refused)
    assert len(refused) < len(codes)


def test_a_read_that_fails_once_is_made_again() -> None:
    """The producer is connected anew; a rank whose completion has left already gets no second one."""
    for seed in range(8):
        assert_read(case(FULL, 2, 1, Request(prompt=9, fate="blip"), heads=2, seed=seed))


def test_a_good_read_beside_a_blip_is_told_to_every_rank() -> None:
    """Another read ends well while its engine is about to be connected anew: its producer's ranks are told all the same."""
    for seed in range(8):
        assert_read(case(LATENT, 3, 1, Request(prompt=9, fate="blip"), Request(prompt=5), Request(prompt=7), seed=seed))


def test_requests_of_one_step_stay_apart() -> None:
    assert_read(case(FULL, 2, 1, *(Request(prompt=n) for n in (3, 9, 14, 1)), heads=4))


def changing(**changes: Any) -> Router:
    """A router that changes the first ticket which it carries; None takes a key away."""
    left = [changes]

    def router(text: str) -> str:
        ticket = {**json.loads(text), **(left.pop() if left else {})}
        return json.dumps({key: value for key, value in ticket.items() if value is not None})

    return router


@pytest.mark.parametrize("name", ["HB:x", "PUSH_REG:x", "KVH:x"])
def test_an_id_that_cannot_be_notified_costs_nobody_else_a_thing(name: str) -> None:
    """It is refused at admission; every other order of its step is performed."""
    requests = (Request(prompt=9), Request(prompt=7), Request(prompt=5))
    outcome = run(case(FULL, 2, 2, *requests, heads=2), router=changing(remote_request_id=name), is_hostile=True)
    assert outcome.read == 2
    assert sum(outcome.codes.values()) == 1
    assert next(iter(outcome.codes)).startswith("ticket-")


def test_a_ticket_without_the_fence_that_its_engine_has_is_refused() -> None:
    requests = (Request(prompt=9), Request(prompt=7))
    outcome = run(case(FULL, 1, 1, *requests), router=changing(kv_fence=None), is_hostile=True)
    assert (outcome.read, dict(outcome.codes)) == (1, {"fence-missing": 1})


def test_a_wrong_fence_is_never_trusted() -> None:
    requests = (Request(prompt=9), Request(prompt=7))
    outcome = run(case(FULL, 1, 2, *requests, heads=2), router=changing(kv_fence=[0, 77]), is_hostile=True)
    assert (outcome.read, dict(outcome.codes)) == (1, {"fence-mismatch": 1})


def test_the_children_of_one_prompt_share_one_read() -> None:
    """n = 2: the second child waits, hits the prefix that the first has read, and the producer is told once.

    Other content is in its blocks by then: a second read would bring wrong bytes.
    """
    play = Play(case(FULL, 2, 2, Request(prompt=9), heads=2))
    handover, engine = play.prefill(0, play.case.requests[0]), play.consumer
    assert handover is not None
    play.producer.step()
    before = [data.copy() for data in engine.data()]
    assert engine.arrive("twin", handover.ticket, list(handover.prompt)) == ("", 0)
    play.decode(handover)
    assert engine.external_tokens("twin", 0) is None
    engine.step()
    play.play_out([handover])
    assert engine.external_tokens("twin", 8) == 0
    assert handover.mine is not None
    engine.allocate("twin", handover.mine, 0)
    engine.step()
    for thread in [*engine.threads, *play.producer.threads] * 5:
        thread.turn()
    play.judge([handover], before)
    assert play.outcome.read == 1
    assert "twin" not in engine.received
