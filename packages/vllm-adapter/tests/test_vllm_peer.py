"""Geometry of vLLM's own connector, derived from ours: it must equal what that rank would have described itself."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kv_topology import Planner, RankGeometry, Region, TopologyError, from_document, reshard, to_document
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine
from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.cache.vllm_peer import PeerGeometry
from vllm_adapter.errors import AdapterError
from vllm_adapter.worker.transfer.planner import PeerPlanner

DENSE = ModelSpec(("attention",) * 12, 4, 8)
STATE = StateSpec(heads=8, head_dim=4, state_dim=4, groups=2, conv_rows=4)
HYBRID = ModelSpec(("attention", "mamba2", "mamba2"), 4, 8, state=STATE)
LATENT = ModelSpec(("latent",) * 3, latent_dim=24)


def sent(facts: dict[str, Any]) -> Any:
    """Return metadata as the handshake gives it, which has checked types and the lengths of lists."""
    optional = dict.fromkeys(("block_strides", "region_num_blocks", "region_names", "region_mem_types", "geometry"))
    return SimpleNamespace(**{**optional, "capabilities": (), **facts})


def document_of(geometry: RankGeometry) -> Any:
    return to_document(geometry)


def derived(
    local: RankGeometry, facts: dict[str, Any], *, tp: int = 1, rank: int = 0, dcp: int = 1, dealt: bool = True
) -> RankGeometry:
    """The geometry of the peer's rank, through documents as the adapter derives it."""
    geometry, ours = PeerGeometry(reshard, [dealt] * len(local.groups)), document_of(local)
    return from_document(geometry.document(ours, sent(facts), (0, rank), PeerSizes(tp, 1, dcp)))


def planner_of(geometry: RankGeometry) -> PeerPlanner:
    return PeerPlanner(document_of(geometry), PeerGeometry(reshard, [False] * len(geometry.groups)), Planner(), "DRAM")


def facts_of(geometry: RankGeometry, engine: EngineSpec, *, names: bool = True) -> dict[str, Any]:
    """Return what that connector sends for a rank: one region per base address, page lengths per kernel block."""
    ratio = engine.block_tokens // engine.page_tokens
    slots: dict[int, Region] = {}
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


LISTS = ("kv_caches_base_addr", "block_lens", "block_strides")
MODELS = {"dense": DENSE, "latent": LATENT, "hybrid": HYBRID}
LAYOUTS = [("packed-HND",) * 2, ("packed-HND", "packed-NHD"), ("halves-NHD",) * 2, ("keys-by-channel",) * 2]
SIZES = (1, 2, 4, 8)
STEP = 1 if os.environ.get("KVDEV_LONG") == "1" else 11
"""Of 384 cases every 11th: 11 has no divisor in common with 384, so that each axis goes through all its values."""


@pytest.mark.parametrize(
    ("tp", "peer_tp", "name", "layouts", "names"),
    list(product(SIZES, SIZES, MODELS, LAYOUTS, (True, False)))[::STEP],
)
def test_derived_geometry_is_the_peers_own(tp, peer_tp, name, layouts, names):
    model = MODELS[name]
    mine = EngineSpec(tp, block_tokens=64, kernel_block_tokens=16, layout=layouts[0], block_count=6)
    theirs = EngineSpec(peer_tp, block_tokens=32, kernel_block_tokens=32, layout=layouts[1], block_count=9)
    if model is HYBRID:
        theirs = EngineSpec(peer_tp, block_tokens=96, kernel_block_tokens=32, layout=layouts[1], block_count=9)
    locals_, peers = build_engine(model, mine), build_engine(model, theirs)
    for rank in range(peer_tp):
        own = peers[0, rank]
        found = derived(locals_[0, tp - 1], facts_of(own, theirs, names=names), tp=peer_tp, rank=rank)
        assert found.groups == own.groups
        assert found.tp_rank == rank
        for left, right in zip(found.regions, own.regions, strict=True):
            assert left.members == right.members
            assert (left.base_address, left.page_stride_bytes) == (right.base_address, right.page_stride_bytes)
            assert left.page_count == right.page_count


def test_documents_in_and_out():
    engine = EngineSpec(2, block_tokens=16)
    ranks = build_engine(DENSE, engine)
    peer = derived(ranks[0, 0], facts_of(ranks[0, 1], engine), tp=2, rank=1, dcp=2)
    assert peer.tp_rank == 1
    assert (peer.groups[0].deal.size, peer.groups[0].deal.rank, peer.groups[0].deal.interleave_tokens) == (2, 1, 16)
    whole = derived(ranks[0, 0], facts_of(ranks[0, 1], engine), tp=2, rank=1, dcp=2, dealt=False)
    assert whole.groups[0].deal.size == 1


def test_device_memory_and_optional_lists():
    engine = EngineSpec(1, block_tokens=16, block_count=5)
    local = build_engine(DENSE, engine)[0, 0]
    facts = facts_of(local, engine)
    facts["region_mem_types"] = ["VRAM"] * 12
    facts["device_id"] = 3
    facts["region_num_blocks"] = [5, 4, 3, 2, 1, 5] * 2
    del facts["block_strides"]
    peer = derived(local, facts)
    assert {region.memory_kind for region in peer.regions} == {"VRAM"}
    assert {region.device for region in peer.regions} == {3}
    assert [region.page_count for region in peer.regions] == [5, 4, 3, 2, 1, 5] * 2


