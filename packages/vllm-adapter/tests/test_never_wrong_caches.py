"""Caches whose bytes once landed wrong: context parallelism, sparse indexers, Mamba-2 with fewer groups than ranks.

The bytes themselves are compared in `integration_tests/never_wrong` and in `test_layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from factories import attention_cache, facts

from kv_scheduler_state import UNBOUND
from kv_topology import Planner, TopologyError
from vllm_adapter.cache.documents import GeometryDocument
from vllm_adapter.cache.facts import CacheGroup, LayerCache
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.config import load_settings
from vllm_adapter.wiring import make_scheduler

BASE = 1 << 30
BLOCKS = 12


def latent_cache(rank: int, *, tokens: int, layer: str = "layers.0", width: int = 4, **changes: Any) -> LayerCache:
    cache = attention_cache(layer, address=BASE + (rank << 24), heads=1, blocks=BLOCKS)
    values: dict[str, Any] = {
        "shape": (BLOCKS, 1, tokens, width),
        "stride_bytes": (tokens * width, tokens * width, width, 1),
        "element_bytes": 1,
        "page_bytes": tokens * width,
        "is_latent": True,
    }
    return replace(cache, **{**values, **changes})


def dcp_document(tp: int, rank: int, dcp: int, interleave: int, *, is_dealt: bool = True) -> GeometryDocument:
    group = CacheGroup("latent", 64, 0, 0, ("layers.0",), is_dealt)
    described = facts(tp=tp, rank=rank, blocks=BLOCKS, groups=(group,), dcp=dcp, interleave_tokens=interleave)
    return local_document(described, [latent_cache(rank, tokens=64)])


@pytest.mark.never_wrong("A2")
def test_a_group_that_context_parallelism_leaves_whole_is_described() -> None:
    document = dcp_document(2, 1, 2, 64, is_dealt=False)
    assert document["groups"][0]["context"] == (1, 0, 1)
    assert dcp_document(2, 1, 2, 64)["groups"][0]["context"] == (2, 1, 64)
    # A consumer without context parallelism cannot know which groups the producer deals out: both can be planned.
    local = dcp_document(1, 0, 1, 1)
    asked = Planner().target_ranks(local, peer_tp=2, peer_dcp=2)
    whole = {(0, rank): dcp_document(2, rank, 2, 64, is_dealt=False) for rank in range(2)}
    dealt = {(0, rank): dcp_document(2, rank, 2, 64) for rank in range(2)}
    for documents, read in ((whole, 1), (dealt, 2)):
        plan = Planner().plan(local, {rank: documents[rank] for rank in asked}, peer_tp=2)
        assert len(plan.producer_ranks) == read


def indexer_document(tokens: int, rank: int = 0) -> GeometryDocument:
    groups = (CacheGroup("latent", tokens, 0, 0, ("index",)),)
    cache = latent_cache(rank, tokens=tokens, layer="index", width=12, is_indexer=True)
    return local_document(facts(blocks=BLOCKS, groups=groups), [cache])


@pytest.mark.proves("sparse latent: unequal blocks = packing-differs")
@pytest.mark.parametrize(("tokens", "peer_tokens"), [(16, 32), (32, 16)])
@pytest.mark.never_wrong("A4")
def test_indexer_pages_of_another_size_are_refused(tokens: int, peer_tokens: int) -> None:
    with pytest.raises(TopologyError) as caught:
        Planner().plan(indexer_document(tokens), {(0, 0): indexer_document(peer_tokens)}, peer_tp=1)
    assert caught.value.code == "packing-differs"


def test_groups_that_contradict_the_shapes_move_as_whole_pages_only() -> None:
    """Rank 0 of two: 4 heads of 4 channels and 6 states, one group of B and C where the model is said to have three."""
    group = (CacheGroup("state", 128, 0, 0, ("layers.0",)),)
    states: dict[str, Any] = {
        "state_shapes": ((28, 3), (4, 4, 6)),
        "state_element_bytes": (2, 4),
        "state_kind": "MAMBA2",
    }
    cache = latent_cache(0, tokens=200, is_latent=False, **states)
    document = local_document(facts(tp=2, blocks=BLOCKS, groups=group, state_groups=3), [cache])
    assert [field["name"] for field in document["layouts"][0]] == ["state"]


@pytest.mark.never_wrong("A2")
def test_tickets_count_blocks_of_groups_that_context_parallelism_does_not_deal_out_at_their_own_length() -> None:
    """Two ranks deal out the first group's tokens: its blocks stand for 2 * 64 tokens, those of the second for 64."""
    groups = (
        CacheGroup("latent", 64, 0, 0, ("layers.0",)),
        CacheGroup("latent", 64, 0, 0, ("layers.1",), is_dealt=False),
    )
    engine = facts(tp=2, dcp=2, groups=groups)
    state = make_scheduler(engine, load_settings({})[0])._state
    prompt = {"do_remote_decode": True, "do_remote_prefill": False}
    state.arrive("r", prompt, prompt_tokens=200, identity=UNBOUND, now_s=0.0)
    blocks = [[1, 2], [3, 4, 5, 6]]
    state.allocate("r", block_ids=blocks, new_block_ids=blocks, external_tokens=0, preemptions=0, now_s=0.0)
    decision = state.finish("r", reason="length", block_ids=blocks, computed_tokens=200, identity=UNBOUND, now_s=1.0)
    assert decision.params is not None
    assert decision.params["kv_span_tokens"] == [128, 64]
    assert decision.params["remote_block_ids"] == blocks
