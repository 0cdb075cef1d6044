"""Geometry of vLLM's own connector, derived from ours: it must equal what that rank would have described itself."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
from byte_oracle.oracle import Request, prove
from fakes import peer

from kv_topology import BlockList, Planner, RankGeometry, Region, TopologyError, from_document, reshard, to_document
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine
from vllm_adapter.cache.vllm_peer import PeerPlanner, PeerRank, pack_document
from vllm_adapter.cli.check.engine import Engine
from vllm_adapter.errors import AdapterError

DENSE = ModelSpec(("attention",) * 12, 4, 8)
STATE = StateSpec(heads=8, head_dim=4, state_dim=4, groups=2, conv_rows=4)
HYBRID = ModelSpec(("attention", "mamba2", "mamba2"), 4, 8, state=STATE)
LATENT = ModelSpec(("latent",) * 3, latent_dim=24)


def sent(facts: dict[str, Any]) -> Any:
    """Return metadata as the handshake gives it, which has checked types and the lengths of lists."""
    optional = dict.fromkeys(("block_strides", "region_num_blocks", "region_names", "region_mem_types", "geometry"))
    return SimpleNamespace(**{**optional, "capabilities": (), **facts})


def derived(
    local: RankGeometry, facts: dict[str, Any], *, tp: int = 1, rank: int = 0, dcp: int = 1, dealt: bool = True
) -> RankGeometry:
    """The geometry of the peer's rank, through documents as the adapter derives it."""
    return from_document(planner_of(local, dealt=dealt).peer_document(sent(facts), (0, rank), peer(tp=tp, dcp=dcp)))


def planner_of(geometry: RankGeometry, *stages: RankGeometry, dealt: bool = False) -> PeerPlanner:
    document, *every = [cast("Any", to_document(each)) for each in (geometry, *stages)]
    return PeerPlanner(document, [dealt] * len(geometry.groups), reshard, Planner(), "DRAM", every)


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
    ("tp", "peer_tp", "name", "layouts", "names"), list(product(SIZES, SIZES, MODELS, LAYOUTS, (True, False)))[::STEP]
)
def test_derived_geometry_is_the_peers_own(tp, peer_tp, name, layouts, names):
    model = MODELS[name]
    mine = EngineSpec(tp, block_tokens=64, kernel_block_tokens=16, layout=layouts[0], block_count=6)
    block = 96 if model is HYBRID else 32
    theirs = EngineSpec(peer_tp, block_tokens=block, kernel_block_tokens=32, layout=layouts[1], block_count=9)
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


@pytest.mark.proves("parts of blocks in turn beside vLLM's own: proof = context-turns")
@pytest.mark.parametrize(("turn", "dcp", "is_refused"), [(16, 2, False), (4, 2, True), (4, 1, False)])
def test_a_peer_that_does_not_tell_its_turns_is_taken_to_deal_out_blocks_where_this_engine_does(turn, dcp, is_refused):
    engine = EngineSpec(2, dcp=2, block_tokens=16, interleave_tokens=turn)
    ranks = build_engine(LATENT, engine)
    with pytest.raises(AdapterError) if is_refused else nullcontext() as caught:
        derived(ranks[0, 0], facts_of(ranks[0, 1], engine), tp=2, rank=1, dcp=dcp)
    assert not is_refused or caught.value.code == "context-turns"


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


@pytest.mark.parametrize(
    ("true_tp", "claimed_tp"), [pair for pair in product((1, 2, 4), (1, 2, 4)) if pair[0] != pair[1]]
)
def test_the_first_rank_gives_a_lie_about_the_size_away(true_tp: int, claimed_tp: int) -> None:
    """A rank that is not there must not be asked for. Latent attention is replicated, so its pages are the same at any size."""
    for model, is_disproved in ((DENSE, True), (HYBRID, True), (LATENT, False)):
        engine = EngineSpec(true_tp, block_tokens=96, kernel_block_tokens=32)
        ours = build_engine(model, EngineSpec(1, block_tokens=96, kernel_block_tokens=32))[0, 0]
        first = sent(facts_of(build_engine(model, engine)[0, 0], engine))
        planner = planner_of(ours)
        with pytest.raises(AdapterError) if is_disproved else nullcontext() as caught:
            planner.check_sizes(peer(tp=claimed_tp), first)
        assert not is_disproved or caught.value.code in {"page-bytes-differ", "state-bytes-differ"}
        planner.check_sizes(peer(tp=true_tp), first)


