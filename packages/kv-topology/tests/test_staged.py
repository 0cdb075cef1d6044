"""Staged plans: proved by the oracle, and chosen by the cost model."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from byte_oracle.cases import FAMILIES, ProofCase, request_for
from byte_oracle.oracle import Request, prove
from helpers import lists, refused, sampled

from kv_topology import Cast, CostModel, Group, RankGeometry, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine

DENSE = ModelSpec(("attention",) * 2, 4, 8)
HYBRID = ModelSpec(("attention", "mamba2"), 4, 8, state=StateSpec(heads=8, head_dim=4, state_dim=4))
DEAR = CostModel(descriptor_us=1.0, bandwidth_gb_s=4.0, permute_gb_s=2.0, permute_launch_us=10.0, prompt_tokens=160)
PAIRS = [
    (mine, theirs, tp, peer_tp, block, peer_block)
    for mine, theirs in product(("packed-HND", "packed-NHD", "halves-HND", "halves-NHD"), repeat=2)
    for tp, peer_tp in ((1, 1), (1, 2), (2, 4), (1, 3), (2, 2))
    for block, peer_block in ((16, 16), (48, 16), (32, 16))
]


def always(local, peers):
    return plan_transfer(local, peers, staging="always")


@pytest.mark.parametrize(("mine", "theirs", "tp", "peer_tp", "block", "peer_block"), sampled(PAIRS))
def test_staged_plans_move_the_right_bytes(mine, theirs, tp, peer_tp, block, peer_block):
    consumer = EngineSpec(tp, block_tokens=block, layout=mine, block_count=8)
    producer = EngineSpec(peer_tp, block_tokens=peer_block, layout=theirs, block_count=12)
    case = ProofCase(DENSE, consumer, producer, 90, cached_blocks=1)
    assert prove(build_engine(DENSE, consumer), build_engine(DENSE, producer), request_for(case), always) > 0


def plan_of(mine, theirs, **options):
    local = build_engine(DENSE, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(DENSE, EngineSpec(**theirs)), **options)


def test_auto_stages_what_is_too_fine_and_only_that():
    same = plan_of({"layout": "packed-HND"}, {"layout": "packed-HND"}, staging="auto")
    assert not same.is_staged
    assert same.staged_regions == ()
    mixed = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto")
    assert mixed.is_staged
    assert len(mixed.peer_rows((0, 0))) == 2
    assert len(mixed.local_rows((0, 0))) == 2
    direct = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"})
    assert not direct.is_staged
    assert len(direct.peer_rows((0, 0))) == 2 * 4 * 16
    assert direct.estimate.direct_descriptors_per_token == 2 * 4
    assert mixed.estimate.staged_descriptors_per_token == 2 / 16
    assert mixed.bytes_per_token == direct.bytes_per_token == 2 * 2 * 4 * 8 * 2


def test_the_cost_model_decides():
    free = CostModel(descriptor_us=0.0)
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto", cost=free)
    assert not plan.is_staged
    assert plan.estimate.staged_us > plan.estimate.direct_us
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="auto", cost=DEAR)
    moved = 160 * 256
    assert plan.estimate.direct_us == pytest.approx(160 * 8 * 1.0 + moved / 4e3)
    assert plan.estimate.staged_us == pytest.approx(160 / 8 + moved / 4e3 + 2 * 10.0 + moved / 2e3)


def test_states_count_once_per_request():
    local = build_engine(HYBRID, EngineSpec(1, block_tokens=64, layout="packed-NHD"))[0, 0]
    plan = plan_transfer(local, build_engine(HYBRID, EngineSpec(1, block_tokens=64)), staging="auto", cost=DEAR)
    tables = plan.slices((0, 0))
    assert [table.pairing.local.is_state for table in tables] == [False, True]
    per_token, state_bytes, descriptors = 2 * 4 * 8 * 2, int(tables[1].columns.length.sum()), len(tables[1])
    found, wire = plan.estimate, (160 * per_token + state_bytes) / 4e3
    assert (found.bytes_per_token, found.state_bytes, found.state_descriptors) == (per_token, state_bytes, descriptors)
    assert (found.direct_descriptors_per_token, found.staged_descriptors_per_token) == (4, 1 / 64)
    assert found.direct_us == pytest.approx(160 * 4 + descriptors + wire)
    assert found.staged_us == pytest.approx(160 / 64 + descriptors + wire + 10.0 + 160 * per_token / 2e3)


def test_what_cannot_be_staged_is_refused_or_stays_direct():
    cases: list[tuple[ModelSpec, dict[str, Any], dict[str, Any]]] = [
        (ModelSpec(("latent",), latent_dim=8), {"tp": 2, "dcp": 2}, {"tp": 1}),
        (ModelSpec(("latent",), latent_dim=8), {"tp": 1}, {"tp": 2, "dcp": 2}),
        (DENSE, {"tp": 2, "layout": "packed-HND"}, {"tp": 1, "layout": "packed-NHD"}),
    ]
    for model, mine, theirs in cases:
        local = build_engine(model, EngineSpec(**mine))[0, 0]
        peers = build_engine(model, EngineSpec(**theirs))
        with refused("not-stageable"):
            plan_transfer(local, peers, staging="always")
        assert not plan_transfer(local, peers, staging="auto").is_staged
    consumer, producer = EngineSpec(1, block_tokens=64, layout="packed-NHD"), EngineSpec(2, block_tokens=64)
    request = request_for(ProofCase(HYBRID, consumer, producer, 100))
    prove(build_engine(HYBRID, consumer), build_engine(HYBRID, producer), request, always)


@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND")])
@pytest.mark.parametrize(("sizes", "is_staged"), [((16, 16), True), ((16, 24), False), ((24, 16), False)])
def test_layers_of_a_page_with_different_units_stay_direct(orders, sizes, is_staged):
    """Both layers share the consumer's pages; at the producer they are in groups of their own block sizes."""
    model = ModelSpec(("attention",) * 2, 4, 8)
    consumers = build_engine(model, EngineSpec(block_tokens=48, layout=f"cross-{orders[0]}", block_count=8))
    regions = []
    for layer, tokens in enumerate(sizes):
        engine = EngineSpec(block_tokens=tokens, layout=f"packed-{orders[1]}", block_count=12)
        region = build_engine(model, engine)[0, 0].regions[layer]
        member = replace(region.members[0], group=layer)
        regions.append(replace(region, base_address=(1 << 32) + (layer << 20), members=(member,)))
    groups = tuple(Group("attention", tokens) for tokens in sizes)
    producers = {(0, 0): RankGeometry(1, 0, groups, tuple(regions))}
    counts = [-(-90 // tokens) for tokens in sizes]
    request = Request(lists([5, 2]), lists([7, 1, 3, 9, 0, 4][: counts[0]], [2, 8, 5, 1, 6, 3][: counts[1]]), 90)
    assert plan_transfer(consumers[0, 0], producers, staging="auto").is_staged == is_staged
    prove(consumers, producers, request, lambda mine, theirs: plan_transfer(mine, theirs, staging="auto"))


def indented(geometry, room):
    """The same rank with that many bytes unused at the head of every page."""
    regions = tuple(
        replace(
            region,
            base_address=region.base_address * 2,
            page_bytes=region.page_bytes + room,
            page_stride_bytes=region.page_stride_bytes + room,
            members=tuple(replace(member, offset_bytes=member.offset_bytes + room) for member in region.members),
        )
        for region in geometry.regions
    )
    return replace(geometry, regions=regions)


@pytest.mark.parametrize("block", [16, 48])
def test_fields_need_not_begin_with_the_page(block):
    consumer = EngineSpec(1, block_tokens=block, layout="packed-HND", block_count=8)
    producer = EngineSpec(2, block_tokens=16, layout="packed-NHD", block_count=12)
    consumers = {rank: indented(one, 64) for rank, one in build_engine(DENSE, consumer).items()}
    producers = {rank: indented(one, 32) for rank, one in build_engine(DENSE, producer).items()}
    plan = always(consumers[0, 0], producers)
    assert [(region.start, region.stop) for region in plan.staged_regions] == [(64, 64 + 2 * 4 * block * 8 * 2)] * 2
    prove(consumers, producers, request_for(ProofCase(DENSE, consumer, producer, 90)), always)


def test_only_written_pages_are_permuted():
    plan = plan_of({"layout": "packed-HND"}, {"layout": "packed-NHD"}, staging="always")
    ((region, pages), _) = plan.route(lists([9, 4], first=16), lists([1, 2, 3]), tokens=48).staged
    assert pages.tolist() == [4, 9]
    assert (region.start, region.stop) == (0, 2 * 4 * 16 * 8 * 2)


WIDER = (Cast("e4m3", 1, "bfloat16", 2), Cast("e4m3", 1, "float32", 4), Cast("bfloat16", 2, "float32", 4))


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cast", WIDER)
def test_narrower_elements_arrive_in_every_geometry(family, cast):
    """Read directly, or whole where that is cheaper: each element is that of its place, and no other byte is written."""
    cases = list(FAMILIES[family]())
    kinds = set()
    for case in cases[:: max(1, len(cases) // 12)]:
        model = replace(case.model, element_bytes=cast.source_bytes, index_dim=0)
        producers = build_engine(model, case.producer)
        consumers = build_engine(replace(model, element_bytes=cast.target_bytes), case.consumer)
        casts = {number: cast for number, group in enumerate(consumers[0, 0].groups) if not group.is_state}

        def plan(local, peers, casts=casts, kinds=kinds):
            made = plan_transfer(local, peers, staging="auto", casts=casts)
            kinds.add(sum(len(region.moves) for region in made.staged_regions) > len(made.staged_regions))
            return made

        assert prove(consumers, producers, request_for(case), plan) > 0
    assert family != "layouts" or kinds == {False, True}


def test_a_cast_moves_the_producers_bytes_and_fills_its_pages():
    """A page of 4 heads x 16 tokens x (8 + 8) channels: 1024 bytes arrive, 2048 are written."""
    local = build_engine(DENSE, EngineSpec(1))[0, 0]
    peers = build_engine(replace(DENSE, element_bytes=1), EngineSpec(1))
    plan = plan_transfer(local, peers, casts={0: WIDER[0]})
    assert plan.bytes_per_token == 2 * 4 * 16
    assert {int(length) for length in plan.local_rows((0, 0))[:, 1]} == {1024}
    (move,) = plan.staged_regions[0].moves
    assert (plan.staged_regions[0].stop, plan.staged_regions[0].cast) == (2048, WIDER[0])
    assert (move.shape, move.source_strides, move.target_strides) == ((1, 1024), (0, 1), (0, 2))


def test_other_elements_than_those_of_the_cast_are_refused():
    local = build_engine(DENSE, EngineSpec(1))[0, 0]
    peers = build_engine(replace(DENSE, element_bytes=1), EngineSpec(1))
    for casts in ({}, {0: WIDER[1]}, {0: Cast("x", 2, "y", 2)}):
        with refused("element-bytes-differ"):
            plan_transfer(local, peers, casts=casts)
    hollow = replace(local, regions=tuple(map(without_value, local.regions)))
    with refused("not-stageable"):
        plan_transfer(hollow, peers, casts={0: WIDER[0]})


def without_value(region):
    """The same pages without the last field, which leaves a gap behind each key."""
    layout = replace(region.members[0].layout, fields=region.members[0].layout.fields[:1])
    return replace(region, members=(replace(region.members[0], layout=layout),))
