"""Geometry of vLLM's own connector, derived from ours: it must equal what that rank would have described itself."""

from itertools import product

import pytest

from kv_topology import (
    GeometryMismatch,
    InvalidGeometry,
    TopologyError,
    UnsupportedTopology,
    from_document,
    peer_document_from_vllm,
    peer_geometry_from_vllm,
    state_pages_per_block,
    to_document,
)
from kv_topology._engine import EngineSpec, ModelSpec, StateSpec, build_engine

DENSE = ModelSpec(("attention",) * 12, 4, 8)
STATE = StateSpec(heads=8, head_dim=4, state_dim=4, groups=2, conv_rows=4)
HYBRID = ModelSpec(("attention", "mamba2", "mamba2"), 4, 8, state=STATE)
LATENT = ModelSpec(("latent",) * 3, latent_dim=24)


def facts_of(geometry, engine, *, names=True):
    """What that connector sends for a rank: one region per base address, page lengths per kernel block."""
    ratio = engine.block_tokens // engine.page_tokens
    slots = {}
    for region in geometry.regions:
        slots.setdefault(region.base_address, region)
    views = list(slots.values())
    scale = [ratio if geometry.groups[v.members[0].group].is_state else 1 for v in views]
    states = [m.layout for v in geometry.regions for m in v.members if geometry.groups[m.group].is_state]
    conv = sum(f.held_bytes for f in states[0].fields if f.name.startswith("conv")) if states else 0
    return {
        "kv_caches_base_addr": [v.base_address for v in views],
        "block_lens": [v.page_stride_bytes // s for v, s in zip(views, scale, strict=True)],
        "block_strides": [v.page_stride_bytes // s for v, s in zip(views, scale, strict=True)],
        "num_blocks": engine.block_count * ratio,
        "block_size": engine.page_tokens,
        "kv_cache_layout": "NHD" if engine.layout.endswith("NHD") else "HND",
        "physical_blocks_per_logical_kv_block": ratio,
        "ssm_sizes": [conv, sum(f.held_bytes for f in states[0].fields) - conv if states else 0],
        "device_id": 0,
        **({"region_names": [v.members[0].layer for v in views]} if names else {}),
    }


@pytest.mark.parametrize(("tp", "peer_tp"), list(product((1, 2, 4, 8), (1, 2, 4, 8))))
@pytest.mark.parametrize("model", [DENSE, LATENT, HYBRID], ids=["dense", "latent", "hybrid"])
@pytest.mark.parametrize(
    "layouts",
    [("packed-HND",) * 2, ("packed-HND", "packed-NHD"), ("halves-NHD",) * 2, ("keys-by-channel",) * 2],
)
@pytest.mark.parametrize("names", [True, False])
def test_derived_geometry_is_the_peers_own(tp, peer_tp, model, layouts, names):
    mine = EngineSpec(tp, block_tokens=64, kernel_block_tokens=16, layout=layouts[0], block_count=6)
    theirs = EngineSpec(peer_tp, block_tokens=32, kernel_block_tokens=32, layout=layouts[1], block_count=9)
    if model is HYBRID:
        theirs = EngineSpec(peer_tp, block_tokens=96, kernel_block_tokens=32, layout=layouts[1], block_count=9)
    locals_, peers = build_engine(model, mine), build_engine(model, theirs)
    for rank in range(peer_tp):
        own = peers[0, rank]
        derived = peer_geometry_from_vllm(
            locals_[0, tp - 1], facts_of(own, theirs, names=names), peer_tp=peer_tp, peer_tp_rank=rank
        )
        assert derived.groups == own.groups
        assert derived.tp_rank == rank
        for left, right in zip(derived.regions, own.regions, strict=True):
            assert left.members == right.members
            assert (left.base_address, left.page_stride_bytes) == (right.base_address, right.page_stride_bytes)
            assert left.page_count == right.page_count


def test_documents_in_and_out():
    engine = EngineSpec(2, block_tokens=16)
    ranks = build_engine(DENSE, engine)
    document = peer_document_from_vllm(
        to_document(ranks[0, 0]), facts_of(ranks[0, 1], engine), peer_tp=2, peer_tp_rank=1, peer_dcp=2
    )
    peer = from_document(document)
    assert peer.tp_rank == 1
    assert (peer.groups[0].deal.size, peer.groups[0].deal.rank, peer.groups[0].deal.interleave_tokens) == (2, 1, 16)


def test_device_memory_and_optional_lists():
    engine = EngineSpec(1, block_tokens=16, block_count=5)
    local = build_engine(DENSE, engine)[0, 0]
    facts = facts_of(local, engine)
    facts["region_mem_types"] = ["VRAM"] * 12
    facts["device_id"] = 3
    facts["region_num_blocks"] = [5, 4, 3, 2, 1, 5] * 2
    del facts["block_strides"]
    peer = peer_geometry_from_vllm(local, facts, peer_tp=1, peer_tp_rank=0)
    assert {region.memory_kind for region in peer.regions} == {"VRAM"}
    assert {region.device for region in peer.regions} == {3}
    assert [region.page_count for region in peer.regions] == [5, 4, 3, 2, 1, 5] * 2


def change(name, value):
    return {name: value}


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        (change("block_lens", [77] * 12), GeometryMismatch, "page-bytes-differ"),
        (change("block_lens", [4096] * 12), GeometryMismatch, "page-bytes-differ"),
        (change("block_lens", [2048] * 11), InvalidGeometry, "peer-facts-malformed"),
        (change("block_lens", "x"), InvalidGeometry, "peer-facts-malformed"),
        (change("block_lens", [2048] * 11 + [True]), InvalidGeometry, "peer-facts-malformed"),
        (change("block_size", 0), InvalidGeometry, "peer-facts-malformed"),
        (change("block_size", None), InvalidGeometry, "peer-facts-malformed"),
        (change("num_blocks", -1), InvalidGeometry, "peer-facts-malformed"),
        (change("kv_caches_base_addr", None), InvalidGeometry, "peer-facts-malformed"),
        (change("region_names", ["x"]), InvalidGeometry, "peer-facts-malformed"),
        (change("region_names", ["layers.77"] * 12), GeometryMismatch, "layer-not-held"),
        (change("block_strides", [1] * 12), InvalidGeometry, "size-out-of-range"),
        (change("ssm_sizes", [1, "x"]), InvalidGeometry, "peer-facts-malformed"),
        (change("region_mem_types", ["tape"] * 12), InvalidGeometry, "bad-memory-kind"),
    ],
)
def test_bad_numbers_are_refused(changes, error, code):
    engine = EngineSpec(1, block_tokens=16)
    local = build_engine(DENSE, engine)[0, 0]
    with pytest.raises(error) as caught:
        peer_geometry_from_vllm(local, {**facts_of(local, engine), **changes}, peer_tp=1, peer_tp_rank=0)
    assert caught.value.code == code


