"""Checksums that do not depend on layouts, meanings of descriptors, and the shape of errors."""

import numpy as np
import pytest
from block_lists import lists

from kv_topology import (
    Group,
    InvalidBlocks,
    InvalidGeometry,
    TopologyError,
    canonical_segments,
    plan_transfer,
)
from kv_topology._reshard import reshard_layout
from kv_topology._tools import EngineSpec, ModelSpec, StateSpec, build_engine
from kv_topology._tools._engine_values import KV_LAYOUTS
from kv_topology.layouts import AttentionShape, cells_layout, layer_regions, packed_layout, rank_geometry
from kv_topology.testing import MemoryOfRank

MODEL = ModelSpec(("attention",) * 2, 4, 3)
LAYOUTS = [name for name in KV_LAYOUTS if name != "cpu"]


def gathered(geometry, block, **selection):
    memory = MemoryOfRank(geometry)
    memory.place_tags(lists([block]), [(0, 1 << 30)])
    streams = []
    for layer in geometry.layers:
        for name in ("key", "value"):
            stream = b""
            for number, offset, length in canonical_segments(geometry, layer, name, **selection).tolist():
                region = geometry.regions[number]
                at = region.base_address + block * region.page_stride_bytes - memory.start + offset
                stream += memory.data[at : at + length].tobytes()
            streams.append(stream)
    return streams


@pytest.mark.parametrize("layout", LAYOUTS)
def test_canonical_streams_are_the_same_in_every_layout(layout):
    reference = gathered(build_engine(MODEL, EngineSpec())[0, 0], 5)
    assert len(reference[0]) == 16 * 4 * 3 * 2
    assert gathered(build_engine(MODEL, EngineSpec(layout=layout))[0, 0], 7) == reference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_equals_its_part_of_the_whole(layout):
    whole = build_engine(MODEL, EngineSpec(layout=layout))[0, 0]
    shard = build_engine(MODEL, EngineSpec(2))[0, 1]
    assert gathered(whole, 2, interval=(2, 4)) == gathered(shard, 3)
    assert gathered(whole, 2, interval=(2, 4), tokens=(4, 8)) == gathered(shard, 3, tokens=(4, 8))
    assert gathered(shard, 3, tokens=(4, 8)) != gathered(shard, 3, tokens=(5, 9))


def test_neighbours_are_one_segment():
    geometry = build_engine(MODEL, EngineSpec(layout="split-NHD"))[0, 0]
    assert canonical_segments(geometry, "layers.1", "value").tolist() == [[3, 0, 16 * 4 * 3 * 2]]
    geometry = build_engine(MODEL, EngineSpec(layout="packed-NHD", block_tokens=2))[0, 0]
    segments = canonical_segments(geometry, "layers.1", "value", tokens=(1, 2))
    assert segments.tolist() == [[1, 4 * 12 + 6 + 12 * head, 6] for head in range(4)]


def test_heads_in_regions_of_their_own():
    geometry = build_engine(MODEL, EngineSpec(layout="heads-outer"))[0, 0]
    assert set(canonical_segments(geometry, "layers.1", "key", interval=(2, 3))[:, 0].tolist()) == {6}
    whole = canonical_segments(geometry, "layers.1", "key")
    assert whole[:5, 0].tolist() == [4, 5, 6, 7, 4]  # heads of the first token, then the next token
    assert int(whole[:, 2].sum()) == 16 * 4 * 3 * 2
    assert canonical_segments(geometry, "layers.1", "key", interval=(1, 3))[:3, 0].tolist() == [5, 6, 5]


@pytest.mark.parametrize(
    ("layer", "field", "interval"), [("x", "key", None), ("layers.0", "x", None), ("layers.0", "key", (3, 5))]
)
def test_cells_that_are_not_held(layer, field, interval):
    with pytest.raises(InvalidGeometry) as caught:
        canonical_segments(build_engine(MODEL, EngineSpec())[0, 0], layer, field, interval=interval)
    assert caught.value.code == "field-not-held"


STATE = StateSpec(heads=4, head_dim=2, state_dim=2, conv_rows=2)
PAIRS = [
    ({"block_tokens": 32, "kernel_block_tokens": 16}, {"block_tokens": 48}),
    ({"block_tokens": 48, "layout": "packed-NHD"}, {"block_tokens": 32, "layout": "packed-NHD"}),
    ({"block_tokens": 32}, {"block_tokens": 16, "layout": "split-HND"}),
]