PAIRS = ModelSpec(("attention", "mamba2") * 3, 4, 8, state=STATE)
"""Six layers that share memory in pairs: (0, 1), (2, 3), (4, 5)."""


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize(("model", "can_be_known"), [(DENSE, True), (LATENT, True), (HYBRID, False), (PAIRS, False)])
@pytest.mark.parametrize("true_pp", [1, 2])
def test_pipelines_are_read_only_where_stages_name_their_layers(
    model: ModelSpec, can_be_known: bool, names: bool, true_pp: int
) -> None:
    """Stage 0 of two of PAIRS names its regions 0 and 2, and holds no layer 3: it must not be read from there."""
    specs = [EngineSpec(1, pp, block_tokens=96, kernel_block_tokens=32) for pp in (1, true_pp)]
    whole, stage = (build_engine(model, spec)[0, 0] for spec in specs)
    planner = planner_of(whole)
    first = sent(facts_of(stage, specs[1], names=names))
    reported = peer(pp=2)
    ours = sent({**vars(first), "geometry": b"{}"})
    planner.check_sizes(reported, ours)  # its listener refuses a rank that is not there
    if can_be_known and names and true_pp == 2:
        planner.check_sizes(reported, first)
        return
    with pytest.raises(AdapterError) as caught:
        planner.check_sizes(reported, first)
    assert caught.value.code in {"pipeline-size-differs", "pipeline-regions-ambiguous"}
    if not can_be_known:
        with pytest.raises(AdapterError) as caught:
            list(planner.read(reported, {(0, 0): first, (1, 0): first}))
        assert caught.value.code == "pipeline-regions-ambiguous"


OWN_STAGES = list(product((DENSE, LATENT), (1, 2), (2, 3), (1, 2, 4), (1, 2, 3)))


@pytest.mark.parametrize(("model", "tp", "pp", "peer_tp", "peer_pp"), OWN_STAGES)
def test_stages_read_their_layers_from_the_hosts_own_connector(
    model: ModelSpec, tp: int, pp: int, peer_tp: int, peer_pp: int
) -> None:
    """Every producer rank gets as many reports as it is asked to wait for, whatever stages there are on both sides."""
    mine, theirs = (EngineSpec(*size, block_tokens=32, block_count=6) for size in ((tp, pp), (peer_tp, peer_pp)))
    ours, peers = build_engine(model, mine), build_engine(model, theirs)
    metadata, reported = {rank: sent(facts_of(peers[rank], theirs)) for rank in peers}, peer(tp=peer_tp, pp=peer_pp)

    def plan(local: RankGeometry, _: object) -> Any:
        planner = planner_of(local, *(ours[stage, local.tp_rank] for stage in range(pp)), dealt=True)
        planner.check_sizes(reported, metadata[0, 0])
        return planner.plan(
            reported, planner.read(reported, {rank: metadata[rank] for rank in planner.target_ranks(reported)})
        )

    request = Request([BlockList((1, 3), 0, None)], [BlockList((2, 4), 0, None)], 40)
    assert prove(ours, peers, request, plan)


@pytest.mark.parametrize("pp", [1, 2])
def test_stages_refuse_regions_of_the_hosts_own_connector_that_layers_share(pp: int) -> None:
    """The layers of a stage may share regions otherwise than those of the whole model, and a region has one name."""
    spec, reported = EngineSpec(1, pp, block_tokens=96, kernel_block_tokens=32), peer(pp=pp)
    ours = build_engine(PAIRS, EngineSpec(1, 2, block_tokens=96, kernel_block_tokens=32))
    metadata = {rank: sent(facts_of(found, spec)) for rank, found in build_engine(PAIRS, spec).items()}
    for own in ours.values():
        planner = planner_of(own, *ours.values())
        with pytest.raises(AdapterError) as first:
            planner.check_sizes(reported, metadata[0, 0])
        with pytest.raises(AdapterError) as all_ranks:
            list(planner.read(reported, metadata))
        assert {first.value.code, all_ranks.value.code} == {"pipeline-regions-ambiguous"}


