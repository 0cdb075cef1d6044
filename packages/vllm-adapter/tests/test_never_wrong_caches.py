"""Caches whose bytes once landed wrong: context parallelism, sparse indexers, Mamba-2 with fewer groups than ranks.

Truth is a global numpy array, sliced the way vLLM's writers place it; bytes are moved by plain copies.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from copies import RankMemory, copy_plan
from factories import facts

from kv_topology import BlockList, Planner, TopologyError
from vllm_adapter.cache.documents import GeometryDocument
from vllm_adapter.cache.facts import CacheGroup, LayerCache
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.config import load_settings
from vllm_adapter.wiring import make_scheduler

BASE = 1 << 30
BLOCKS = 12


def memory_of(cache: LayerCache, rank: int, fill: int = 0) -> RankMemory:
    return RankMemory(cache.address, cache.page_bytes * BLOCKS, fill)


# ------------------------------------------------------------------------------------------ context parallelism


def latent_cache(rank: int, *, tokens: int, layer: str = "layers.0", group: int = 0, **changes: Any) -> LayerCache:
    values: dict[str, Any] = {
        "layer": layer,
        "group": group,
        "address": BASE + (rank << 24) + (group << 20),
        "shape": (BLOCKS, 1, tokens, 4),
        "stride_bytes": (tokens * 4, tokens * 4, 4, 1),
        "element_bytes": 1,
        "memory_kind": "DRAM",
        "device": 0,
        "page_bytes": tokens * 4,
        "is_latent": True,
    }
    return LayerCache(**{**values, **changes})


def dealt_tokens(rank: int, dcp: int, interleave: int, count: int) -> list[int]:
    """Global numbers of a rank's first `count` tokens: vLLM's slot mapping deals out `interleave` tokens in turn."""
    mine = [token for token in range(count * dcp) if token // interleave % dcp == rank]
    return mine[:count]


def dcp_document(tp: int, rank: int, dcp: int, interleave: int, *, is_dealt: bool = True) -> GeometryDocument:
    group = CacheGroup("latent", 64, 0, 0, ("layers.0",), is_dealt)
    described = facts(tp=tp, rank=rank, blocks=BLOCKS, groups=(group,), dcp=dcp, interleave_tokens=interleave)
    return local_document(described, [latent_cache(rank, tokens=64)])


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize(("peer_tp", "peer_dcp"), [(1, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize(("interleave", "peer_interleave"), [(64, 64), (1, 64), (64, 1), (16, 16)])
@pytest.mark.never_wrong("A2")
def test_context_parallel_tokens_land_where_the_host_keeps_them(
    tp: int, dcp: int, peer_tp: int, peer_dcp: int, interleave: int, peer_interleave: int
) -> None:
    tokens = 256
    prompt = np.random.default_rng(1).integers(1, 256, (tokens, 4), np.uint8)

    def places(rank: int, size: int, turn: int, ids: list[int]) -> list[tuple[int, int, int]]:
        """(token, block, place in the block) of a rank's tokens."""
        held = dealt_tokens(rank % size, size, turn, len(ids) * 64)
        return [(token, ids[n // 64], n % 64) for n, token in enumerate(held) if token < tokens]

    peer_ids = [7, 2, 9, 4][: -(-tokens // (64 * peer_dcp))]
    local_ids = [3, 8, 1, 5][: -(-tokens // (64 * dcp))]
    producers: dict[tuple[int, int], RankMemory] = {}
    documents = {}
    for rank in range(peer_tp):
        memory = memory_of(latent_cache(rank, tokens=64), rank)
        pages = memory.data.reshape(BLOCKS, 64, 4)
        for token, block, place in places(rank, peer_dcp, peer_interleave, peer_ids):
            pages[block, place] = prompt[token]
        producers[0, rank] = memory
        documents[0, rank] = dcp_document(peer_tp, rank, peer_dcp, peer_interleave)
    for rank in range(tp):
        local = dcp_document(tp, rank, dcp, interleave)
        asked = Planner().target_ranks(local, peer_tp=peer_tp, peer_dcp=peer_dcp)
        plan = Planner().plan(local, {r: documents[r] for r in asked}, peer_tp=peer_tp)
        memory = memory_of(latent_cache(rank, tokens=64), rank)
        copy_plan(plan, [BlockList(local_ids, 0, 0)], [BlockList(peer_ids, 0, 0)], tokens, memory, producers)
        expected = np.zeros((BLOCKS, 64, 4), np.uint8)
        for token, block, place in places(rank, dcp, interleave, local_ids):
            expected[block, place] = prompt[token]
        np.testing.assert_array_equal(memory.data.reshape(BLOCKS, 64, 4), expected)


@pytest.mark.never_wrong("A2")
def test_a_group_that_context_parallelism_leaves_whole_is_told() -> None:
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


# ------------------------------------------------------------------------------------------------ sparse indexer


def indexer_document(tokens: int, rank: int = 0) -> GeometryDocument:
    groups = (CacheGroup("latent", tokens, 0, 0, ("index",)),)
    shape: dict[str, Any] = {"shape": (BLOCKS, 1, tokens, 12), "stride_bytes": (tokens * 12, tokens * 12, 12, 1)}
    cache = latent_cache(rank, tokens=tokens, layer="index", is_indexer=True, page_bytes=tokens * 12, **shape)
    return local_document(facts(blocks=BLOCKS, groups=groups), [cache])


@pytest.mark.never_wrong("A4")
def test_indexer_pages_move_whole_between_equal_pages() -> None:
    """A page as `indexer_k_quant_and_cache` writes it: 8 bytes of values for each token, then 4 bytes of scale for each."""
    tokens = 16
    values = np.random.default_rng(2).integers(1, 256, (tokens, 8), np.uint8)
    scales = np.random.default_rng(3).integers(1, 256, (tokens, 4), np.uint8)
    page = np.concatenate([values.ravel(), scales.ravel()])
    peer, mine = RankMemory(BASE, BLOCKS * tokens * 12), RankMemory(BASE, BLOCKS * tokens * 12)
    peer.data.reshape(BLOCKS, -1)[5] = page
    document = indexer_document(tokens)
    plan = Planner().plan(document, {(0, 0): document}, peer_tp=1)
    copy_plan(plan, [BlockList([3])], [BlockList([5])], tokens, mine, {(0, 0): peer})
    np.testing.assert_array_equal(mine.data.reshape(BLOCKS, -1)[3], page)


@pytest.mark.parametrize(("tokens", "peer_tokens"), [(16, 32), (32, 16)])
@pytest.mark.never_wrong("A4")
def test_indexer_pages_of_another_size_are_refused(tokens: int, peer_tokens: int) -> None:
    with pytest.raises(TopologyError) as caught:
        Planner().plan(indexer_document(tokens), {(0, 0): indexer_document(peer_tokens)}, peer_tp=1)
    assert caught.value.code == "packing-differs"


# ------------------------------------------------------------------------- Mamba-2 with fewer groups than ranks


HEADS, HEAD_DIM, STATE, ROWS = 8, 4, 6, 3


def mixer_cache(tp: int, rank: int, groups: int, order: str) -> LayerCache:
    """A rank's cache by vLLM's rule: groups that do not divide by the ranks are extended by copies."""
    extended = groups if groups % tp == 0 else tp
    channels = (HEADS * HEAD_DIM + 2 * extended * STATE) // tp
    conv = (channels, ROWS) if order == "DS" else (ROWS, channels)
    content = channels * ROWS * 2 + HEADS // tp * HEAD_DIM * STATE * 4
    return LayerCache(
        layer="mixer",
        group=0,
        address=BASE + (rank << 24),
        shape=(BLOCKS, content + 8),
        stride_bytes=(content + 8, 1),
        element_bytes=1,
        memory_kind="DRAM",
        device=0,
        page_bytes=content + 8,
        state_shapes=(conv, (HEADS // tp, HEAD_DIM, STATE)),
        state_element_bytes=(2, 4),
        state_kind="MAMBA2",
    )


def true_page(tp: int, rank: int, groups: int, order: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """The bytes of a rank's state page, sliced from the model's whole state."""
    x = rng.integers(1, 1 << 15, (HEADS * HEAD_DIM, ROWS), np.int16)
    b, c = (rng.integers(1, 1 << 15, (groups, STATE, ROWS), np.int16) for _ in range(2))
    ssm = rng.integers(1, 1 << 30, (HEADS, HEAD_DIM, STATE), np.int32)
    heads = slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)
    channels = slice(heads.start * HEAD_DIM, heads.stop * HEAD_DIM)
    held = slice(rank * groups // tp, (rank + 1) * groups // tp) if groups % tp == 0 else slice(0, 1)
    conv = np.concatenate([x[channels], b[held].reshape(-1, ROWS), c[held].reshape(-1, ROWS)])
    if order == "SD":
        conv = np.ascontiguousarray(conv.T)
    return np.concatenate([conv.ravel().view(np.uint8), ssm[heads].ravel().view(np.uint8)])


@pytest.mark.parametrize("order", ["DS", "SD"])
@pytest.mark.parametrize(("groups", "sizes"), [(1, (1, 2, 4, 8)), (2, (1, 2)), (4, (1, 2, 4))])
@pytest.mark.never_wrong("B1")
def test_mamba2_groups_are_copies_where_there_are_fewer_than_ranks(
    groups: int, sizes: tuple[int, ...], order: str
) -> None:
    for tp, peer_tp in product(sizes, sizes):

        def document(size: int, rank: int) -> GeometryDocument:
            group = (CacheGroup("state", 128, 0, 0, ("mixer",)),)
            described = facts(tp=size, rank=rank, blocks=BLOCKS, groups=group, state_groups=groups)
            return local_document(described, [mixer_cache(size, rank, groups, order)])

        producers: dict[tuple[int, int], RankMemory] = {}
        for rank in range(peer_tp):
            cache = mixer_cache(peer_tp, rank, groups, order)
            memory = memory_of(cache, rank)
            page = true_page(peer_tp, rank, groups, order, np.random.default_rng(4))
            memory.data.reshape(BLOCKS, -1)[9, : len(page)] = page
            producers[0, rank] = memory
        documents = {(0, rank): document(peer_tp, rank) for rank in range(peer_tp)}
        reports = dict.fromkeys(documents, 0)
        counts: dict[tuple[int, int], set[int]] = {rank: set() for rank in documents}
        for rank in range(tp):
            plan = Planner().plan(document(tp, rank), documents, peer_tp=peer_tp)
            mine = memory_of(mixer_cache(tp, rank, groups, order), rank)
            copy_plan(plan, [BlockList([5])], [BlockList([9])], 1, mine, producers)
            expected = true_page(tp, rank, groups, order, np.random.default_rng(4))
            found = mine.data.reshape(BLOCKS, -1)
            np.testing.assert_array_equal(found[5, : len(expected)], expected, f"{peer_tp} -> {tp}, rank {rank}")
            assert not found[[n for n in range(BLOCKS) if n != 5]].any()
            for producer in (*plan.producer_ranks, *plan.notify_only_ranks):
                reports[producer] += 1
            for producer in documents:
                counts[producer].add(plan.reader_count(producer))
        assert {rank: {number} for rank, number in reports.items()} == counts


def test_groups_that_contradict_the_shapes_move_as_whole_pages_only() -> None:
    group = (CacheGroup("state", 128, 0, 0, ("mixer",)),)
    described = facts(tp=2, blocks=BLOCKS, groups=group, state_groups=3)
    document = local_document(described, [mixer_cache(2, 0, 1, "DS")])
    assert [field["name"] for field in document["layouts"][0]] == ["state"]


@pytest.mark.never_wrong("A2")
def test_tickets_count_blocks_of_groups_that_context_parallelism_does_not_deal_out_at_their_own_length() -> None:
    """Two ranks deal out the first group's tokens: its blocks stand for 2 * 64 tokens, those of the second for 64."""
    groups = (
        CacheGroup("latent", 64, 0, 0, ("layers.0",)),
        CacheGroup("latent", 64, 0, 0, ("layers.1",), is_dealt=False),
    )
    engine = facts(tp=2, dcp=2, groups=groups, group_ids=(0, 1))
    state = make_scheduler(engine, load_settings({})[0])._state
    prompt = {"do_remote_decode": True, "do_remote_prefill": False}
    state.arrive("r", prompt, prompt_tokens=200, identity=None, now_s=0.0)
    blocks = [[1, 2], [3, 4, 5, 6]]
    state.allocate("r", block_ids=blocks, new_block_ids=blocks, external_tokens=0, preemptions=0, now_s=0.0)
    decision = state.finish("r", reason="length", block_ids=blocks, computed_tokens=200, identity=None, now_s=1.0)
    assert decision.params is not None
    assert decision.params["kv_span_tokens"] == [128, 64]
    assert decision.params["remote_block_ids"] == blocks