@pytest.mark.parametrize(("mine", "theirs"), PAIRS)
def test_meanings_of_all_descriptors(mine, theirs):
    model = ModelSpec(("attention", "mamba2", "attention"), 4, 4, state=STATE)
    local = build_engine(model, EngineSpec(2, block_count=12, **mine))[0, 1]
    peers = build_engine(model, EngineSpec(1, block_count=12, **theirs))
    plan = plan_transfer(local, peers)
    pairs = plan.indices((0, 0), lists([3], [5]), lists([8, 1, 7], [4]), tokens=min(local.groups[0].block_tokens, 30))
    for indices, rows, geometry, is_local, blocks in (
        (pairs[0], plan.local_rows((0, 0)), local, True, {0: {3}, 1: {5}}),
        (pairs[1], plan.peer_rows((0, 0)), peers[0, 0], False, {0: {8, 1, 7}, 1: {4}}),
    ):
        ends = np.cumsum(rows[:, 4].astype(np.int64))
        for index in indices.tolist():
            row = int(np.searchsorted(ends, index, side="right"))
            place = index - int(ends[row] - rows[row, 4])
            address = int(rows[row, 0] + place * rows[row, 3])
            meaning = plan.explain((0, 0), index, is_local=is_local)
            region = geometry.regions[meaning.region]
            assert region.base_address + meaning.page * region.page_stride_bytes + meaning.offset_bytes == address
            assert meaning.length_bytes == rows[row, 1]
            assert meaning.block in blocks[meaning.group]
            assert meaning.contents
    assert {name for _, name in plan.explain((0, 0), int(pairs[0][0]), is_local=True).contents} <= {"key", "value"}
    last = plan.explain((0, 0), int(pairs[0][-1]), is_local=True)
    assert last.contents == (("layers.1", "ssm"),)
    with pytest.raises(InvalidGeometry) as caught:
        plan.explain((0, 0), int(plan.local_rows((0, 0))[:, 4].sum()), is_local=True)
    assert caught.value.code == "index-out-of-range"
    with pytest.raises(InvalidGeometry):
        plan.explain((0, 0), -1, is_local=True)


def test_errors_carry_what_a_caller_needs():
    error = InvalidBlocks("Block 5 is gone.", code="x", context={"block": 5})
    assert isinstance(error, TopologyError)
    assert (error.code, error.fault, error.is_retry_safe, dict(error.context)) == ("x", "local", False, {"block": 5})
    blamed = error.blamed_on("peer", rank=(0, 1))
    assert type(blamed) is InvalidBlocks
    assert (blamed.fault, dict(blamed.context), str(blamed)) == ("peer", {"block": 5, "rank": (0, 1)}, str(error))


def test_reshard_to_the_same_shard_is_the_identity():
    for layout in ("packed-HND", "packed-NHD", "halves-HND", "split-NHD"):
        member = build_engine(MODEL, EngineSpec(layout=layout))[0, 0].regions[0].members[0]
        assert reshard_layout(member.layout, tp_size=1, tp_rank=0, page_tokens=16) == member.layout


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_cells_are_packed_pages_without_their_inside(order):
    def plan(make):
        def rank(tp_size, tp_rank):
            regions = layer_regions(["a"], make(tp_size, tp_rank), base_address=4096, page_count=5)
            return rank_geometry([Group("attention", 8)], regions, tp_size=tp_size, tp_rank=tp_rank)

        return plan_transfer(rank(3, 1), {(0, tp): rank(2, tp) for tp in range(2)})

    def cells(tp_size, tp_rank):
        heads = AttentionShape(6, 4, 8, 2, tp_size, tp_rank).heads
        strides = {} if order == "HND" else {"head_stride_bytes": 16, "token_stride_bytes": heads * 16}
        return cells_layout(6, 8, 16, tp_size=tp_size, tp_rank=tp_rank, **strides)

    mine = plan(cells)
    packed = plan(lambda size, rank: packed_layout(AttentionShape(6, 4, 8, 2, size, rank), order))
    assert mine.producer_ranks == packed.producer_ranks == ((0, 0), (0, 1))
    for producer in mine.producer_ranks:
        assert mine.local_rows(producer).tolist() == packed.local_rows(producer).tolist()
        assert mine.peer_rows(producer).tolist() == packed.peer_rows(producer).tolist()
