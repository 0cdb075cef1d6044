"""Hand-overs between engines of every recorded layout: the bytes are right, or the refusal says what is not supported.

The layouts are vLLM's own (`data/layouts.json`). The plan is made from the adapter's documents; what it moves is compared
with what the caches really hold (`truth.py`), byte by byte.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import truth
from byte_oracle.oracle import Proof, prove
from recorded import engine, engine_facts, families, layer_caches, request

from kv_topology import Planner, RankGeometry, TransferPlan
from vllm_adapter.cache.documents import GeometryDocument
from vllm_adapter.cache.geometry import local_document, region_caches

PRODUCER, CONSUMER = 1 << 20, 1 << 44

EQUAL_ENGINES_ONLY = {
    "flashinfer-nvfp4": "packing-differs",
    "rocm-planes": "packing-differs",
    "rocm-planes-outermost": "packing-differs",
    "rocm-planes-of-two-heads": "packing-differs",
    "replay-ring": "packing-differs",
    "ring-beside-latent": "axis-size-differs",
}
"""Families that hand over between engines of the same size only, with the code of the refusal."""


def sizes_of(family: dict[str, Any]) -> list[tuple[int, int]]:
    """Return (producer, consumer) sizes: all pairs under `KVDEV_LONG=1`, else the extremes both ways and the largest alike."""
    sizes = [int(tp) for tp in family["tp"]]
    if os.environ.get("KVDEV_LONG") == "1":
        return [(one, other) for one in sizes for other in sizes]
    return list(dict.fromkeys([(sizes[0], sizes[-1]), (sizes[-1], sizes[0]), (sizes[-1], sizes[-1])]))


SIZES = [(name, *sizes) for name, family in families().items() for sizes in sizes_of(family)]


def prove_hand_over(producer: str, producer_tp: int, consumer: str, consumer_tp: int) -> Proof:
    """Plan from documents, move tagged bytes, compare all of the consumer's memory with the truth."""
    documents, peers = engine(consumer, consumer_tp, CONSUMER), engine(producer, producer_tp, PRODUCER)
    return prove(
        {(0, r): truth.rank_geometry(consumer, consumer_tp, r, CONSUMER + (r << 32)) for r in range(consumer_tp)},
        {(0, r): truth.rank_geometry(producer, producer_tp, r, PRODUCER + (r << 32)) for r in range(producer_tp)},
        request(consumer, producer),
        lambda local, _: Planner().plan(documents[0, local.tp_rank], peers, peer_tp=producer_tp),
    )


def assert_right(name: str, producer_tp: int, consumer_tp: int, hand_over: Callable[[], Proof]) -> None:
    """Assert that a hand-over brings the right bytes, or is refused by its code where only equal engines agree."""
    code = EQUAL_ENGINES_ONLY.get(name) if producer_tp != consumer_tp else None
    if code is None:
        assert hand_over().bytes_proved > 0
        return
    with pytest.raises(Exception, match=r"both engines must agree") as caught:
        hand_over()
    assert getattr(caught.value, "code", None) == code


@pytest.mark.parametrize(("name", "producer_tp", "consumer_tp"), SIZES)
def test_a_hand_over_brings_the_right_bytes_or_a_coded_refusal(name: str, producer_tp: int, consumer_tp: int) -> None:
    assert_right(name, producer_tp, consumer_tp, lambda: prove_hand_over(name, producer_tp, name, consumer_tp))


