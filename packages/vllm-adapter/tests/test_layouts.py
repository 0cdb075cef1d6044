"""Hand-overs between engines of every recorded layout: the bytes are right, or the refusal says what is not supported.

The layouts are vLLM's own (`data/layouts.json`). The plan is made from the adapter's documents; what it moves is compared
with what the caches really hold (`truth.py`), byte by byte.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import truth
from byte_oracle.oracle import Request, prove
from fakes import peer
from recorded import engine, engine_facts, families, layer_caches, request

from kv_topology import BlockList, Planner, RankGeometry, TokenDeal, TransferPlan, reshard
from vllm_adapter.cache.documents import GeometryDocument
from vllm_adapter.cache.geometry import local_document, metadata_fields, region_caches, with_stages
from vllm_adapter.cache.vllm_peer import PeerPlanner, pack_document
from vllm_adapter.worker.registration import stream_shape
from vllm_adapter.worker.transfer.stream_parts import StreamShape

PRODUCER, CONSUMER = 1 << 20, 1 << 44

EQUAL_ENGINES_ONLY = {
    "flashinfer-nvfp4": "packing-differs",
    "rocm-planes": "packing-differs",
    "rocm-planes-outermost": "packing-differs",
    "rocm-planes-of-two-heads": "packing-differs",
    "replay-ring": "packing-differs",
    "ring-beside-latent": "axis-size-differs",
    "compressed-hybrid": "axis-size-differs",
}
"""Families that hand over between engines of the same size only, with the code of the refusal."""


def sizes_of(family: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (producer, consumer) sizes: all pairs under `KVDEV_LONG=1`, else the extremes both ways and the largest alike."""
    sizes = [int(tp) for tp in family["tp"]]
    if os.environ.get("KVDEV_LONG") == "1":
        return [(one, other) for one in sizes for other in sizes]
    return list(dict.fromkeys([(sizes[0], sizes[-1]), (sizes[-1], sizes[0]), (sizes[-1], sizes[-1])]))


SIZES = [(name, *sizes) for name, family in families().items() for sizes in sizes_of(family)]


def truths(name: str, tp: int, address: int) -> dict[tuple[int, int], RankGeometry]:
    """Return the geometries that the ranks of an engine really have."""
    return {(0, rank): truth.rank_geometry(name, tp, rank, address + (rank << 32)) for rank in range(tp)}


def prove_hand_over(
    producer: str,
    producer_tp: int,
    consumer: str,
    consumer_tp: int,
    asked: Request | None = None,
    read: Callable[[TransferPlan], Any] = lambda plan: plan,
) -> int:
    """Plan from documents, move tagged bytes, compare all of the consumer's memory with the truth."""
    documents, peers = engine(consumer, consumer_tp, CONSUMER), engine(producer, producer_tp, PRODUCER)
    return prove(
        truths(consumer, consumer_tp, CONSUMER),
        truths(producer, producer_tp, PRODUCER),
        asked or request(consumer, producer),
        lambda local, _: read(Planner().plan(documents[0, local.tp_rank], peers, peer_tp=producer_tp)),
    )


def assert_right(name: str, producer_tp: int, consumer_tp: int, hand_over: Callable[[], int]) -> None:
    """Assert that a hand-over brings the right bytes, or is refused by its code where only equal engines agree."""
    assert_bytes_or(EQUAL_ENGINES_ONLY.get(name) if producer_tp != consumer_tp else None, hand_over)


def assert_bytes_or(code: str | None, hand_over: Callable[[], int]) -> None:
    """Assert that a hand-over brings the right bytes, or is refused by a code."""
    if code is None:
        assert hand_over() > 0
        return
    with pytest.raises(Exception, match=rf"\({code}\)"):
        hand_over()


@pytest.mark.proves(
    "dense, latent, sparse latent, DeepSeek V4, windows, chunks, Mamba-2, other states: equal ranks, unequal ranks",
    "fp8, int8, drafter: equal ranks, unequal ranks",
)
@pytest.mark.parametrize(("name", "producer_tp", "consumer_tp"), SIZES)
def test_a_hand_over_brings_the_right_bytes_or_a_coded_refusal(name: str, producer_tp: int, consumer_tp: int) -> None:
    assert_right(name, producer_tp, consumer_tp, lambda: prove_hand_over(name, producer_tp, name, consumer_tp))


