"""Numbers that vLLM's own connector fixes, because both sides count on them, and defects of naive formulas."""

from itertools import product
from math import lcm

import numpy as np
import pytest
from byte_oracle.oracle import check_readers
from helpers import LATENT, indices, lists

from kv_topology import TokenDeal, plan_transfer
from kv_topology.arithmetic import tokens_meet
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine

STATE = StateSpec(heads=8, head_dim=4, state_dim=4, groups=8, conv_rows=2)


def plans(model, tp, peer_tp, **engine):
    consumers = build_engine(model, EngineSpec(tp, **engine))
    producers = build_engine(model, EngineSpec(peer_tp, **engine))
    return [plan_transfer(consumers[0, rank], producers) for rank in range(tp)]


def reads(plan):
    return [tp for _, tp in plan.producer_ranks]


def attention_reads(plan):
    return [r for r in reads(plan) if any(not t.pairing.local.is_state for t in plan.slices((0, r)))]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("peer_tp", [1, 2, 4, 8])
def test_divisible_pairs_read_the_ranks_that_vllm_pairs(tp, peer_tp):
    for rank, plan in enumerate(plans(ModelSpec(("attention",), 8, 2), tp, peer_tp)):
        expected = (
            [rank // (tp // peer_tp)]
            if tp >= peer_tp
            else list(range(rank * peer_tp // tp, (rank + 1) * peer_tp // tp))
        )
        assert reads(plan) == expected
        assert plan.notify_only_ranks == ()
        for producer in expected:
            assert plan.reader_count((0, producer)) == max(1, tp // peer_tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("peer_tp", [1, 2, 4, 8])
def test_latent_reads_one_replica_and_notifies_the_rest(tp, peer_tp):
    for rank, plan in enumerate(plans(LATENT, tp, peer_tp)):
        assert reads(plan) == [rank * peer_tp // tp]
        home = range(rank * peer_tp // tp, (rank + 1) * peer_tp // tp)
        assert [r for _, r in plan.notify_only_ranks] == list(home)[1:]
        assert all(plan.reader_count((0, r)) == max(1, tp // peer_tp) for r in home)


@pytest.mark.parametrize(
    ("tp", "rank", "peer_tp", "attention", "everything"),
    [
        (1, 0, 4, [0, 2], [0, 1, 2, 3]),
        (2, 0, 4, [0], [0, 1]),
        (2, 1, 4, [2], [2, 3]),
        (4, 0, 1, [0], [0]),
        (4, 3, 1, [0], [0]),
        (4, 1, 2, [0], [0]),
        (4, 2, 2, [1], [1]),
        (8, 5, 4, [2], [2]),
        (8, 7, 4, [3], [3]),
    ],
)
def test_two_heads_on_hybrid_engines(tp, rank, peer_tp, attention, everything):
    model = ModelSpec(("attention", "mamba2"), 2, 4, state=STATE)
    plan = plans(model, tp, peer_tp, block_tokens=64)[rank]
    assert attention_reads(plan) == attention
    assert reads(plan) == everything


def test_context_parallel_ranks_and_readers():
    model = LATENT

    def ranks(tp, dcp, peer_tp, peer_dcp):
        consumers = build_engine(model, EngineSpec(tp, dcp=dcp))
        producers = build_engine(model, EngineSpec(peer_tp, dcp=peer_dcp))
        made = [plan_transfer(consumers[0, rank], producers) for rank in range(tp)]
        return [reads(plan) for plan in made], [made[0].reader_count((0, r)) for r in range(peer_tp)]

    assert ranks(2, 1, 4, 4) == ([[0, 1, 2, 3]] * 2, [2] * 4)
    assert ranks(2, 2, 4, 4) == ([[0, 2], [1, 3]], [1] * 4)
    assert ranks(4, 4, 2, 2) == ([[0], [1], [0], [1]], [2] * 2)
    assert ranks(4, 4, 2, 1) == ([[0], [0], [1], [1]], [2] * 2)


def test_descriptor_numbers_of_a_hybrid_list():
    """Regions first, then x, B, C and ssm of each state layer: index = descriptors before + block."""
    model = ModelSpec(("attention", "attention", "mamba2"), 4, 4, state=STATE)
    local = build_engine(model, EngineSpec(2, block_tokens=16, block_count=100))[0, 0]
    peers = build_engine(model, EngineSpec(1, block_tokens=16, block_count=100))
    plan = plan_transfer(local, peers)
    numbers = [3, 5, 103, 105, 201, 301, 401, 501]
    assert indices(plan, lists([3, 5], [1]), lists([3, 5], [1]), tokens=32) == (numbers, numbers)
    assert len(plan.local_rows((0, 0))) == len(plan.peer_rows((0, 0))) == 6


def test_shares_of_tokens_are_those_counted():
    for turn, peer_turn, size, peer_size in product(range(1, 7), range(1, 7), range(1, 5), range(1, 5)):
        tokens = np.arange(lcm(turn * size, peer_turn * peer_size))
        for rank, peer_rank in product(range(size), range(peer_size)):
            deal, peer = TokenDeal(size, rank, turn), TokenDeal(peer_size, peer_rank, peer_turn)
            both = deal.owned(tokens, 1) & peer.owned(tokens, 1)
            assert tokens_meet(deal, peer) == np.count_nonzero(both) / len(tokens), (deal, peer)


def test_shares_of_tokens_in_absurd_turns():
    # Counting would take 10**18 tokens: the turns are as long as a document may claim, and have no common divisor.
    deal, peer = TokenDeal(65536, 7, 16), TokenDeal(65535, 65534, (1 << 31) - 1)
    assert tokens_meet(deal, peer) == pytest.approx(1 / 65536 / 65535, rel=1e-6)


def test_what_any_stage_reads_needs_no_other_notification():
    """The first consumer stage reads one replica of the latents, the second one all producer ranks of the heads."""
    model = ModelSpec(("latent", "attention"), 2, 4, latent_dim=4)
    consumers, producers = build_engine(model, EngineSpec(1, 2)), build_engine(model, EngineSpec(2))
    made = {rank: plan_transfer(local, producers) for rank, local in consumers.items()}
    assert made[0, 0].producer_ranks == ((0, 0),)
    assert made[1, 0].producer_ranks == ((0, 0), (0, 1))
    assert made[0, 0].notify_only_ranks == made[1, 0].notify_only_ranks == ()
    check_readers(list(made.values()), list(producers))
