"""The byte oracle on a first handful of pairs."""

from itertools import product

import numpy as np
import pytest
from block_lists import bytes_moved, lists
from byte_oracle import Request, prove
from named_layouts import AttentionShape, halves_layout, layer_regions, packed_layout, rank_geometry
from samples import sampled

from kv_topology import (
    Group,
    Planner,
    plan_transfer,
    target_ranks,
    to_document,
)

LAYERS = ("a", "b")


def engine(tp, make, *, heads=4, page_tokens=16, pages=12, base=1 << 20):
    ranks = {}
    for rank in range(tp):
        layout = make(AttentionShape(heads, 3, page_tokens, 2, tp, rank))
        regions = layer_regions(LAYERS, layout, base_address=base, page_count=pages)
        ranks[0, rank] = rank_geometry([Group("attention", page_tokens)], regions, tp_size=tp, tp_rank=rank)
    return ranks


@pytest.mark.parametrize(("consumer_tp", "producer_tp"), sampled(product([1, 2, 3, 4, 8], repeat=2), 8))
def test_every_pair_moves_the_right_bytes(consumer_tp, producer_tp):
    consumers = engine(consumer_tp, packed_layout)
    producers = engine(producer_tp, halves_layout, page_tokens=32)
    request = Request(lists([7, 3, 5, 1]), lists([2, 9]), 64)
    proof = prove(consumers, producers, request, plan_transfer)
    assert proof.plans == consumer_tp
    assert proof.bytes_proved > 0


def test_planner_speaks_documents():
    consumers, producers = engine(2, packed_layout), engine(4, packed_layout)
    planner = Planner()
    local = to_document(consumers[0, 1])
    ranks = planner.target_ranks(local, peer_tp=4, peer_pp=1, peer_dcp=1)
    assert list(ranks) == [(0, 2), (0, 3)]
    assert list(planner.target_ranks(local, peer_tp=4)) == [(0, 2), (0, 3)]
    plan = planner.plan(local, {rank: to_document(producers[rank]) for rank in ranks}, peer_tp=4)
    assert plan.producer_ranks == ((0, 2), (0, 3))
    assert plan.reader_count((0, 2)) == 1
    assert not plan.notify_only_ranks
    local_index, peer_index = plan.indices((0, 2), lists([5, 1], first=16), lists([9, 3, 4]), tokens=48)
    assert local_index.dtype == np.int32
    assert peer_index.tolist() == [3, 4, 15, 16]
    assert local_index.tolist() == [5, 1, 17, 13]
    assert bytes_moved(plan, lists([5, 1], first=16), lists([9, 3, 4]), tokens=48) == 2 * 2 * 2 * 2 * 16 * 3 * 2
    assert target_ranks(consumers[0, 0], peer_tp=4) == ((0, 0), (0, 1))
