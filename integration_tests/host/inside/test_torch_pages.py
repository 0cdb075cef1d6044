"""The torch executor of staged plans against kv-topology's numpy model and its byte oracle."""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
import pytest
import torch
from byte_oracle import MemoryOfRank, Request, execute, permute
from seeds import for_seeds

from kv_topology import BlockList, PageMove, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, build_engine
from vllm_adapter.host.torch_pages import PageFinder, TorchPages
from vllm_adapter.worker.pages import ConversionStep, PageRange, conversion_steps

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2]
PAGES = 24


def rank(
    dtype: torch.dtype,
    *,
    tokens: int,
    order: Literal["HND", "NHD"],
    heads: int = 4,
    head_dim: int = 8,
    tp: int = 1,
    number: int = 0,
):
    model = ModelSpec(("attention",) * 5, heads, head_dim, dtype.itemsize)
    engine = EngineSpec(tp, block_tokens=tokens, layout=f"packed-{order}", block_count=PAGES)
    return build_engine(model, engine)[0, number]


def ranges_of(memory: MemoryOfRank, base: int) -> list[PageRange]:
    """Where the regions of an imagined rank really are."""
    return [
        PageRange(base + region.base_address - memory.start, region.page_stride_bytes, region.page_count)
        for region in memory.geometry.regions
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("here", "there", "here_tokens", "there_tokens", "producers"),
    [
        ("HND", "NHD", 16, 16, 1),
        ("NHD", "HND", 16, 16, 2),
        ("HND", "NHD", 48, 16, 2),
        ("HND", "HND", 48, 16, 1),
        ("HND", "NHD", 16, 48, 1),
    ],
)
def test_what_a_staged_plan_leaves_is_put_in_order_as_the_model_does(
    dtype: torch.dtype,
    here: Literal["HND", "NHD"],
    there: Literal["HND", "NHD"],
    here_tokens: int,
    there_tokens: int,
    producers: int,
) -> None:
    local = rank(dtype, tokens=here_tokens, order=here)
    peers = {(0, n): rank(dtype, tokens=there_tokens, order=there, tp=producers, number=n) for n in range(producers)}
    plan = plan_transfer(local, peers, staging="always")
    peer_ids = list(range(1, 1 + 3 * here_tokens // there_tokens))
    request = Request([BlockList([5, 2, 7])], [BlockList(peer_ids)], tokens=3 * here_tokens)
    everything = [(0, 3 * here_tokens)]
    sources = {number: MemoryOfRank(geometry) for number, geometry in peers.items()}
    for source in sources.values():
        source.place_tags(request.peer, everything)
    memory, model, expected = (MemoryOfRank(local) for _ in range(3))
    execute(plan, request, memory, sources, np.zeros(len(memory.data), np.uint8))
    model.data[:] = memory.data
    permute(plan, request, model)
    expected.place_tags(request.local, everything)

    tensor = torch.from_numpy(memory.data)
    staged = plan.route(request.local, request.peer, tokens=request.tokens).staged
    steps = conversion_steps(staged, ranges_of(memory, tensor.data_ptr()))
    assert len(steps) == 1
    TorchPages([tensor], scratch_bytes=(1, 5000, 1 << 20)[(here_tokens + producers) % 3]).convert(steps)
    np.testing.assert_array_equal(memory.data, model.data)
    np.testing.assert_array_equal(memory.data, expected.data)


def random_moves(rng: np.random.Generator, cell_bytes: int, start: int) -> tuple[int, tuple[PageMove, ...]]:
    """All cells of a page dealt to random axes, written back with the axes in another order, in one or two halves."""
    shape = tuple(int(n) for n in rng.integers(1, 5, size=4))
    halves = int(rng.integers(1, 3))
    order = rng.permutation(4)
    part = int(np.prod(shape)) * cell_bytes

    def strides(axes: list[int]) -> list[int]:
        found, step = [0] * 4, cell_bytes
        for axis in reversed(axes):
            found[axis], step = step, step * shape[axis]
        return found

    here, there = strides([0, 1, 2, 3]), strides([int(axis) for axis in order])
    moves = tuple(
        PageMove(shape, cell_bytes, start + half * part, tuple(here), start + (halves - 1 - half) * part, tuple(there))
        for half in range(halves)
    )
    return start + halves * part, moves


def model_of(cache: np.ndarray, step: ConversionStep, base: int) -> None:
    for region in step.regions:
        for page in step.pages.tolist():
            final = cache[region.address - base + page * region.stride_bytes :]
            received = final[: step.stop].copy()
            for move in step.moves:
                cells = np.indices(move.shape).reshape(len(move.shape), -1)
                source = move.source_offset + np.array(move.source_strides) @ cells
                target = move.target_offset + np.array(move.target_strides) @ cells
                for byte in range(move.element_bytes):
                    final[target + byte] = received[source + byte]


@for_seeds(60)
def test_random_permutations_of_random_regions(seed: int) -> None:
    """Regions at equal and unequal distances in one allocation or several, at even and odd places."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    start = int(rng.choice([0, 8, 24]))
    page_bytes, moves = random_moves(rng, int(rng.choice([1, 2, 4, 8])), start)
    gap = int(rng.choice([0, 0, 8, 3]))
    layers, allocations = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    tensors, models, ranges = [], [], []
    for _ in range(allocations):
        room = layers * (PAGES * (page_bytes + gap) + 64)
        room += -room % 8
        tensor = torch.from_numpy(rng.integers(0, 256, room, np.uint8)).view(dtype)
        tensors.append(tensor)
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(tensor.data_ptr()))
        models.append((tensor.data_ptr(), raw.copy(), raw))
        extra = 0
        for layer in range(layers):
            extra += int(rng.choice([0, 0, 5]))
            at = tensor.data_ptr() + layer * PAGES * (page_bytes + gap) + extra
            ranges.append(PageRange(at, page_bytes + gap, PAGES))
    pages = np.sort(rng.choice(PAGES, int(rng.integers(1, PAGES)), replace=False)).astype(np.int64)
    for base, model, _ in models:
        own = tuple(r for r in ranges if base <= r.address < base + len(model))
        model_of(model, ConversionStep(start, page_bytes, moves, own, pages), base)
    step = ConversionStep(start, page_bytes, moves, tuple(sorted(ranges)), pages)
    TorchPages(tensors, scratch_bytes=int(rng.choice([1, 200, 1 << 20]))).convert([step])
    for _, model, raw in models:
        np.testing.assert_array_equal(raw, model)


def test_layers_of_one_allocation_are_one_view_and_shared_ones_are_permuted_once() -> None:
    cache = torch.zeros(4, 8, 16, dtype=torch.uint8)
    pages = PageFinder(cache.unbind())
    ranges = [PageRange(layer.data_ptr(), 16, 8) for layer in cache]
    assert [family.size for family in pages.families(tuple(ranges))] == [4]
    assert [family.size for family in pages.families((ranges[0], ranges[1], ranges[3]))] == [2, 1]


def test_memory_that_the_engine_did_not_register_is_not_touched() -> None:
    pages, other = TorchPages([torch.zeros(64, dtype=torch.uint8)]), torch.zeros(64, dtype=torch.uint8)
    moves = (PageMove((2,), 1, 0, (1,), 0, (1,)),)
    for address in (other.data_ptr(), 16):
        with pytest.raises(LookupError, match="none of the engine's tensors"):
            pages.convert([ConversionStep(0, 2, moves, (PageRange(address, 64, 2),), np.array([0]))])


def test_caches_that_were_made_in_inference_mode_are_permuted_outside_of_it() -> None:
    with torch.inference_mode():
        cache = torch.arange(4, dtype=torch.uint8)
    swap = (PageMove((1,), 1, 0, (1,), 1, (1,)), PageMove((1,), 1, 1, (1,), 0, (1,)))
    TorchPages([cache]).convert([ConversionStep(0, 2, swap, (PageRange(cache.data_ptr(), 2, 2),), np.array([0, 1]))])
    assert cache.tolist() == [1, 0, 3, 2]
