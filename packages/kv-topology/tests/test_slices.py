"""How boxes become slices: what is joined, what must not be, and the limit on fineness."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from named_layouts import AttentionShape, halves_layout, split_layouts

from kv_topology import (
    Axis,
    FieldLayout,
    Group,
    Layout,
    Member,
    RankGeometry,
    Region,
    UnsupportedTopology,
    plan_transfer,
)
from kv_topology.arithmetic import Runs, box_runs, run_count
from kv_topology.plan import slices
from kv_topology.plan.slices import MAX_DESCRIPTORS, MAX_ROWS, SliceColumns, join_runs
from kv_topology.tools import EngineSpec, ModelSpec, build_engine

SHAPE = AttentionShape(2, 4, 4, 1)
HALF = 2 * 4 * 4


def rank(*regions, tokens=4):
    return RankGeometry(1, 0, (Group("attention", tokens),), regions)


def columns(plan):
    found = plan.slices((0, 0))[0].columns
    chosen = (found.local_region, found.local_offset, found.peer_region, found.peer_offset, found.length)
    return list(zip(*(column.tolist() for column in chosen), strict=True))


def halves(base):
    return rank(Region(base, 2 * HALF, 2 * HALF, 3, (Member("a", halves_layout(SHAPE), 0),)))


def split_with_offset(base):
    key, value = split_layouts(SHAPE)
    return rank(
        Region(base, HALF, HALF, 3, (Member("a", key, 0),)),
        Region(base * 2, 2 * HALF, 2 * HALF, 3, (Member("a", value, 0, HALF),)),
    )


def test_neighbours_in_different_regions_are_not_joined():
    whole, parts = halves(4096), split_with_offset(4096)
    assert columns(plan_transfer(whole, {(0, 0): whole})) == [(0, 0, 0, 0, 2 * HALF)]
    assert columns(plan_transfer(parts, {(0, 0): whole})) == [(0, 0, 0, 0, HALF), (1, HALF, 0, HALF, HALF)]
    assert columns(plan_transfer(whole, {(0, 0): parts})) == [(0, 0, 0, 0, HALF), (0, HALF, 1, HALF, HALF)]


def two_fields(tokens, strides):
    fields = tuple(
        FieldLayout(name, 4, offset, (Axis("token", tokens, 0, tokens, stride),))
        for name, offset, stride in zip("xy", (0, 4), strides, strict=True)
    )
    return rank(Region(4096, 64, 64, 3, (Member("a", Layout(fields), 0),)), tokens=tokens)


def test_fields_that_step_apart_are_not_joined():
    small, same, apart = two_fields(1, (8, 8)), two_fields(2, (8, 8)), two_fields(2, (8, 16))
    assert columns(plan_transfer(same, {(0, 0): small})) == [(0, 0, 0, 0, 8)]
    assert columns(plan_transfer(small, {(0, 0): same})) == [(0, 0, 0, 0, 8)]
    assert columns(plan_transfer(apart, {(0, 0): small})) == [(0, 0, 0, 0, 4), (0, 4, 0, 4, 4)]
    assert columns(plan_transfer(small, {(0, 0): apart})) == [(0, 0, 0, 0, 4), (0, 4, 0, 4, 4)]


def test_runs_of_a_box():
    assert run_count([(3, 100, 100), (4, 10, 20)], 1) == 12
    assert run_count([(3, 8, 8), (4, 2, 2), (5, 24, 30)], 2) == 5
    runs = box_runs([(2, 100, 50), (3, 4, 8), (2, 2, 2)], 2, 7, 9)
    assert runs.here.tolist() == [7, 11, 15, 107, 111, 115]
    assert runs.there.tolist() == [9, 17, 25, 59, 67, 75]
    assert runs.length.tolist() == [4] * 6


def table(*rows):
    return Runs(*(np.array(column) for column in zip(*rows, strict=True)))


def test_joining_needs_both_sides():
    assert len(join_runs([table((0, 0, 4), (4, 4, 4), (8, 9, 4), (13, 13, 4))])) == 3
    unsorted = [table((4, 14, 4)), table((0, 10, 4))]
    joined = join_runs(unsorted)
    assert (joined.here.tolist(), joined.there.tolist(), joined.length.tolist()) == ([0], [10], [8])


def joined_one_by_one(rows):
    """Join (here, there, length, *same) rows that follow each other on both sides and agree in all else."""
    out: list[Any] = []
    for row in rows:
        if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2], out[-1][3:]) == (*row[:2], row[3:]):
            out[-1] = (*out[-1][:2], out[-1][2] + row[2], *row[3:])
        else:
            out.append(row)
    return out


def rising(steps):
    """Rows of (here, there, length) whose ends lie `steps` apart: (gap here, gap there, length)."""
    here = there = 0
    for gap, other, length in steps:
        here, there = here + gap, there + other
        yield here, there, length
        here, there = here + length, there + length


steps = st.lists(st.tuples(st.sampled_from([0, 0, 1]), st.sampled_from([0, 0, 1, -3]), st.integers(1, 5)), min_size=1)


@settings(deadline=None)
@given(steps, st.randoms())
def test_joined_runs_are_those_joined_one_by_one(chosen, random):
    rows = list(rising(chosen))
    shuffled = random.sample(rows, len(rows))
    found = join_runs([table(*shuffled)])
    joined = list(zip(found.here.tolist(), found.there.tolist(), found.length.tolist(), strict=True))
    assert joined == joined_one_by_one(rows)


@settings(deadline=None)
@given(
    st.lists(st.tuples(steps, st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=1),
    st.randoms(),
)
def test_joined_places_are_those_joined_one_by_one(chosen, random):
    """Some runs of rows, each in its own regions and steps; joined by region, peer region and place."""
    rows = [(*row, *same) for part, *same in chosen for row in rising(part)]
    random.shuffle(rows)
    here, there, length, region, peer_region, step, peer_step = (np.array(column) for column in zip(*rows, strict=True))
    found = slices._join_places(SliceColumns(region, here, step, peer_region, there, peer_step, length))
    region, here, step, peer_region, there, peer_step, length = (column.tolist() for column in found)
    ordered = sorted(rows, key=lambda row: (row[3], row[4], row[0]))
    assert list(zip(here, there, length, region, peer_region, step, peer_step, strict=True)) == joined_one_by_one(
        ordered
    )


def test_members_without_a_common_cell_have_no_slice():
    model = ModelSpec(("attention",), 4, 4, 1)
    engine = EngineSpec(layout="heads-outer")
    ranks = build_engine(model, engine)
    (found,) = plan_transfer(ranks[0, 0], ranks).slices((0, 0))
    assert (found.columns.local_region.tolist(), found.columns.peer_region.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert found.columns.length.tolist() == [2 * 4 * 16] * 4
    packed = build_engine(model, EngineSpec(2))
    (found,) = plan_transfer(packed[0, 1], ranks).slices((0, 0))
    assert (found.columns.peer_region.tolist(), found.columns.length.tolist()) == ([2, 3], [2 * 4 * 16] * 2)


def test_limits_stay():
    assert slices.MAX_SLICES == 262_144
    assert MAX_ROWS == 262_144
    assert np.iinfo(np.int32).max == MAX_DESCRIPTORS


def test_fields_with_and_without_tokens_are_joined():
    tokens = FieldLayout("x", 4, 0, (Axis("token", 4, 0, 4, 8), Axis("channel", 2, 0, 2, 4)))
    scales = FieldLayout("scale", 4, 32, (Axis("channel", 2, 0, 2, 4),))
    mine = rank(Region(4096, 40, 64, 3, (Member("a", Layout((tokens, scales)), 0),)))
    assert columns(plan_transfer(mine, {(0, 0): mine})) == [(0, 0, 0, 0, 40)]


def test_the_limit_on_slices(monkeypatch):
    model = ModelSpec(("attention",) * 3, 2, 4, 1)
    local = build_engine(model, EngineSpec(layout="packed-HND", block_tokens=4))[0, 0]
    peers = build_engine(model, EngineSpec(layout="packed-NHD", block_tokens=4))
    count = 3 * 2 * 4
    monkeypatch.setattr(slices, "MAX_SLICES", count)
    assert len(plan_transfer(local, peers).slices((0, 0))[0]) == count
    for limit in (count - 1, 2 * 4 - 1):
        monkeypatch.setattr(slices, "MAX_SLICES", limit)
        with pytest.raises(UnsupportedTopology) as caught:
            plan_transfer(local, peers)
        assert caught.value.code == "plan-too-fine"
        assert caught.value.context["limit"] == limit
