"""Boxes into slices and slices into descriptor rows: what is joined, addresses, indices, and the limits."""

from dataclasses import replace

import numpy as np
from byte_oracle.oracle import expand_rows
from helpers import DENSE, indices, lists, refused

from kv_topology import Region, plan_transfer
from kv_topology.arithmetic import box_runs, run_count
from kv_topology.plan import slices
from kv_topology.plan.slices import MAX_DESCRIPTORS, MAX_ROWS, SideColumns, build_rows
from kv_topology.tools import EngineSpec, build_engine


def test_runs_of_a_box():
    assert run_count([(3, 100, 100), (4, 10, 20)], 1) == 12
    assert run_count([(3, 8, 8), (4, 2, 2), (5, 24, 30)], 2) == 5
    runs = box_runs([(2, 100, 50), (3, 4, 8), (2, 2, 2)], 2, 7, 9)
    assert runs.here.tolist() == [7, 11, 15, 107, 111, 115]
    assert runs.there.tolist() == [9, 17, 25, 59, 67, 75]
    assert runs.length.tolist() == [4] * 6


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
    assert indices(plan, lists([2]), lists([4, 1]), tokens=32) == ([5, 2, 11, 8], [1, 4, 6, 9])
    wide = expand_rows(rows)
    assert wide.shape == (12, 3)
    assert wide[5].tolist() == [base + unit + 2 * page, unit, 0]


def test_dense_units_are_one_row():
    local = build_engine(DENSE, EngineSpec(block_tokens=48, layout="packed-NHD", block_count=3))[0, 0]
    peers = build_engine(DENSE, EngineSpec(block_tokens=32, layout="packed-NHD", block_count=5))
    plan = plan_transfer(local, peers)
    unit = 16 * 2 * 2 * 4 * 2
    assert plan.local_rows((0, 0)).tolist() == [[local.regions[0].base_address, unit, 0, unit, 9]]
    found = indices(plan, lists([2, 0]), lists([4, 1, 0]), tokens=96)
    assert found == ([1, 2, 8, 0, 6, 7], [0, 1, 2, 3, 8, 9])


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
        with refused("too-many-descriptors", limit=MAX_DESCRIPTORS):
            rows_of(replace(region, page_count=pages), rows, units, before)


def test_pages_of_absurdly_many_units_are_refused(monkeypatch):
    gaps = Region(4096, 1 << 30, 1 << 30, 1, ())
    with refused("plan-too-fine", rows=MAX_ROWS + 1):
        rows_of(gaps, 1, MAX_ROWS + 1)
    assert len(rows_of(replace(gaps, page_stride_bytes=8 * (MAX_ROWS + 1)), 1, MAX_ROWS + 1)[0]) == 1
    monkeypatch.setattr(slices, "MAX_ROWS", 6)
    assert len(rows_of(gaps, 2, 3)[0]) == 6
    with refused("plan-too-fine"):
        rows_of(gaps, 7, 1)