OWN_CONTEXTS = [(1, 1, 2, 2), (2, 2, 1, 1), (2, 2, 2, 2), (4, 4, 4, 2), (4, 2, 8, 4), (8, 2, 8, 1)]


@pytest.mark.proves("context ranks of vLLM's own: proof")
@pytest.mark.parametrize(("tp", "dcp", "peer_tp", "peer_dcp"), [*OWN_CONTEXTS, (8, 2, 4, 1), (4, 1, 8, 2)])
def test_context_ranks_of_the_hosts_own_connector_are_read(tp: int, dcp: int, peer_tp: int, peer_dcp: int) -> None:
    """That connector pins turns of whole blocks and does not tell its turns."""
    mine, theirs = (
        EngineSpec(*size, block_tokens=16, block_count=6) for size in ((tp, 1, dcp), (peer_tp, 1, peer_dcp))
    )
    reported = peer(tp=peer_tp, dcp=peer_dcp)
    # Four heads on eight ranks are held twice, once per context rank.
    for model in [LATENT, DENSE] if min(tp // dcp, peer_tp // peer_dcp) >= 4 else [LATENT]:
        ours, peers = build_engine(model, mine), build_engine(model, theirs)
        metadata = {rank: sent(facts_of(peers[rank], theirs)) for rank in peers}

        def plan(local: RankGeometry, _: object, metadata: dict[Any, Any] = metadata) -> Any:
            planner = planner_of(local, dealt=True)
            planner.check_sizes(reported, metadata[0, 0])
            ranks = {rank: metadata[rank] for rank in planner.target_ranks(reported)}
            return planner.plan(reported, planner.read(reported, ranks))

        spans = [-(-70 // (16 * size)) for size in (dcp, peer_dcp)]
        lists = [BlockList(tuple(range(1, 1 + span)), 0, None) for span in spans]
        assert prove(ours, peers, Request([lists[0]], [lists[1]], 70), plan)


BFLOAT, HALF = [["torch.bfloat16"]], [["torch.float16"]]
STATES = [["torch.bfloat16", "torch.float32"]]
FP8 = [["torch.float8_e4m3fn"]]
OTHER_CACHE = {"vllm_version": "0.32.0", "cache_dtype": "fp8"}
QUANTIZED = ModelSpec(("attention",) * 2, 4, 8, element_bytes=1)
UNLIKE_RELEASES: dict[str, tuple[Any, ...]] = {
    # (model, how its pages are described, releases here and there, what the peer says, code)
    "patch": ("dense", {}, "0.34.0", "0.34.1", {}, ""),
    "build": ("dense", {}, "0.32.0+cpu", "0.32.0+cu130", {}, ""),
    "minor": ("dense", {}, "0.31.0", "0.33+cpu.kernels.0.32.0", {}, ""),
    "minor, latent": ("latent", {}, "0.33.1", "0.32.0", {}, ""),
    "minor, Mamba-2": ("hybrid", {}, "0.32.0", "0.33.0", {"element_types": STATES}, ""),
    "Mamba-2 with drafts": (
        "hybrid",
        {"drafts_states": True},
        "0.32.0",
        "0.33.0",
        {"element_types": STATES},
        "release-differs",
    ),
    "a state of another kind": ("hybrid", {"renamed": ("conv_b", "conv_k")}, "0.32.0", "0.32.1", {}, "release-differs"),
    "an unread release": ("dense", {}, "0.33.0", "0.34.0", {}, "release-differs"),
    "a kernel's own order": ("dense", {"packing": "planes:X"}, "0.32.0", "0.33.0", {}, "release-differs"),
    "the same within a release": ("dense", {"packing": "planes:X"}, "0.32.0", "0.32.0", {}, ""),
    "packed cells": ("dense", {"renamed": ("key", "cell")}, "0.32.0", "0.33.0", {}, "release-differs"),
    "8-bit elements": ("quantized", {}, "0.32.0", "0.33.0", {}, "release-differs"),
    "8-bit elements within a release": ("quantized", {}, "0.32.0", "0.32.0", {}, ""),
    "checks are off": ("quantized", {"is_off": True}, "0.32.0", "0.33.0", {}, ""),
    "no document": ("dense", {}, "0.32.0", "0.33.0", {"geometry": None}, "release-differs"),
    "the hosts own connector, patch": ("dense", {}, "0.32.0", "0.32.1", {"geometry": None}, ""),
    "the hosts own connector, patch, 8-bit": (
        "quantized",
        {},
        "0.32.0",
        "0.32.1",
        {"geometry": None},
        "release-differs",
    ),
    "a release that is not stated": ("dense", {}, "0.32.0", "", {"factors": {"model": "m"}}, "release-differs"),
    "the hosts own connector": ("quantized", {}, "0.32.0", "", {"geometry": None, "factors": {}}, ""),
    "a stage without layers of a group": ("dense", {}, "0.32.0", "0.33.0", {"element_types": []}, ""),
    "an older connector": ("dense", {}, "0.32.0", "0.33.0", {"element_types": None}, "release-differs"),
    "an older connector, patch": ("dense", {}, "0.32.0", "0.32.1", {"element_types": None}, ""),
    "an older connector within a release": ("dense", {}, "0.32.0", "0.32.0", {"element_types": None}, ""),
    "another type of one size": ("dense", {}, "0.32.0", "0.32.0", {"element_types": HALF}, "element-types-differ"),
    "another type, and release": ("dense", {}, "0.32.0", "0.33.0", {"element_types": HALF}, "element-types-differ"),
    "fewer bytes": ("dense", {}, "0.32.0", "0.32.0", {"element_types": FP8}, ""),
    "fewer bytes, and release": ("dense", {}, "0.32.0", "0.32.1", {"element_types": FP8}, "release-differs"),
    "another cache": ("dense", {}, "0.32.0", "", {"factors": OTHER_CACHE}, ""),
    "another cache, fewer bytes": ("dense", {}, "0.32.0", "", {"factors": OTHER_CACHE, "element_types": FP8}, ""),
    "another cache, types not stated": (
        "dense",
        {},
        "0.32.0",
        "",
        {"factors": OTHER_CACHE, "element_types": None},
        "element-types-differ",
    ),
    "another cache, with scales": (
        "dense",
        {},
        "0.32.0",
        "",
        {"factors": OTHER_CACHE, "element_types": []},
        "element-types-differ",
    ),
    "another 8-bit cache": (
        "quantized",
        {},
        "0.32.0",
        "",
        {"factors": OTHER_CACHE, "element_types": []},
        "element-types-differ",
    ),
    "another cache, a stage without layers of it": (
        "dense",
        {},
        "0.32.0",
        "",
        {"factors": OTHER_CACHE, "element_types": [], "regions": []},
        "",
    ),
    "another cache beside states": ("hybrid", {}, "0.32.0", "", {"factors": OTHER_CACHE, "element_types": STATES}, ""),
    "a lie": ("dense", {}, "0.32.0", "0.32.0", {"element_types": {"x": 9}}, "element-types-differ"),
}


@pytest.mark.proves("states with drafts between minor releases: proof = release-differs")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("case", UNLIKE_RELEASES.values(), ids=UNLIKE_RELEASES)
def test_a_peer_of_another_release_is_read_only_where_documents_say_all_about_the_bytes(case):
    name, given, release, peers_release, said, code = case
    geometry = build_engine({**MODELS, "quantized": QUANTIZED}[name], EngineSpec(1, block_tokens=16))[0, 0]
    document = cast("Any", to_document(geometry))
    for field in (each for fields in document["layouts"] for each in fields):
        old, new = given.get("renamed", ("", ""))
        field["name"] = field["name"].replace(old, new) if old else field["name"]
        field["packing"] = given.get("packing", "")
    types = STATES if name == "hybrid" else [] if name == "quantized" else BFLOAT
    ours, theirs = (
        {**document, "groups": [{**group, "element_types": each} for group in document["groups"]]}
        for each in (types, said.get("element_types", types))
    )
    metadata = sent(
        {
            **facts_of(geometry, EngineSpec(1, block_tokens=16)),
            "geometry": said.get(
                "geometry", pack_document({**theirs, "regions": said.get("regions", theirs["regions"])})
            ),
            "factors": said.get("factors", {"vllm_version": peers_release}),
        }
    )
    planner = PeerPlanner(
        cast("Any", ours),
        [False] * len(geometry.groups),
        reshard,
        cast("Any", SimpleNamespace(geometry=lambda *_: None)),
        "DRAM",
        release="" if given.get("is_off") else release,
        drafts_states=given.get("drafts_states", False),
    )
    with pytest.raises(AdapterError) if code else nullcontext() as refused:
        assert len(list(planner.read(peer(), {(0, 0): metadata}))) == 1
    assert (refused.value.code if refused else "") == code


CASTS = {
    "e4m3": (FP8, BFLOAT, ("torch.float8_e4m3fn", 1, "torch.bfloat16", 2)),
    "e5m2": ([["torch.float8_e5m2"]], BFLOAT, ("torch.float8_e5m2", 1, "torch.bfloat16", 2)),
    "16 bits": (BFLOAT, [["torch.float32"]], ("torch.bfloat16", 2, "torch.float32", 4)),
    "equal": (FP8, FP8, None),
    "of more bytes": (BFLOAT, FP8, None),
    "of as many": (HALF, BFLOAT, None),
    "numbers alone": ([["torch.int8"]], BFLOAT, None),
    "two kinds": ([[*FP8[0], *BFLOAT[0]]], BFLOAT, None),
    "a lie": ({"torch.float8_e4m3fn": 1}, BFLOAT, None),
    "not stated": (None, BFLOAT, None),
}


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("case", CASTS.values(), ids=CASTS)
def test_elements_are_cast_where_ours_hold_all_numbers_of_theirs(case):
    theirs, ours, kind = case
    document = typed(ours)
    asked: list[Any] = []
    plans = SimpleNamespace(plan=lambda *_, **options: asked.append(options["casts"]))
    planner = PeerPlanner(document, [False], reshard, cast("Any", plans), "DRAM")
    said = typed(theirs)["groups"]
    planner.plan(peer(), [PeerRank((0, 0), None, said), PeerRank((1, 0), None, typed([])["groups"])])
    assert asked == [{0: kind} if kind else {}]
    if kind:
        others = typed([["torch.float8_e5m2" if "e4m3" in kind[0] else "torch.float8_e4m3fn"]])["groups"]
        for ranks in ((said, others), (others, said)):
            with pytest.raises(AdapterError) as refused:
                planner.plan(peer(), [PeerRank((0, n), None, groups) for n, groups in enumerate(ranks)])
            assert refused.value.code == "element-types-differ"


@pytest.mark.never_wrong("A12")
def test_states_are_never_cast():
    """A staged plan moves states whole and unconverted, so bytes of another type would stay what they are."""
    wide = typed([["torch.float32"]])
    wide["groups"] = [{**group, "kind": "state"} for group in wide["groups"]]
    asked: list[Any] = []
    plans = SimpleNamespace(plan=lambda *_, **options: asked.append(options["casts"]))
    planner = PeerPlanner(wide, [False], reshard, cast("Any", plans), "DRAM", release="0.32.0")
    said = typed(BFLOAT)
    planner.plan(peer(), [PeerRank((0, 0), None, said["groups"])])
    assert asked == [{}]
    with pytest.raises(AdapterError) as refused:
        planner._check_release(cast("Any", SimpleNamespace(factors={}, geometry=b"{}")), said)
    assert refused.value.code == "element-types-differ"


def typed(types):
    document = cast("Any", to_document(build_engine(DENSE, EngineSpec(1))[0, 0]))
    return {**document, "groups": [{**group, "element_types": types} for group in document["groups"]]}


def test_a_check_refuses_drafted_states_of_another_release_as_an_engine_does() -> None:
    spec = EngineSpec(1, block_tokens=16)
    geometry = build_engine(MODELS["hybrid"], spec)[0, 0]
    packed = pack_document(cast("Any", to_document(geometry)))
    for drafter in ({}, {"speculative_config": {"method": "eagle"}}):
        given = {**facts_of(geometry, spec), "geometry": packed, "factors": {"vllm_version": "0.32.0", **drafter}}
        engine = Engine(cast("Any", None), {(0, 0): sent(given)}, cast("Any", None), None)
        assert engine.planner((0, 0)).drafts_states is bool(drafter)
