"""The pairs of engines that the byte oracle proves: exhaustive along each axis, thinned out by a step for quick runs.

Each case is a pair of engines and a request with scattered block ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import numpy as np

from byte_oracle.oracle import Request, prove
from kv_topology import BlockList, plan_transfer
from kv_topology.tools.engine import STATE_KINDS, EngineSpec, LayerKind, ModelSpec, StateSpec, build_engine

SIZES = range(1, 9)
HEADS = (1, 2, 3, 4, 8)
BLOCKS = (16, 32, 48, 64, 128)
LAYOUTS = ("packed-HND", "packed-NHD", "halves-HND", "halves-NHD", "split-HND", "split-NHD")
CROSS = ("cross-HND", "cross-NHD", "heads-outer", "cross-heads", "packed-HND")


@dataclass(frozen=True)
class ProofCase:
    """A pair of engines and the number of tokens that are handed over.

    Attributes:
        model: The model on both sides.
        consumer: The reading engine.
        producer: The engine that is read.
        tokens: Tokens of the request.
        cached_blocks: Leading local blocks that are there already.
    """

    model: ModelSpec
    consumer: EngineSpec
    producer: EngineSpec
    tokens: int
    cached_blocks: int = 0


def _lists(engine: EngineSpec, kinds: tuple[LayerKind, ...], tokens: int, skip: int, seed: int) -> list[BlockList]:
    """Return scattered blocks per group; groups never share an id, since they may share memory."""
    ids = np.random.default_rng(seed).permutation(engine.block_count).tolist()
    span = engine.block_tokens * engine.dcp
    lists: list[BlockList] = []
    for kind in kinds:
        is_state = kind in STATE_KINDS
        count = 1 if is_state else -(-tokens // span)
        lists.append(BlockList(ids[:count]) if is_state else BlockList(ids[skip:count], skip * span))
        ids = ids[count:]
    return lists


def request_for(case: ProofCase) -> Request:
    """Return the case's request: block lists as two schedulers would give them."""
    kinds = case.model.group_kinds
    return Request(
        _lists(case.consumer, kinds, case.tokens, case.cached_blocks, 1),
        _lists(case.producer, kinds, case.tokens, 0, 2),
        case.tokens,
    )


def _dense(heads: int, layers: int = 2) -> ModelSpec:
    kinds: tuple[LayerKind, ...] = ("attention",)
    return ModelSpec(kinds * layers, heads, 2, 1)


def _tp_pairs() -> Iterator[ProofCase]:
    """Every TP pair, divisible or not, with every head count and layout, the same on both sides."""
    for consumer, producer, heads, layout in product(SIZES, SIZES, HEADS, LAYOUTS):
        mine = EngineSpec(consumer, block_tokens=4, layout=layout, block_count=4)
        yield ProofCase(_dense(heads, 1), mine, replace(mine, tp=producer), 10)


def _latent() -> Iterator[ProofCase]:
    """Every TP pair for latent attention with an indexer, and every block-size pair."""
    model = ModelSpec(("latent", "latent"), latent_dim=6, index_dim=3)
    for consumer, producer in product(SIZES, SIZES):
        mine = EngineSpec(consumer, block_tokens=4, block_count=4)
        yield ProofCase(model, mine, replace(mine, tp=producer), 10)
    for block, peer_block in product(BLOCKS, BLOCKS):
        mine = EngineSpec(2, block_tokens=block, block_count=20)
        yield ProofCase(model, mine, replace(mine, tp=3, block_tokens=peer_block), 200)


def _layout_pairs() -> Iterator[ProofCase]:
    """Every pair of layouts with every pair of block sizes."""
    for mine, theirs, block, peer_block in product(LAYOUTS, LAYOUTS, BLOCKS, BLOCKS):
        consumer = EngineSpec(2, block_tokens=block, layout=mine, block_count=16)
        producer = EngineSpec(3, block_tokens=peer_block, layout=theirs, block_count=16)
        yield ProofCase(_dense(4, 1), consumer, producer, 150)


def _keys_by_channel() -> Iterator[ProofCase]:
    """Keys by channel against themselves for every TP pair, and against others for every pair of block sizes."""
    for consumer, producer, heads in product(SIZES, SIZES, HEADS):
        mine = EngineSpec(consumer, block_tokens=4, layout="keys-by-channel", block_count=4)
        yield ProofCase(_dense(heads, 1), mine, replace(mine, tp=producer), 10)
    pairs = (
        ("keys-by-channel", "keys-by-channel"),
        ("keys-by-channel", "packed-HND"),
        ("halves-NHD", "keys-by-channel"),
    )
    for (mine_layout, theirs), block, peer_block in product(pairs, BLOCKS, BLOCKS):
        reader = EngineSpec(2, block_tokens=block, layout=mine_layout, block_count=16)
        read = EngineSpec(3, block_tokens=peer_block, layout=theirs, block_count=16)
        yield ProofCase(_dense(4, 1), reader, read, 150)