Made = dict[tuple[int, int], tuple[GeometryDocument, RankGeometry]]


def _stages(name: str, tp: int, base: int, parts: list[list[str]]) -> Made:
    """Return document and truth of each rank of an engine with these layers by stage; groups keep their numbers, as vLLM's."""
    made: Made = {}
    for rank, stage in itertools.product(range(tp), range(len(parts))):
        # Processes of the same make often have their memory at the same addresses.
        address = base + (rank << 32)
        facts = dataclasses.replace(engine_facts(name, tp, rank), pp=len(parts), pp_rank=stage)
        caches = [cache for cache in layer_caches(name, tp, address) if cache.layer in parts[stage]]
        held = [tuple(layer for layer in group.layers if layer in parts[stage]) for group in facts.groups]
        groups = tuple(dataclasses.replace(group, layers=part) for group, part in zip(facts.groups, held, strict=True))
        whole = truth.rank_geometry(name, tp, rank, address)
        regions = tuple(region for region in whole.regions if region.members[0].layer in parts[stage])
        real = dataclasses.replace(whole, pp_size=len(parts), pp_rank=stage, regions=regions)
        made[stage, rank] = local_document(dataclasses.replace(facts, groups=groups), caches), real
    every = {rank: [made[stage, rank][0] for stage in range(len(parts))] for rank in range(tp)}
    return {key: (with_stages(document, every[key[1]]), real) for key, (document, real) in made.items()}


def _parts_of(name: str, pp: int) -> list[list[str]]:
    """Return the layers by stage: single ones, then the rest. Where a group has one layer, other stages have none of it."""
    layers = [layer for group in engine_facts(name, 1, 0).groups for layer in group.layers]
    return [[layer] for layer in layers[: pp - 1]] + [layers[pp - 1 :]]


STAGES = [
    (*case, *pp)
    for case in {name: (name, *sizes) for name, *sizes in SIZES}.values()
    for pp in ((2, 1), (1, 2), (2, 2), (3, 2))
    if _parts_of(str(case[0]), max(pp))[-1]
]


@pytest.mark.proves(
    "dense, latent, sparse latent, DeepSeek V4, windows, chunks, Mamba-2, other states: pipeline",
    "fp8, int8, drafter: pipeline",
)
@pytest.mark.parametrize(("name", "producer_tp", "consumer_tp", "producer_pp", "consumer_pp"), STAGES)
def test_pipeline_stages_hand_over(
    name: str, producer_tp: int, consumer_tp: int, producer_pp: int, consumer_pp: int
) -> None:
    """Every stage reads its own layers from the stages that hold them, and knows how many ranks read each producer rank."""
    sides = [(producer_tp, producer_pp, PRODUCER), (consumer_tp, consumer_pp, CONSUMER)]
    theirs, ours = (_stages(name, tp, base, _parts_of(name, pp)) for tp, pp, base in sides)
    peers = {key: document for key, (document, _) in theirs.items()}

    def plan(local: RankGeometry, _: object) -> TransferPlan:
        return Planner().plan(ours[local.pp_rank, local.tp_rank][0], peers, peer_tp=producer_tp)

    consumers, producers = ({key: geometry for key, (_, geometry) in made.items()} for made in (ours, theirs))
    assert_right(name, producer_tp, consumer_tp, lambda: prove(consumers, producers, request(name, name), plan))


