"""Speed of kv-topology: building rows, planning a large engine, and block ids into indices.

Each measure is a median over interleaved runs of ours and a baseline in this process, in CPU time of the thread: all of
it is computation, and what else runs on the machine should not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from _rows import by_turns, row

from kv_topology import BlockList, RankGeometry, TransferPlan, from_document, plan_transfer, to_document
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine

DENSE = ModelSpec(("attention",) * 64, kv_heads=8, head_dim=128)
HYBRID = ModelSpec(
    tuple("attention" if number % 8 == 0 else "mamba2" for number in range(64)),
    kv_heads=8,
    head_dim=128,
    state=StateSpec(heads=128, head_dim=64, state_dim=128, groups=8),
)
BLOCKS = (2_000, 20_000)
"""Blocks of a cache, few and many."""


def per_block_rows(addresses: Sequence[int], page_bytes: int, blocks: int, device: int) -> list[tuple[int, int, int]]:
    """Build one descriptor tuple per block and region in a loop: what strided rows replace."""
    descriptors: list[tuple[int, int, int]] = []
    for address in addresses:
        for block in range(blocks):
            descriptors.append((address + block * page_bytes, page_bytes, device))  # noqa: PERF401 - the loop measured
    return descriptors


def _dense_pair(blocks: int) -> tuple[RankGeometry, dict[tuple[int, int], RankGeometry]]:
    engine = EngineSpec(block_tokens=16, layout="split-HND", block_count=blocks)
    return build_engine(DENSE, engine)[0, 0], dict(build_engine(DENSE, engine))


def _rows_of(plan: TransferPlan, peer: RankGeometry) -> object:
    """Build the rows of both sides again from a plan's slices, without its cached ones."""
    from kv_topology.plan.plan import _link as link_of

    link = link_of(plan.local, peer, plan.slices((0, 0)))
    return link.local_rows, link.peer_rows


def _both_per_block(addresses: list[int], page_bytes: int, blocks: int) -> object:
    return per_block_rows(addresses, page_bytes, blocks, 0), per_block_rows(addresses, page_bytes, blocks, 0)


def bench_rows() -> list[dict[str, object]]:
    """(a) Rows of 64 layers x 2 fields x 20 000 blocks against a loop over blocks, and flatness in the blocks."""
    pairs = [_dense_pair(blocks) for blocks in BLOCKS]
    calls = [partial(_rows_of, plan_transfer(local, peers), peers[0, 0]) for local, peers in pairs]
    few, many = (each_us / 1e3 for each_us in by_turns(3, *calls, repeat=10))
    local, _ = pairs[-1]
    # Ours builds both sides, so the loop does too.
    addresses, page = [region.base_address for region in local.regions], local.regions[0].page_bytes
    (baseline_us,) = by_turns(3, partial(_both_per_block, addresses, page, BLOCKS[-1]))
    baseline = baseline_us / 1e3
    return [
        row("rows of 2.56M descriptors", "ms", many, baseline, ">= 1000", ratio=baseline / many),
        row("rows, time for 20000 blocks over 2000 blocks", "ms", many, few, "<= 1.5"),
    ]


def bench_planning() -> list[dict[str, object]]:
    """(b) A 64-layer hybrid engine: one consumer rank against 16 producer ranks; planning, and reading documents."""
    local = build_engine(HYBRID, EngineSpec(1, block_tokens=1024, kernel_block_tokens=16, block_count=500))[0, 0]
    peers = build_engine(HYBRID, EngineSpec(16, block_tokens=1024, kernel_block_tokens=16, block_count=500))
    documents = {rank: to_document(peer) for rank, peer in peers.items()}

    def parse() -> dict[tuple[int, int], RankGeometry]:
        return {rank: from_document(document) for rank, document in documents.items()}

    planning, parsing = by_turns(15, lambda: plan_transfer(local, peers), parse)
    figures = (("plan, 16 peer ranks", planning), ("parse and check 16 peer documents", parsing))
    return [row(name, "ms", each_us / 1e3, 50.0, "<= 1") for name, each_us in figures]


def bench_indices() -> list[dict[str, object]]:
    """(c) Indices of 10 000 block ids x 128 regions against bare outer sums of the same size."""
    blocks = BLOCKS[-1]
    plan = plan_transfer(*_dense_pair(blocks))
    generator = np.random.default_rng(5)
    mine: Any = generator.permutation(blocks)[: blocks // 2]
    theirs: Any = generator.permutation(blocks)[: blocks // 2]
    local, peer = [BlockList(mine)], [BlockList(theirs)]
    first = (np.arange(128, dtype=np.int32) * blocks)[:, None]

    def bare() -> object:
        left, right = mine.astype(np.int32), theirs.astype(np.int32)
        return (first + left).ravel(), (first + right).ravel()

    ours, baseline = by_turns(101, lambda: plan.indices((0, 0), local, peer, tokens=8 * blocks), bare)
    return [row("indices of 10000 ids x 128 regions", "ms", ours / 1e3, baseline / 1e3, "<= 1.3")]


def run() -> Iterator[dict[str, object]]:
    """Yield all measures as dictionaries with name, unit, ours, baseline, ratio, target and met."""
    for measure in (bench_rows, bench_planning, bench_indices):
        yield from measure()
