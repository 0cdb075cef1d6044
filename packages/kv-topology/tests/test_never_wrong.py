"""Cases that once moved wrong bytes, or refused what can be planned."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from byte_oracle.oracle import check_readers, expand_rows
from helpers import LATENT, bytes_moved, lists, refused

from kv_topology import (
    Axis,
    FieldLayout,
    Group,
    InvalidGeometry,
    Layout,
    Member,
    RankGeometry,
    Region,
    TokenDeal,
    plan_transfer,
    target_ranks,
)
from kv_topology.plan.readers import FieldClass, choose_pieces
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine


def check_reports(consumers, producers):
    """Return all consumer ranks' plans, after checking that every producer rank gets as many reports as each plan says."""
    plans = [plan_transfer(local, producers) for local in consumers.values()]
    check_readers(plans, list(producers))
    return plans


# ---------------------------------------------------------------------------------------------- one source of truth


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.never_wrong("A6")
def test_a_context_rank_that_contradicts_the_rule_is_refused(rank):
    local = build_engine(LATENT, EngineSpec(4, dcp=4, block_tokens=8))[0, 2]
    with refused("deal-irregular", expected=2):
        replace(local, groups=(replace(local.groups[0], deal=TokenDeal(4, rank, 8)),))


@pytest.mark.never_wrong("A6")
def test_a_layer_on_two_producer_stages_is_read_from_the_first():
    model = ModelSpec(("attention", "attention"), 2, 4)
    local = build_engine(model, EngineSpec(block_tokens=4))[0, 0]
    stages = build_engine(model, EngineSpec(pp=2, block_tokens=4))
    tied = replace(stages[0, 0].regions[0], base_address=1 << 40)
    producers = {**stages, (1, 0): replace(stages[1, 0], regions=(*stages[1, 0].regions, tied))}
    plan = plan_transfer(local, producers)
    page = 2 * 2 * 4 * 4 * 2
    assert bytes_moved(plan, lists([3]), lists([5]), tokens=4) == 2 * page
    written = np.concatenate(
        [expand_rows(plan.local_rows(r))[plan.indices(r, lists([3]), lists([5]), tokens=4)[0]] for r in producers]
    )
    assert len(np.unique(written[:, 0])) == len(written)
    check_reports({(0, 0): local}, producers)


@pytest.mark.never_wrong("A6")
def test_two_fields_of_one_name_in_a_layout_are_refused():
    def part(start, stop, offset):
        return FieldLayout("key", 1, offset, (Axis("head", 4, start, stop, 4, "tp"), Axis("channel", 4, 0, 4, 1)))

    layout = Layout((part(0, 2, 0), part(2, 4, 8)))
    with refused("field-twice", kind=InvalidGeometry):
        RankGeometry(1, 0, (Group("attention", 4),), (Region(4096, 16, 16, 4, (Member("a", layout, 0),)),))


def test_parts_split_along_different_axes_are_refused():
    def region(base, axis, other, start):
        axes = (Axis(axis, 4, start, start + 2, 4, "tp"), Axis(other, 4, 0, 4, 1))
        return Region(base, 16, 16, 4, (Member("a", Layout((FieldLayout("key", 1, 0, axes),)), 0),))

    regions = (region(4096, "head", "channel", 0), region(8192, "channel", "head", 2))
    with refused("parts-differ", kind=InvalidGeometry):
        RankGeometry(1, 0, (Group("attention", 4),), regions)


# ------------------------------------------------------------------------------------------------- readers, refusals


@pytest.mark.never_wrong("B8")
def test_readers_agree_where_groups_of_other_stages_are_dealt_out_otherwise():
    """A state group beside latents under context parallelism: each stage must count the other's readers by its group."""
    state = StateSpec(heads=4, head_dim=2, state_dim=2, groups=2, conv_rows=2)
    model = ModelSpec(("mamba2", "latent"), latent_dim=4, state=state)
    consumers = build_engine(model, EngineSpec(2, 2, 2, block_tokens=64, interleave_tokens=64))
    producers = build_engine(model, EngineSpec(2, 1, 2, block_tokens=64, interleave_tokens=64))
    check_reports(consumers, producers)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.never_wrong("B8")