def _cut(
    name: str, request: Request, *, start: int = 0, starts_late: bool = False, dcps: tuple[int, int] = (1, 1)
) -> Request:
    """Return a request without the blocks of a prefix hit (to `start`, here) and, if asked for, those that no window shows.

    `dcps` are the context sizes here and there: a block stands for its tokens on all ranks.
    """
    groups, tokens = engine_facts(name, 1, 0).groups, request.tokens
    sides: list[list[Any]] = []
    for blocks, begin, dcp in zip((request.local, request.peer), (start, 0), dcps, strict=True):
        spans = [group.block_tokens * dcp for group in groups]
        seen = [tokens - group.window_tokens if starts_late and group.window_tokens else 0 for group in groups]
        skips = [max(begin, first, 0) // span for first, span in zip(seen, spans, strict=True)]
        sides.append([
            each if group.kind == "state" else BlockList(each[0][skip : -(-tokens // span)], skip * span, null=0)
            for group, each, skip, span in zip(groups, blocks, skips, spans, strict=True)
        ])  # fmt: skip
    return Request(sides[0], sides[1], tokens)


@pytest.mark.proves("sparse latent, DeepSeek V4, fp8, int8, drafter: prefix hits")
@pytest.mark.parametrize("name", families())
def test_a_read_fills_what_a_prefix_hit_left(name: str) -> None:
    whole, tp = request(name, name), max(map(int, families()[name]["tp"]))
    assert prove_hand_over(name, tp, name, tp, _cut(name, whole, start=whole.tokens - 1)) > 0


def _in_parts(plan: TransferPlan, shape: StreamShape) -> Any:
    """Return a plan whose reads are those of a stream's parts, as workers ask for them one after the other."""

    def route(local: Any, peer: Any, *, tokens: int) -> Any:
        ids: dict[int, int] = {}
        for part, blocks in zip(shape.parts(tokens, 0, tokens, is_last=True), peer, strict=True):
            ids |= {part.place + number: block for number, block in enumerate(blocks.ids)}
        read: dict[Any, list[Any]] = {rank: [] for rank in plan.producer_ranks}
        for start in range(0, tokens, shape.entry_tokens):
            stop = min(start + shape.entry_tokens, tokens)
            parts = shape.parts(tokens, start, stop, is_last=stop == tokens)
            lists = shape.local_blocks(parts, local), shape.peer_blocks(parts, ids, peer)
            for rank, found in read.items():
                found.append(plan.indices(rank, *lists, tokens=stop))
        joined = {rank: [np.concatenate(side) for side in zip(*found, strict=True)] for rank, found in read.items()}
        return SimpleNamespace(indices=joined)

    assert not plan.is_staged
    names = (
        "local_rows",
        "peer_rows",
        "reader_count",
        "producer_ranks",
        "notify_only_ranks",
        "is_staged",
        "staged_regions",
    )
    return SimpleNamespace(route=route, **{each: getattr(plan, each) for each in names})


@pytest.mark.full
@pytest.mark.proves("sparse latent, DeepSeek V4, chunks, other states, fp8, int8, drafter: streamed")
@pytest.mark.parametrize("name", families())
def test_the_parts_of_a_stream_fill_what_a_whole_read_fills(name: str) -> None:
    whole, tp = request(name, name), max(map(int, families()[name]["tp"]))
    shape = stream_shape(engine_facts(name, tp, 0))
    assert whole.tokens > shape.entry_tokens
    late = _cut(name, whole, starts_late=True)
    assert prove_hand_over(name, tp, name, tp, late, lambda plan: _in_parts(plan, shape)) > 0


def _read_by_metadata(name: str, tp: int, peer_tp: int, *, release: str = "", **said: Any) -> int:
    """Prove a read from ranks that send what vLLM's own connector sends, or `said` beside it.

    `integration_tests/host/inside/test_layouts.py` compares these regions with those that vLLM's own worker registers.
    """
    reported, metadata = peer(tp=peer_tp), {}
    optional = {"geometry": None, "capabilities": (), "factors": {}}
    for rank, document in engine(name, peer_tp, PRODUCER).items():
        facts, caches = engine_facts(name, peer_tp, rank[1]), layer_caches(name, peer_tp, PRODUCER + (rank[1] << 32))
        sends = {"geometry": pack_document(document)} if said else {}
        metadata[rank] = SimpleNamespace(**optional | dict(metadata_fields(facts, caches)) | said | sends)
    documents, dealt = engine(name, tp, CONSUMER), engine_facts(name, tp, 0).dealt_groups

    def plan(local: RankGeometry, _: object) -> Any:
        planner = PeerPlanner(documents[0, local.tp_rank], dealt, reshard, Planner(), "DRAM", release=release)
        planner.check_sizes(reported, cast("Any", metadata[0, 0]))
        ranks = {rank: metadata[rank] for rank in planner.target_ranks(reported)}
        return planner.plan(reported, planner.read(reported, cast("Any", ranks)))

    return prove(truths(name, tp, CONSUMER), truths(name, peer_tp, PRODUCER), request(name, name), plan)


HOSTS_OWN = {
    "flash-attn-cross-layer-tokens-first": "page-bytes-differ",
    "flash-attn-heads-across-layers": "parts-overlap",
    "flash-attn-heads-outermost": "parts-overlap",
    "rocm-planes-outermost": "page-bytes-differ",
    "deepseek-v4": "page-bytes-differ",
    "deepseek-v4-big-blocks": "page-bytes-differ",
    "compressed-hybrid": "state-bytes-differ",
}
"""Families of which that connector says too little: several layers or heads in one region, or groups with unequal pages."""


@pytest.mark.full
@pytest.mark.proves(
    "dense, latent, sparse latent, windows, chunks, Mamba-2, other states, fp8, int8, drafter: from vLLM's own",
    "DeepSeek V4: from vLLM's own = page-bytes-differ",
)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", families())
def test_pages_of_the_hosts_own_connector_are_read_right_or_refused_by_a_code(
    name: str, sizes: tuple[int, int]
) -> None:
    unequal = "page-bytes-differ" if sizes[0] != sizes[1] and name in EQUAL_ENGINES_ONLY else None
    assert_bytes_or(unequal or HOSTS_OWN.get(name), lambda: _read_by_metadata(name, *sizes[::-1]))


READ_ELSEWHERE = (
    "flash-attn",
    "triton",
    "flashinfer-split-blocks",
    "flashmla",
    "cutlass-mla",
    "mla-with",
    "mamba-2",
    "cpu",
)
"""Beginnings of families whose elements have 16 bits or more, in an order that documents describe in full."""


@pytest.mark.proves(
    "dense, latent, windows, chunks, Mamba-2, drafter: other release",
    "sparse latent, DeepSeek V4, other states, fp8, int8: other release = release-differs",
)
@pytest.mark.parametrize("name", families())
def test_pages_of_another_release_are_read_where_documents_say_all_about_them(name: str) -> None:
    def hand_over() -> int:
        return _read_by_metadata(name, 2, 2, release="0.32.0", factors={"vllm_version": "0.33.0"})

    is_read = name.startswith(READ_ELSEWHERE) and not any(part in name for part in ("fp8", "int", "sparse"))
    assert_bytes_or(None if is_read else "release-differs", hand_over)


CONTEXTS = [(2, 2), (2, 1), (1, 2)]


def _context(name: str, dcp: int, address: int) -> Made:
    """Return document and truth of the ranks of an engine that are one context group and take turns block by block."""
    made: Made = {}
    for rank in range(dcp):
        base, facts = address + (rank << 32), engine_facts(name, dcp, rank)
        turn = min(group.block_tokens for group in facts.groups)
        real = truth.rank_geometry(name, dcp, rank, base)
        deal = TokenDeal(dcp, rank, turn)
        groups = tuple(group if group.is_state else dataclasses.replace(group, deal=deal) for group in real.groups)
        facts = dataclasses.replace(facts, dcp=dcp, interleave_tokens=turn)
        made[0, rank] = local_document(facts, layer_caches(name, dcp, base)), dataclasses.replace(real, groups=groups)
    return made


ON_EVERY_RANK = [name for name, each in families().items() if each["total_kv_heads"] == 1 and "draft" not in name]
"""Families of one head or of latents, which context ranks share. vLLM does not deal out a draft with heads beside them."""


@pytest.mark.full
@pytest.mark.proves(
    "dense, latent, sparse latent, other states, fp8, int8: context",
    "DeepSeek V4: context = packed-block-needs-equal-pages",
)
@pytest.mark.parametrize("dcps", CONTEXTS)
@pytest.mark.parametrize("name", ON_EVERY_RANK)
def test_context_ranks_that_share_heads_hand_over(name: str, dcps: tuple[int, int]) -> None:
    producers, consumers = (_context(name, dcp, base) for dcp, base in zip(dcps, (PRODUCER, CONSUMER), strict=True))
    peers = {rank: document for rank, (document, _) in producers.items()}

    def plan(local: RankGeometry, _: object) -> TransferPlan:
        return Planner().plan(consumers[0, local.tp_rank][0], peers, peer_tp=dcps[0])

    ours, theirs = ({rank: real for rank, (_, real) in made.items()} for made in (consumers, producers))
    code = "packed-block-needs-equal-pages" if name.startswith("deepseek-v4") else None
    code = code or (EQUAL_ENGINES_ONLY.get(name) if dcps != (2, 2) else None)
    assert_bytes_or(code, lambda: prove(ours, theirs, _cut(name, request(name, name), dcps=dcps[::-1]), plan))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_that_no_stage_holds_is_refused_by_the_plan(stage: int) -> None:
    """The handshake compares only what a stage holds."""
    first, last = engine_facts("flash-attn", 1, 0).groups[0].layers
    made = _stages("flash-attn", 1, PRODUCER, [[first if stage else last]] * 2)
    peers = {key: document for key, (document, _) in made.items()}
    with pytest.raises(Exception, match="holds layer") as caught:
        Planner().plan(engine("flash-attn", 1, CONSUMER)[0, 0], peers, peer_tp=1)
    assert getattr(caught.value, "code", None) == "layer-not-held"


ORDERS = [
    ("flash-attn", "flash-attn-tokens-first"),
    ("flash-attn-tokens-first", "flash-attn-cross-layer"),
    ("flash-attn-cross-layer-tokens-first", "flash-attn"),
    ("flash-attn-heads-across-layers", "flash-attn"),
    ("flash-attn", "flash-attn-heads-outermost"),
    ("flash-attn-big-blocks", "flash-attn"),
    ("flash-attn", "flash-attn-big-blocks"),
    ("flash-attn-fp8-big-blocks", "flash-attn-fp8"),
    ("triton-int8-per-token-head", "triton-int8-big-blocks"),
    ("flashinfer-split-blocks", "flash-attn"),
    ("flash-attn-tokens-first", "flashinfer-split-blocks"),
    ("flashmla-split-blocks", "flashmla"),
    ("triton-mla", "flashmla-split-blocks"),
    ("flash-attn-sliding-groups-cross-layer", "flash-attn-sliding-groups"),
    ("mamba-2-rows-first", "mamba-2"),
    ("gated-delta", "gated-delta-split-blocks"),
    ("flashmla-sparse-fp8-with-indexer-cross-layer", "flashmla-sparse-fp8-with-indexer"),
]


@pytest.mark.proves("dense, latent, fp8, int8: unequal blocks")
@pytest.mark.parametrize(("producer", "consumer"), ORDERS)
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1)])
def test_engines_of_the_same_model_may_differ_in_layout_and_block_size(
    producer: str, consumer: str, producer_tp: int, consumer_tp: int
) -> None:
    assert prove_hand_over(producer, producer_tp, consumer, consumer_tp) > 0


E4M3, BFLOAT = [["torch.float8_e4m3fn"]], [["torch.bfloat16"]]
NARROWER = [
    ("flash-attn-fp8", "flash-attn"),
    ("flash-attn-fp8", "flash-attn-tokens-first"),
    ("flash-attn-fp8", "flash-attn-cross-layer"),
    ("flash-attn-fp8", "flash-attn-heads-across-layers"),
    ("flash-attn-fp8-big-blocks", "flash-attn-heads-outermost"),
    ("flashinfer-fp8", "flash-attn-big-blocks"),
    ("flashinfer-fp8", "flashinfer-split-blocks"),
    ("flashmla-fp8", "flashmla-split-blocks"),
    ("flashmla-fp8", "triton-mla"),
]


@pytest.mark.proves("fp8 with scale 1 to bfloat16 or float32: proof")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(("producer", "consumer"), NARROWER)
def test_an_8_bit_cache_is_read_into_one_of_16(
    producer: str, consumer: str, producer_tp: int, consumer_tp: int
) -> None:
    """The oracle gives each element two bytes that both tell the one that was read."""
    ours, theirs = engine(consumer, consumer_tp, CONSUMER), engine(producer, producer_tp, PRODUCER)
    factors = {"vllm_version": "0.32.0", "cache_dtype": "fp8"}
    metadata = {
        rank: SimpleNamespace(geometry=pack_document(_typed(document, E4M3)), capabilities=("x",), factors=factors)
        for rank, document in theirs.items()
    }
    reported, dealt = peer(tp=producer_tp), engine_facts(consumer, consumer_tp, 0).dealt_groups

    def plan(local: RankGeometry, _: object) -> Any:
        document = _typed(ours[0, local.tp_rank], BFLOAT)
        planner = PeerPlanner(
            document, dealt, reshard, Planner(staging="auto"), "DRAM", (), "0.32.0", cache_dtype="auto"
        )
        return planner.plan(reported, planner.read(reported, cast("Any", metadata)))

    sides = truths(consumer, consumer_tp, CONSUMER), truths(producer, producer_tp, PRODUCER)
    assert prove(*sides, request(consumer, producer), plan) > 0


def _typed(document: GeometryDocument, types: list[list[str]]) -> GeometryDocument:
    return {**document, "groups": [{**group, "element_types": types} for group in document["groups"]]}


UNLIKE = [
    ("flash-attn", "flash-attn-fp8", "element-bytes-differ"),
    ("flash-attn", "flash-attn-few-heads", "axis-size-differs"),
    ("triton-int8-per-token-head", "triton", "field-missing"),
    ("mamba-2", "gated-delta", "field-missing"),
    ("flashmla", "flashmla-sparse-split-blocks", "element-bytes-differ"),
    ("flash-attn-draft-model-same-shape", "flash-attn-shared-cache", None),
    ("flash-attn", "flash-attn-draft-model-same-shape", "layer-not-held"),
    ("cpu", "flash-attn", "element-bytes-differ"),
    ("deepseek-v4", "deepseek-v4-big-blocks", "packing-differs"),
]


@pytest.mark.proves("DeepSeek V4: unequal blocks = packing-differs")
@pytest.mark.parametrize(("producer", "consumer", "code"), UNLIKE)
def test_unlike_caches_are_refused_with_a_code(producer: str, consumer: str, code: str | None) -> None:
    documents, peers = engine(consumer, 1, CONSUMER), engine(producer, 1, PRODUCER)
    if code is None:  # a producer may have more layers than the consumer asks for
        assert Planner().plan(documents[0, 0], peers, peer_tp=1).producer_ranks == ((0, 0),)
        return
    with pytest.raises(Exception, match="layer") as caught:
        Planner().plan(documents[0, 0], peers, peer_tp=1)
    assert getattr(caught.value, "code", None) == code


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (2, 1)])
def test_a_draft_layer_with_fewer_heads_than_ranks_is_refused_between_unequal_sizes(
    producer_tp: int, consumer_tp: int
) -> None:
    """The spec tells a rank's heads, but not that ranks of a smaller draft model hold copies of one."""

    def documents(tp: int, base: int) -> dict[tuple[int, int], GeometryDocument]:
        return {
            (0, rank): local_document(
                dataclasses.replace(engine_facts("flash-attn-one-head", tp, rank), total_kv_heads=4),
                layer_caches("flash-attn-one-head", tp, base + (rank << 32)),
            )
            for rank in range(tp)
        }

    consumer, peers = documents(consumer_tp, CONSUMER), documents(producer_tp, PRODUCER)
    with pytest.raises(Exception, match="both engines must agree") as caught:
        Planner().plan(consumer[0, 0], peers, peer_tp=producer_tp)
    assert getattr(caught.value, "code", None) == "axis-size-differs"


def test_layers_that_share_a_cache_are_registered_once() -> None:
    recorded = families()["flash-attn-shared-cache"]["tp"]["1"]["tensors"]
    assert recorded["layers.2"]["offset_bytes"] == recorded["layers.1"]["offset_bytes"]
    (document,) = engine("flash-attn-shared-cache", 1, PRODUCER).values()
    assert [region["members"][0][0] for region in document["regions"]] == ["layers.0", "layers.1"]


def test_heads_that_lie_apart_are_regions_of_their_own() -> None:
    facts, caches = engine_facts("flash-attn-heads-outermost", 1, 0), layer_caches("flash-attn-heads-outermost", 1, 0)
    parts = region_caches(facts, caches)
    assert [(part.layer, part.head_slot) for part in parts] == [(f"layers.{n}", h) for n in range(2) for h in range(4)]
    assert len({part.address for part in parts}) == 8
    assert region_caches(engine_facts("flash-attn", 1, 0), layer_caches("flash-attn", 1, 0)) == layer_caches(
        "flash-attn", 1, 0
    )
