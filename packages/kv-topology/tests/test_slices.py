"""Boxes into slices and slices into descriptor rows: what is joined, addresses, indices, and the limits."""

from dataclasses import replace

import numpy as np
from helpers import DENSE, indices, lists, refused

from kv_topology import Region, plan_transfer
from kv_topology.plan import slices
from kv_topology.plan.slices import MAX_DESCRIPTORS, MAX_ROWS, SideColumns, build_rows
from kv_topology.tools import EngineSpec, build_engine


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