def test_a_field_that_only_the_producer_has_is_not_read(stages):
    layers = ("attention",) * stages
    consumers = build_engine(ModelSpec(layers, 1, 4), EngineSpec(2, stages, block_tokens=4))
    producers = {}
    for rank, one in build_engine(ModelSpec(layers, 1, 4), EngineSpec(4, block_tokens=4)).items():
        tp = rank[1]
        extra = FieldLayout("extra", 1, 0, (Axis("head", 4, tp, tp + 1, 8, "tp"), Axis("channel", 8, 0, 8, 1)))
        regions = [
            Region((1 << 40) + (n << 20), 8, 8, 8, (Member(f"layers.{n}", Layout((extra,)), 0),)) for n in range(stages)
        ]
        producers[rank] = replace(one, regions=(*one.regions, *regions))
    plans = check_reports(consumers, producers)
    if stages == 1:
        assert [plan.producer_ranks for plan in plans] == [((0, 0),), ((0, 2),)]
        assert [plan.notify_only_ranks for plan in plans] == [((0, 1),), ((0, 3),)]


@pytest.mark.parametrize("tp", range(1, 7))
@pytest.mark.parametrize("peer_tp", range(1, 7))
@pytest.mark.parametrize("peer_pp", [1, 2, 3])
@pytest.mark.never_wrong("B8")
def test_target_ranks_name_every_rank_that_the_plan_reads_or_notifies(tp, peer_tp, peer_pp):
    """Stages with latents only, with heads only, and with none of our layers."""
    model = ModelSpec(("latent", "attention", "latent"), 4, 2, latent_dim=4)
    producers = build_engine(model, EngineSpec(peer_tp, peer_pp, block_tokens=4))
    whole = build_engine(model, EngineSpec(tp, block_tokens=4))
    few = {
        rank: replace(one, regions=tuple(r for r in one.regions if r.members[0].layer == "layers.0"))
        for rank, one in whole.items()
    }
    for consumers in (whole, few):
        for local in consumers.values():
            asked = target_ranks(local, peer_tp=peer_tp, peer_pp=peer_pp)
            plan = plan_transfer(local, {rank: producers[rank] for rank in asked})
            full = plan_transfer(local, producers)
            assert plan.producer_ranks == full.producer_ranks
            assert plan.notify_only_ranks == full.notify_only_ranks
            assert {*plan.producer_ranks, *plan.notify_only_ranks} <= set(asked)
        check_reports(consumers, producers)


@pytest.mark.parametrize(("tp", "dcp", "peer_tp", "peer_dcp"), [(2, 2, 4, 4), (4, 4, 2, 2), (4, 2, 4, 4), (8, 4, 8, 2)])
@pytest.mark.parametrize("turns", [(16, 16), (16, 4), (4, 16), (8, 2)])
@pytest.mark.never_wrong("B8")
def test_the_peers_interleave_is_not_assumed_to_be_ours(tp, dcp, peer_tp, peer_dcp, turns):
    consumers = build_engine(LATENT, EngineSpec(tp, dcp=dcp, block_tokens=16, interleave_tokens=turns[0]))
    producers = build_engine(LATENT, EngineSpec(peer_tp, dcp=peer_dcp, block_tokens=16, interleave_tokens=turns[1]))
    for local in consumers.values():
        asked = target_ranks(local, peer_tp=peer_tp, peer_dcp=peer_dcp)
        assert plan_transfer(local, {rank: producers[rank] for rank in asked}).producer_ranks
    check_reports(consumers, producers)


@pytest.mark.never_wrong("B1")
def test_a_rank_that_is_only_notified_has_no_rows():
    consumers, producers = build_engine(LATENT, EngineSpec(2)), build_engine(LATENT, EngineSpec(4))
    plan = plan_transfer(consumers[0, 0], producers)
    assert plan.notify_only_ranks == ((0, 1),)
    for rows in (plan.local_rows((0, 1)), plan.peer_rows((0, 1))):
        assert (rows.shape, rows.dtype) == ((0, 5), np.dtype(np.uint64))
    others: list[Any] = [(0, 2), (5, 5), (0, 0, 0), None]
    for rank in others:
        with refused("rank-not-read"):
            plan.local_rows(rank)


@pytest.mark.parametrize(
    ("parts", "tp", "peer_tp", "peer_dcp", "most"), [(1, 8, 8, 4, 4), (2, 4, 5, 1, 1), (1, 8, 8, 2, 2), (1, 6, 4, 1, 2)]
)
def test_replicas_are_loaded_evenly(parts, tp, peer_tp, peer_dcp, most):
    kind = FieldClass(parts, 1, 1, peer_dcp, 16)
    loads = [0] * peer_tp
    for rank in range(tp):
        for piece in choose_pieces(kind, tp, rank, peer_tp):
            loads[piece.producer] += 1
    assert max(loads) == most
