"""Descriptor rows: addresses, expansion, limits, and memory that groups share."""

from dataclasses import replace

import numpy as np
import pytest
from block_lists import bytes_moved, lists
from byte_oracle import expand_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_topology import (
    Axis,
    FieldLayout,
    Group,
    Layout,
    Member,
    Region,
    UnsupportedTopology,
    plan_transfer,
)
from kv_topology.checks import find_aliases
from kv_topology.plan import slices
from kv_topology.plan.plan import _indices
from kv_topology.plan.slices import MAX_DESCRIPTORS, MAX_ROWS, SideColumns, build_rows
from kv_topology.tools import EngineSpec, ModelSpec, build_engine

DENSE = ModelSpec(("attention",), 2, 4)


def plan_of(model=DENSE, peer=None, **mine):
    local = build_engine(model, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(model, EngineSpec(**(peer if peer is not None else mine))))


def alias_of(*regions):
    """Views of group 0 and of group 1 that share memory: (base, stride, pages, group) each."""
    part = FieldLayout("x", 8, 0, (Axis("channel", 1, 0, 1, 8),))
    made = [
        Region(base, 8, stride, pages, (Member(f"l{number}", Layout((part,)), group),))
        for number, (base, stride, pages, group) in enumerate(regions)
    ]
    return find_aliases(made, (Group("attention", 4), Group("attention", 4)))


def test_memory_shared_by_groups_is_noted_once_per_shape():
    assert len(alias_of((4096, 8, 4, 0), (4096, 8, 4, 1))) == 1
    assert len(alias_of((4096, 8, 4, 0), (4096 + 24, 8, 4, 1))) == 1
    assert alias_of((4096, 8, 4, 0), (4096 + 32, 8, 4, 1)) == ()
    twice = [(8192, 8, 4, 0), (8192, 8, 4, 1)]
    assert len(alias_of((4096, 8, 4, 0), (4096, 8, 4, 1), *twice)) == 1
    assert len(alias_of((4096, 16, 4, 0), (4096, 8, 8, 1), *twice)) == 2
    assert len(alias_of((4096, 8, 8, 0), (4096, 16, 4, 1), *twice)) == 2
    assert len(alias_of((4096, 8, 4, 0), (4096 + 8, 8, 4, 1), *twice)) == 2


def test_expected_bytes_and_bytes_per_token():
    plan = plan_of(ModelSpec(("attention", "attention"), 2, 4))
    per_token = 2 * 2 * 2 * 4 * 2
    assert plan.bytes_per_token == per_token
    assert bytes_moved(plan, lists([1, 2], first=16), lists([3, 4, 5]), tokens=48) == 2 * 16 * per_token
    shared = plan_of(ModelSpec(("latent",), latent_dim=8), {"tp": 4, "dcp": 4})
    assert shared.bytes_per_token == pytest.approx(16)


