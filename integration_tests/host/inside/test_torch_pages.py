"""The torch executor of staged plans against kv-topology's numpy model and its byte oracle."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from byte_oracle.oracle import MemoryOfRank, Request, execute, permute

from kv_topology import BlockList, PageMove, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, build_engine
from vllm_adapter.host.torch_pages import TorchPages
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


def numbers(bits: int, exponent_bits: int, *, has_infinity: bool) -> np.ndarray:
    """All values of a format of 8 bits by its definition (OCP 8-bit floating point, 1.0), by their bytes."""
    code = np.arange(256)
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, fraction = code >> fraction_bits & (1 << exponent_bits) - 1, code & (1 << fraction_bits) - 1
    size = np.where(exponent > 0, 1.0, 0.0) + fraction / 2**fraction_bits
    value = np.where(code < 128, 1.0, -1.0) * size * 2.0 ** (np.maximum(exponent, 1) - bias)
    largest = exponent == (1 << exponent_bits) - 1
    if has_infinity:
        value = np.where(largest, np.where(fraction > 0, np.nan, np.copysign(np.inf, value)), value)
    else:
        value = np.where(largest & (fraction == (1 << fraction_bits) - 1), np.nan, value)
    assert bits == 8
    return value


@pytest.mark.proves("fp8 with scale 1 to bfloat16 or float32: proof")
@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("narrow", "exponent_bits"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 5)], ids=["e4m3", "e5m2"]
)
def test_every_number_of_8_bits_arrives_as_itself(
    narrow: torch.dtype, exponent_bits: int, wide: torch.dtype, order: Literal["HND", "NHD"]
) -> None:
    """Read from two ranks whose pages have another size, as they lie or whole; all 256 bytes, subnormal ones too."""
    local = rank(wide, tokens=32, order="HND")
    peers = {(0, n): rank(narrow, tokens=16, order=order, tp=2, number=n) for n in range(2)}
    casts = {0: (str(narrow), 1, str(wide), wide.itemsize)}
    plan = plan_transfer(local, peers, staging="auto", casts=casts)
    request = Request([BlockList([5, 2])], [BlockList([1, 4, 3, 7])], tokens=64)
    sources = {number: MemoryOfRank(geometry) for number, geometry in peers.items()}
    for source in sources.values():
        source.place_tags(request.peer, [(0, 64)])
    # The tags in our geometry, an element of one byte each, say which byte belongs where.
    same = rank(narrow, tokens=32, order="HND")
    truth = MemoryOfRank(same)
    truth.place_tags(request.local, [(0, 64)])
    memory = MemoryOfRank(local)
    execute(plan, request, memory, sources, np.zeros(len(memory.data), np.uint8))
    tensor = torch.from_numpy(memory.data)
    staged = plan.route(request.local, request.peer, tokens=64).staged
    TorchPages([tensor], scratch_bytes=5000).convert(conversion_steps(staged, ranges_of(memory, tensor.data_ptr())))
    table, seen = numbers(8, exponent_bits, has_infinity=narrow is torch.float8_e5m2), set()
    for here, there in zip(local.regions, same.regions, strict=True):
        for page in (2, 5):
            at = here.base_address - memory.start + page * here.page_stride_bytes
            found = tensor[at : at + here.page_bytes].clone().view(wide).double().numpy()
            at = there.base_address - truth.start + page * there.page_stride_bytes
            codes = truth.data[at : at + there.page_bytes]
            seen |= {*codes.tolist()}
            np.testing.assert_array_equal(found, table[codes])
    assert len(seen) == 256
