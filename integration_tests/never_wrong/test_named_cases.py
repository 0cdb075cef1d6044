"""Pairs that once went wrong, by name: each is a case of the byte oracle that must be read, and read right."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from oracle.geometry import Case, Group, Model, Request, Side
from oracle.runner import Router, run

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


@pytest.mark.proves("latent: context")
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


CONTEXT_SIZES = [(2, 2), (2, 1), (1, 2), (4, 4), (4, 2), (2, 4), (4, 1), (1, 4)]
CONTEXTS = [
    *product(["latent", "two-heads"], CONTEXT_SIZES),
    *product(["latent-state", "one-head", "chunked", "drafter"], [(2, 1), (1, 4), (4, 2)]),
    # With windows, and context ranks on the consumer alone, prompts are computed there.
    *product(["window"], [(2, 2), (4, 1)]),
]
TURNS = [(0, 0), (1, 0), (2, 1)]


@pytest.mark.full
@pytest.mark.proves("dense, latent, windows, chunks, Mamba-2, drafter: context")
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize(("model", "dcps"), CONTEXTS)
def test_context_sizes_and_turns_may_differ(model: str, dcps: tuple[int, int], turns: tuple[int, int]) -> None:
    """With more tensor-parallel ranks than context ranks too; a turn of 0 is a whole block."""
    groups = {
        "latent": LATENT,
        "latent-state": (Group("state", state="MAMBA2"), *LATENT),
        "window": (Group("window", reach=6), *FULL),
        "chunked": (Group("chunked", reach=8), *FULL),
        "drafter": (*LATENT, Group("latent")),
    }.get(model, FULL)
    heads = 2 if model == "two-heads" else 1  # each head is on every rank of a context group
    producer, consumer = (dcp * heads * (2 if dcp == 2 else 1) for dcp in dcps)
    waiting: dict[str, Any] = {"spare_local": 1, "spare_peer": 2, "in_flight": 3} if model == "drafter" else {}
    hits = [Request(prompt=45, hit_blocks=n, **waiting) for n in range(1 if model == "latent-state" else 2)]
    one = case(groups, producer, consumer, *hits, heads=heads, state_heads=8, block=4, peer_block=4)
    for side, dcp, turn in zip(("producer", "consumer"), dcps, turns, strict=True):
        one = changed(one, side, dcp=dcp, turn=turn)
    assert_read(one)
    assert_read(changed(one, "consumer", block_tokens=tuple(n if n == 64 else 8 for n in one.consumer.block_tokens)))


LATENT_HYBRID = (Group("latent"), Group("state", state="GDN_ATTN"), Group("state", state="GDN_ATTN"))


@pytest.mark.parametrize(
    ("producer", "block", "peer_block"),
    [
        *((2, *sizes) for sizes in ((12, 8), (36, 8), (24, 4), (16, 24), (36, 20), (20, 36), (24, 8), (257, 256))),
        pytest.param(8, 5760, 768, marks=pytest.mark.full),
    ],
)
def test_blocks_of_a_latent_hybrid_follow_its_states(producer: int, block: int, peer_block: int) -> None:
    """Prompts around the ends of both engines' blocks, whose sizes need not divide one another (Kimi Linear: 768 and 5760).

    Source of the sizes: vLLM 0.33's own tests of its descriptors' geometry.
    """
    ends = {n + by for size in (4, block, peer_block) for n in (size, 2 * size) for by in (0, 1)} | {2}
    for tokens in sorted(ends):
        sizes = {"block": block, "peer_block": peer_block, "state_heads": 8, "state_groups": 8}
        assert_read(case(LATENT_HYBRID, producer, 1, Request(tokens), **sizes))


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


NULLED = partial(Request, producer_nulls=1.0, consumer_nulls=1.0)
"""Prompts of which both engines keep what the next token sees alone."""


@pytest.mark.proves("drafter: equal ranks, unequal ranks, unequal blocks")
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2), (2, 8)])
@pytest.mark.parametrize("drafter", [Group("full"), Group("latent"), Group("window", reach=6)])
def test_a_drafters_cache_is_a_further_group_with_blocks_that_wait_for_drafts(
    drafter: Group, tps: tuple[int, int]
) -> None:
    """Both engines keep blocks behind the prompt for tokens that are not accepted yet; caches are bfloat16."""
    target = Group("full", layers=2)
    drafts = 0 if drafter.reach else 3  # the last window moves on with them, and the prompt would be computed locally
    waiting = (Request(prompt=n, spare_local=1, spare_peer=2, in_flight=drafts) for n in (8, 11))
    one = case((target, drafter), *tps, *waiting, block=4, peer_block=2, heads=4, element_bytes=2)
    assert_read(one)
    assert_read(changed(one, "consumer", block_tokens=(8, 4)))


def test_a_window_peer_with_exactly_the_needed_tokens() -> None:
    for tokens in range(6, 14):
        assert_read(case((Group("window", reach=5),), 1, 1, NULLED(tokens), block=2))


def test_null_blocks_of_groups_that_share_memory() -> None:
    """The null block stands in several lists, several times, and is written by none of them."""
    window = (Group("window", layers=2, reach=3), Group("window", layers=2, reach=3), Group("full", layers=2))
    assert_read(case(window, 1, 1, NULLED(20), block=2, peer_block=2))


def test_null_blocks_of_a_chunked_first_group_are_no_prefix_hit() -> None:
    """Llama 4: prompts beyond one chunk."""
    chunked = (Group("chunked", reach=4), Group("full"))
    for tokens in (5, 8, 9, 17):
        assert_read(case(chunked, 1, 1, NULLED(tokens), block=2, peer_block=2))


def test_a_lease_that_ends_while_its_read_is_on_the_wire_is_never_trusted() -> None:
    """Other content lands in the blocks at once; a read is right, or failed with a code, in 40 orders of events."""
    codes = [run(case(FULL, 2, 2, Request(prompt=9, fate="expired"), heads=2, seed=seed)).codes for seed in range(40)]
    refused = {part for code in codes for each in code for part in each.split(",")}
    # The lease ends by its time, within which a handshake that is under way has to end as well.
    assert {"fence-mismatch"} <= refused <= {"fence-mismatch", "handshake-overdue"}
    assert not all(codes)


def test_a_read_that_fails_once_is_made_again() -> None:
    """The producer is connected anew; a rank whose completion has left already gets no second one."""
    for seed in range(8):
        assert_read(case(FULL, 2, 1, Request(prompt=9, fate="blip"), heads=2, seed=seed))


def test_a_good_read_beside_a_blip_is_reported_to_every_rank() -> None:
    """Another read ends well while its engine is about to be connected anew: its producer's ranks are notified all the same."""
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