def _stage(name: str, tp: int, rank: int, stage: int, layers: frozenset[str]) -> tuple[GeometryDocument, RankGeometry]:
    """Return the document and the truth of a rank of one of two pipeline stages; groups keep their numbers, as vLLM's do."""
    address = PRODUCER + (stage << 36) + (rank << 32)
    facts = engine_facts(name, tp, rank)
    held = [tuple(layer for layer in group.layers if layer in layers) for group in facts.groups]
    groups = tuple(dataclasses.replace(group, layers=part) for group, part in zip(facts.groups, held, strict=True))
    caches = [cache for cache in layer_caches(name, tp, address) if cache.layer in layers]
    document = local_document(dataclasses.replace(facts, pp=2, pp_rank=stage, groups=groups), caches)
    whole = truth.rank_geometry(name, tp, rank, address)
    regions = tuple(region for region in whole.regions if region.members[0].layer in layers)
    return document, dataclasses.replace(whole, pp_size=2, pp_rank=stage, regions=regions)


@pytest.mark.parametrize(
    ("name", "producer_tp", "consumer_tp"), {name: (name, *sizes) for name, *sizes in SIZES}.values()
)
def test_two_pipeline_stages_hand_over_to_one(name: str, producer_tp: int, consumer_tp: int) -> None:
    documents = engine(name, consumer_tp, CONSUMER)
    layers = [layer for group in engine_facts(name, 1, 0).groups for layer in group.layers]
    # The first layer alone, and all others: where a group has one layer, the other stage has an empty group.
    parts = (frozenset(layers[:1]), frozenset(layers[1:]))
    made = {
        (stage, rank): _stage(name, producer_tp, rank, stage, part)
        for stage, part in enumerate(parts)
        for rank in range(producer_tp)
    }
    peers = {key: document for key, (document, _) in made.items()}

    def plan(local: RankGeometry, _: object) -> TransferPlan:
        return Planner().plan(documents[0, local.tp_rank], peers, peer_tp=producer_tp)

    def hand_over() -> Proof:
        consumers = {
            (0, r): truth.rank_geometry(name, consumer_tp, r, CONSUMER + (r << 32)) for r in range(consumer_tp)
        }
        producers = {key: geometry for key, (_, geometry) in made.items()}
        return prove(consumers, producers, request(name, name), plan)

    assert_right(name, producer_tp, consumer_tp, hand_over)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_layer_that_no_stage_holds_is_refused_by_the_plan(stage: int) -> None:
    """The handshake compares only what a stage holds."""
    first, last = engine_facts("flash-attn", 1, 0).groups[0].layers
    peers = {
        (number, 0): _stage("flash-attn", 1, 0, number, frozenset({first if stage else last}))[0] for number in range(2)
    }
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
    ("flashinfer-split-blocks", "flash-attn"),
    ("flash-attn-tokens-first", "flashinfer-split-blocks"),
    ("flashmla-split-blocks", "flashmla"),
    ("triton-mla", "flashmla-split-blocks"),
    ("flash-attn-sliding-groups-cross-layer", "flash-attn-sliding-groups"),
    ("mamba-2-rows-first", "mamba-2"),
    ("gated-delta", "gated-delta-split-blocks"),
    ("flashmla-sparse-fp8-with-indexer-cross-layer", "flashmla-sparse-fp8-with-indexer"),
]


@pytest.mark.parametrize(("producer", "consumer"), ORDERS)
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (2, 1)])
def test_engines_of_the_same_model_may_differ_in_layout_and_block_size(
    producer: str, consumer: str, producer_tp: int, consumer_tp: int
) -> None:
    assert prove_hand_over(producer, producer_tp, consumer, consumer_tp).bytes_proved > 0


UNLIKE = [
    ("flash-attn", "flash-attn-fp8", "element-bytes-differ"),
    ("flash-attn", "flash-attn-few-heads", "axis-size-differs"),
    ("triton-int8-per-token-head", "triton", "field-missing"),
    ("mamba-2", "gated-delta", "field-missing"),
    ("flashmla", "flashmla-sparse-split-blocks", "element-bytes-differ"),
    ("flash-attn-draft-model-same-shape", "flash-attn-shared-cache", None),
    ("flash-attn", "flash-attn-draft-model-same-shape", "layer-not-held"),
    ("cpu", "flash-attn", "element-bytes-differ"),
]


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