def _kernel_blocks() -> Iterator[ProofCase]:
    """Scheduler blocks of several pages on either side, with and without a prefix hit."""
    for block, page, peer_block, peer_page, hit in product((32, 48, 64), (8, 16), (32, 48, 64), (8, 16), (0, 1)):
        consumer = EngineSpec(2, block_tokens=block, kernel_block_tokens=page, block_count=8)
        producer = EngineSpec(1, block_tokens=peer_block, kernel_block_tokens=peer_page, block_count=8)
        yield ProofCase(_dense(2), consumer, producer, 130, hit)


def _cross_layer() -> Iterator[ProofCase]:
    """All layers in a page, or heads outermost, against each other, for every TP pair."""
    for mine, theirs in product(CROSS, CROSS):
        for consumer, producer in product(SIZES, SIZES):
            left = EngineSpec(consumer, block_tokens=4, layout=mine, block_count=4)
            right = EngineSpec(producer, block_tokens=4, layout=theirs, block_count=4)
            yield ProofCase(_dense(4, 3), left, right, 10)


def _states() -> Iterator[ProofCase]:
    """Hybrid engines: every divisible TP pair with unequal numbers of kernel blocks per state page."""
    state = StateSpec(heads=8, head_dim=2, state_dim=2, groups=2, conv_rows=2, state_element_bytes=2)
    ratios = ((1, 1), (2, 2), (6, 10), (10, 6), (3, 4))
    state_kinds: tuple[LayerKind, ...] = ("mamba2", "mamba1", "gated-delta")
    for consumer, producer, (mine, theirs), kind in product((1, 2, 4, 8), (1, 2, 4, 8), ratios, state_kinds):
        model = ModelSpec(("attention", kind, kind), 4, 2, 1, state=state)
        left = EngineSpec(consumer, block_tokens=4 * mine, kernel_block_tokens=4, block_count=24)
        right = EngineSpec(producer, block_tokens=4 * theirs, kernel_block_tokens=4, block_count=24)
        yield ProofCase(model, left, right, 40)
    for consumer, producer, order in product(SIZES, SIZES, ("DS", "SD")):
        model = ModelSpec(("mamba2", "attention", "mamba2"), 2, 2, 1, state=state)
        left = EngineSpec(consumer, block_tokens=4, block_count=8, conv_order="SD" if order == "SD" else "DS")
        yield ProofCase(model, left, EngineSpec(producer, block_tokens=4, block_count=8), 12)


def _pipelines() -> Iterator[ProofCase]:
    """Pipeline stages on either side."""
    for stages, peer_stages, tp, peer_tp in product(range(1, 5), range(1, 5), (1, 2, 3), (1, 2, 4)):
        left = EngineSpec(tp, stages, block_tokens=4, block_count=4)
        right = EngineSpec(peer_tp, peer_stages, block_tokens=4, block_count=4)
        yield ProofCase(_dense(4, 5), left, right, 10)


def _contexts() -> Iterator[ProofCase]:
    """Context parallelism for latent attention: tokens dealt out on either side, in turns of any length."""
    model = ModelSpec(("latent", "latent"), latent_dim=3)
    for tp, peer_tp in product(SIZES, SIZES):
        for dcp, peer_dcp in product(_divisors(tp), _divisors(peer_tp)):
            for turn, peer_turn in ((0, 0), (4, 2), (8, 8)):
                left = EngineSpec(tp, dcp=dcp, block_tokens=8, interleave_tokens=turn, block_count=12)
                right = EngineSpec(peer_tp, dcp=peer_dcp, block_tokens=8, interleave_tokens=peer_turn, block_count=12)
                yield ProofCase(model, left, right, 75)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _windows() -> Iterator[ProofCase]:
    """Sliding-window and full layers side by side, with prefix hits."""
    model = ModelSpec(("attention", "sliding", "attention"), 4, 2, 1, window_tokens=64)
    for consumer, producer, hit in product((1, 2, 4), (1, 2, 4), (0, 1, 2)):
        mine = EngineSpec(consumer, block_tokens=16, block_count=24)
        yield ProofCase(model, mine, replace(mine, tp=producer), 80, hit)
        yield ProofCase(model, mine, replace(mine, tp=producer), 170, hit)
        yield ProofCase(model, mine, replace(mine, tp=producer, block_tokens=32), 170, hit)


FAMILIES: dict[str, Callable[[], Iterator[ProofCase]]] = {
    "tp": _tp_pairs,
    "latent": _latent,
    "layouts": _layout_pairs,
    "keys-by-channel": _keys_by_channel,
    "kernel-blocks": _kernel_blocks,
    "cross-layer": _cross_layer,
    "states": _states,
    "pipeline": _pipelines,
    "context": _contexts,
    "windows": _windows,
}
"""Generators of cases by what they vary."""


def run_proofs(family: str, *, step: int) -> int:
    """Prove every `step`-th case of a family; return how many bytes were proved.

    Raises:
        OracleFailure: A case moves wrong bytes.
    """
    proved = 0
    for case in islice(FAMILIES[family](), 0, None, step):
        consumers, producers = build_engine(case.model, case.consumer), build_engine(case.model, case.producer)
        proved += prove(consumers, producers, request_for(case), plan_transfer)
    return proved