@pytest.mark.parametrize(
    ("model", "changes", "error", "code"),
    [
        (DENSE, {"block_lens": [77] * 12}, AdapterError, "page-bytes-differ"),
        (DENSE, {"block_lens": [4096] * 12}, AdapterError, "page-bytes-differ"),
        (DENSE, {"region_names": ["layers.77"] * 12}, AdapterError, "layer-not-held"),
        (DENSE, {"block_strides": [1] * 12}, TopologyError, "size-out-of-range"),
        (DENSE, {"region_num_blocks": [0] * 12}, TopologyError, "size-out-of-range"),
        (DENSE, {"region_mem_types": ["tape"] * 12}, TopologyError, "bad-memory-kind"),
        (HYBRID, {"ssm_sizes": [1, 2]}, AdapterError, "state-bytes-differ"),
        (DENSE, {"region_names": None, **dict.fromkeys(LISTS, [2048] * 3)}, AdapterError, "region-count-differs"),
    ],
)
def test_bad_numbers_are_refused(model, changes, error, code):
    engine = EngineSpec(1, block_tokens=64, kernel_block_tokens=16)
    local = build_engine(model, engine)[0, 0]
    with pytest.raises(error) as caught:
        derived(local, {**facts_of(local, engine), **changes})
    assert caught.value.code == code
    if code == "page-bytes-differ":
        assert (caught.value.fault, caught.value.context["expected"]) == ("peer", 2048)
        assert f"{changes['block_lens'][0]} bytes" in str(caught.value)
        assert "needs 2048" in str(caught.value)


def test_convolution_rows_are_derived_where_all_their_parts_shrink_alike_and_refused_elsewhere():
    def engine(tp):
        return EngineSpec(tp, block_tokens=64, kernel_block_tokens=16, conv_order="SD")

    local = build_engine(HYBRID, engine(1))[0, 0]
    halves = build_engine(HYBRID, engine(2))
    for rank in range(2):
        own = halves[0, rank]
        found = derived(local, facts_of(own, engine(2)), tp=2, rank=rank)
        assert [region.members for region in found.regions] == [region.members for region in own.regions]
    # Four ranks share two groups: B and C stay as they are while x shrinks, so rows get another inside.
    with pytest.raises(TopologyError) as caught:
        derived(local, facts_of(halves[0, 0], engine(2)), tp=4)
    assert caught.value.code == "layout-not-dense"


@pytest.mark.parametrize(("true_tp", "told_tp"), [pair for pair in product((1, 2, 4), (1, 2, 4)) if pair[0] != pair[1]])
def test_the_first_rank_gives_a_lie_about_the_size_away(true_tp: int, told_tp: int) -> None:
    """A rank that is not there must not be asked for. Latent attention is replicated, so its pages are the same at any size."""
    for model, is_told in ((DENSE, True), (HYBRID, True), (LATENT, False)):
        engine = EngineSpec(true_tp, block_tokens=96, kernel_block_tokens=32)
        ours = build_engine(model, EngineSpec(1, block_tokens=96, kernel_block_tokens=32))[0, 0]
        first = sent(facts_of(build_engine(model, engine)[0, 0], engine))
        planner = planner_of(ours)
        address: Any = PeerSizes(told_tp, 1, 1)
        with pytest.raises(AdapterError) if is_told else nullcontext() as caught:
            planner.check_sizes(address, first)
        assert not is_told or caught.value.code in {"page-bytes-differ", "state-bytes-differ"}
        planner.check_sizes(PeerSizes(true_tp, 1, 1), first)  # type: ignore[arg-type]


PAIRS = ModelSpec(("attention", "mamba2") * 3, 4, 8, state=STATE)
"""Six layers that share memory in pairs: (0, 1), (2, 3), (4, 5)."""


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize(("model", "can_be_told"), [(DENSE, True), (LATENT, True), (HYBRID, False), (PAIRS, False)])
@pytest.mark.parametrize("true_pp", [1, 2])
def test_pipelines_are_met_only_where_stages_tell_their_layers(
    model: ModelSpec, can_be_told: bool, names: bool, true_pp: int
) -> None:
    """Stage 0 of two of PAIRS names its regions 0 and 2, and holds no layer 3: it must not be read from there."""
    specs = [EngineSpec(1, pp, block_tokens=96, kernel_block_tokens=32) for pp in (1, true_pp)]
    whole, stage = (build_engine(model, spec)[0, 0] for spec in specs)
    planner = planner_of(whole)
    first = sent(facts_of(stage, specs[1], names=names))
    told: Any = PeerSizes(1, 2, 1)
    ours = sent({**vars(first), "geometry": b"{}"})
    planner.check_sizes(told, ours)  # its listener refuses a rank that is not there
    if can_be_told and names and true_pp == 2:
        planner.check_sizes(told, first)
        return
    with pytest.raises(AdapterError) as caught:
        planner.check_sizes(told, first)
    assert caught.value.code in {"pipeline-size-differs", "pipeline-regions-ambiguous"}
    if not can_be_told:
        with pytest.raises(AdapterError) as caught:
            list(planner.read(told, {(0, 0): first, (1, 0): first}))
        assert caught.value.code == "pipeline-regions-ambiguous"