def test_page_bytes_error_names_both_numbers():
    engine = EngineSpec(1, block_tokens=16)
    local = build_engine(DENSE, engine)[0, 0]
    facts = {**facts_of(local, engine), "block_lens": [2000] * 12, "block_strides": [2000] * 12}
    with pytest.raises(GeometryMismatch, match=r"2000 bytes.*needs 2048") as caught:
        peer_geometry_from_vllm(local, facts, peer_tp=1, peer_tp_rank=0)
    assert caught.value.context["expected"] == 2048
    assert caught.value.fault == "peer"


def test_state_sizes_are_checked():
    engine = EngineSpec(1, block_tokens=64, kernel_block_tokens=16)
    local = build_engine(HYBRID, engine)[0, 0]
    facts = {**facts_of(local, engine), "ssm_sizes": [1, 2]}
    with pytest.raises(GeometryMismatch) as caught:
        peer_geometry_from_vllm(local, facts, peer_tp=1, peer_tp_rank=0)
    assert caught.value.code == "state-bytes-differ"


def test_region_count_must_match_without_names():
    engine = EngineSpec(1, block_tokens=16)
    local = build_engine(DENSE, engine)[0, 0]
    facts = facts_of(local, engine, names=False)
    for name in ("kv_caches_base_addr", "block_lens", "block_strides"):
        facts[name] = facts[name][:3]
    with pytest.raises(GeometryMismatch) as caught:
        peer_geometry_from_vllm(local, facts, peer_tp=1, peer_tp_rank=0)
    assert (caught.value.code, caught.value.context["local"], caught.value.context["peer"]) == (
        "region-count-differs",
        12,
        3,
    )


def test_convolution_rows_are_derived_where_all_their_parts_shrink_alike_and_refused_elsewhere():
    def engine(tp):
        return EngineSpec(tp, block_tokens=64, kernel_block_tokens=16, conv_order="SD")

    local = build_engine(HYBRID, engine(1))[0, 0]
    halves = build_engine(HYBRID, engine(2))
    for rank in range(2):
        own = halves[0, rank]
        derived = peer_geometry_from_vllm(local, facts_of(own, engine(2)), peer_tp=2, peer_tp_rank=rank)
        assert [region.members for region in derived.regions] == [region.members for region in own.regions]
    # Four ranks share two groups: B and C stay as they are while x shrinks, so rows get another inside.
    with pytest.raises(UnsupportedTopology) as caught:
        peer_geometry_from_vllm(local, facts_of(halves[0, 0], engine(2)), peer_tp=4, peer_tp_rank=0)
    assert caught.value.code == "layout-not-dense"


@pytest.mark.parametrize(
    ("ssm_sizes", "page_bytes", "pages"),
    [((36864, 2097152), 8192, 261), ((18432, 1048576), 4096, 261), ((9216, 524288), 4096, 131)],
)
def test_state_pages_per_block(ssm_sizes, page_bytes, pages):
    assert state_pages_per_block(ssm_sizes, page_bytes) == pages


def test_every_error_is_coded():
    assert issubclass(GeometryMismatch, TopologyError)