def test_rows_and_their_expansion():
    local = build_engine(DENSE, EngineSpec(block_tokens=32, layout="packed-HND", block_count=3))[0, 0]
    peers = build_engine(DENSE, EngineSpec(block_tokens=16, layout="packed-HND", block_count=5))
    plan = plan_transfer(local, peers)
    base, peer_base = local.regions[0].base_address, peers[0, 0].regions[0].base_address
    unit, head, page = 16 * 2 * 4 * 2, 32 * 2 * 4 * 2, 2 * 32 * 2 * 4 * 2
    rows = plan.local_rows((0, 0))
    assert rows.dtype == np.uint64
    assert rows.tolist() == [[base + offset, unit, 0, page, 3] for offset in (0, unit, head, head + unit)]
    assert plan.peer_rows((0, 0)).tolist() == [
        [peer_base, unit, 0, page // 2, 5],
        [peer_base + unit, unit, 0, page // 2, 5],
    ]
    mine, theirs = plan.indices((0, 0), lists([2]), lists([4, 1]), tokens=32)
    assert theirs.tolist() == [1, 4, 6, 9]
    assert mine.tolist() == [5, 2, 11, 8]
    wide = expand_rows(rows)
    assert wide.shape == (12, 3)
    assert wide[5].tolist() == [base + unit + 2 * page, unit, 0]


def test_dense_units_are_one_row():
    local = build_engine(DENSE, EngineSpec(block_tokens=48, layout="packed-NHD", block_count=3))[0, 0]
    peers = build_engine(DENSE, EngineSpec(block_tokens=32, layout="packed-NHD", block_count=5))
    plan = plan_transfer(local, peers)
    unit = 16 * 2 * 2 * 4 * 2
    assert plan.local_rows((0, 0)).tolist() == [[local.regions[0].base_address, unit, 0, unit, 9]]
    mine, theirs = plan.indices((0, 0), lists([2, 0]), lists([4, 1, 0]), tokens=96)
    assert theirs.tolist() == [0, 1, 2, 3, 8, 9]
    assert mine.tolist() == [1, 2, 8, 0, 6, 7]


def rows_of(region, slices, units, before=0):
    zero = np.zeros(slices, dtype=np.int64)
    return build_rows([region], SideColumns(zero, zero, zero + 8, zero + 8), units, before)


def test_indices_end_at_int32():
    region = Region(4096, 8, 8, 1 << 20, ())
    room = MAX_DESCRIPTORS - (1 << 20)
    assert rows_of(region, 1, 1, room)[2] == MAX_DESCRIPTORS
    # The last one's number of descriptors is 2**63, which as an int64 is negative.
    for pages, rows, units, before in (
        (1 << 20, 1, 1, room + 1),
        (1 << 30, 2, 1, 0),
        (1 << 31, 1, 1, 0),
        (1 << 31, 2, 1 << 31, 0),
    ):
        with pytest.raises(UnsupportedTopology) as caught:
            rows_of(replace(region, page_count=pages), rows, units, before)
        assert caught.value.code == "too-many-descriptors"
        limit, count = (caught.value.context[name] for name in ("limit", "descriptors"))
        assert isinstance(limit, int)
        assert isinstance(count, int)
        assert limit < count


def test_pages_of_absurdly_many_units_are_refused(monkeypatch):
    gaps = Region(4096, 1 << 30, 1 << 30, 1, ())
    with pytest.raises(UnsupportedTopology) as caught:
        rows_of(gaps, 1, MAX_ROWS + 1)
    assert (caught.value.code, caught.value.context["rows"]) == ("plan-too-fine", MAX_ROWS + 1)
    assert len(rows_of(replace(gaps, page_stride_bytes=8 * (MAX_ROWS + 1)), 1, MAX_ROWS + 1)[0]) == 1
    monkeypatch.setattr(slices, "MAX_ROWS", 6)
    assert len(rows_of(gaps, 2, 3)[0]) == 6
    with pytest.raises(UnsupportedTopology):
        rows_of(gaps, 7, 1)


@st.composite
def sliced_regions(draw):
    """Regions, and slices of their pages: (region, offset, step)."""
    units, length = draw(st.integers(1, 3)), 4
    regions, slices, address = [], [], 1 << 40
    for number in range(draw(st.integers(1, 4))):
        step = length * draw(st.integers(1, 2)) if units > 1 else 0
        stride = max(step * units, length) + draw(st.sampled_from([0, 0, 12]))
        count = draw(st.integers(1, 4))
        regions.append(Region(address, stride, stride, count, (), device=number))
        slices += [(number, 0, step)] * draw(st.integers(0, 2))
        address += 1 << 20
    return units, regions, slices or [(0, 0, length if units > 1 else 0)]


@settings(deadline=None)
@given(sliced_regions(), st.integers(0, 5))
def test_every_page_and_unit_has_its_descriptor(drawn, before):
    units, regions, slices = drawn
    region, offset, step = (np.array(column) for column in zip(*slices, strict=True))
    side = SideColumns(region, offset, step, np.full(len(slices), 4))
    rows, rule, total = build_rows(regions, side, units, before)
    wide = expand_rows(rows).tolist()
    assert total == before + len(wide)
    assert len(rows) <= len(slices) * units
    pages = np.repeat(np.arange(min(r.page_count for r in regions)), units)
    unit = np.tile(np.arange(units), len(pages) // units)
    found = _indices([(rule, (pages * units + unit).astype(np.int32))]).reshape(len(slices), len(pages)) - before
    for (number, start, jump), indices in zip(slices, found.tolist(), strict=True):
        base, stride = regions[number].base_address, regions[number].page_stride_bytes
        expected = [[base + p * stride + start + u * jump, 4, number] for p, u in zip(pages, unit, strict=True)]
        assert [wide[index] for index in indices] == expected
