"""Blocks that the host does not zero because a read fills them: every byte that the host would have zeroed is written.

For models with states, or with caches of mixed precision, vLLM zeroes new attention blocks, since attention multiplies by zero
whatever lies behind a sequence, and a NaN there spreads. It leaves out the blocks of a read. Truth: the scheduler's own list of
blocks to zero, and the byte ranges of vLLM's `KVBlockZeroer`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm._custom_ops as ops
from byte_oracle.oracle import expand_rows
from engine import FULL, SOME_TOKEN, WINDOW, hand_over, prompt
from full_engine import Layer, adapters_tests
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import KVBlockZeroer

from kv_topology import BlockList, GeometryMismatch, Planner, UnsupportedTopology
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.host.cache_config import layer_caches

NAN = 0xFF
BLOCKS = 64


def _pages(specs: tuple[Any, ...], fill: int) -> dict[str, torch.Tensor]:
    """Return a layer's cache per group, every byte of it `fill`."""
    caches: dict[str, torch.Tensor] = {}
    for number, spec in enumerate(specs):
        shape = (BLOCKS, spec.num_kv_heads, spec.block_size, 2 * spec.head_size * spec.dtype.itemsize)
        caches[f"layers.{number}"] = torch.full(shape, fill, dtype=torch.uint8).view(spec.dtype)
    return caches


def _document(engine: Any, caches: dict[str, torch.Tensor]) -> Any:
    cache = engine.scheduler.kv_cache_config
    return local_document(
        replace(engine.connector._scheduler_side._facts, block_count=BLOCKS),
        layer_caches(caches, cache, dict.fromkeys(caches, Layer(SimpleNamespace(get_name=lambda: "FLASH_ATTN")))),
    )


def _wide(spec: Any, tokens: int) -> Any:
    return replace(spec, block_size=tokens)


@pytest.mark.never_wrong("A11")
@pytest.mark.parametrize(
    ("second", "block", "peer_block"),
    [(FULL, 64, 16), (FULL, 48, 32), (FULL, 16, 64), (FULL, 64, 64), (WINDOW, 16, 64), (WINDOW, 64, 64)],
)
def test_a_read_writes_what_the_scheduler_has_not_zeroed(
    make_engine: Any, second: Any, block: int, peer_block: int
) -> None:
    """Seen: a block of 64 tokens here, of 16 there and 20 tokens: 32 of 64 tokens kept another request's bytes."""
    for number, tokens in enumerate((20, 64, 65, 126, 300)):
        assert_written(make_engine, second, block, peer_block, tokens, draft_tokens=4 * (number % 2))


def assert_written(make_engine: Any, second: Any, block: int, peer_block: int, tokens: int, draft_tokens: int) -> None:
    specs, theirs = ((_wide(FULL, n), _wide(replace(second, dtype=torch.float16), n)) for n in (block, peer_block))
    producer = make_engine("P", specs=theirs, batch_tokens=512)
    consumer = make_engine("D", specs=specs, batch_tokens=512, draft_tokens=draft_tokens)
    assert consumer.scheduler.needs_kv_cache_zeroing
    consumer.add("d", prompt(tokens), params=hand_over(producer, "p", prompt(tokens)))
    output, ran = consumer._run(set(), set(), set(), SOME_TOKEN)
    consumer._take(output, ran)
    (read,) = consumer.reads
    here, there = _pages(specs, NAN), _pages(theirs, 1)
    plan = Planner().plan(_document(consumer, here), {(0, 0): _document(producer, there)}, peer_tp=1)
    local, peer = plan.indices((0, 0), read.local_blocks, read.ticket.peer_blocks, tokens=read.tokens)
    targets, sources = expand_rows(plan.local_rows((0, 0)))[local], expand_rows(plan.peer_rows((0, 0)))[peer]
    for (target, length, _), (source, _, _) in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, length)
    zeroed = set(output.new_block_ids_to_zero or ())
    for cache, table in zip(here.values(), consumer.scheduler.kv_cache_manager.get_blocks("d").blocks, strict=True):
        held = {each.block_id for each in table if not each.is_null}
        is_kept = (cache.view(torch.uint8) == NAN).flatten(1)
        for number in range(BLOCKS):
            if number in held - zeroed:
                assert not is_kept[number].any(), f"{int(is_kept[number].sum())} bytes of block {number} are another's"
            else:
                assert is_kept[number].all(), f"block {number} is not this read's to fill"
        assert held - zeroed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_the_same_whatever_finite_values_lie_behind_a_sequence(dtype: torch.dtype) -> None:
    """So a read may repeat values of the prompt where the host would write zeros; a NaN there is a NaN in the output."""
    block, tokens, heads, size = 64, 20, 2, 64
    key, query = torch.randn(tokens, heads, size, dtype=dtype), torch.randn(1, heads, size, dtype=dtype)
    slots, starts = torch.arange(tokens), torch.tensor([0, 1], dtype=torch.int32)
    length, table = torch.tensor([tokens], dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(1, heads, heads, size, length, dtype, starts, True, -1, "vec", True)
    found: list[torch.Tensor] = []
    for behind in (0.0, 50.0, float("nan")):
        keys, values = torch.full((1, heads, 2 * block, size), behind, dtype=dtype).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, key.clone(), keys, values, slots, "vec", 1.0, 1.0, "auto")
        found.append(torch.empty_like(query))
        ops.cpu_attention_with_kv_cache(
            query, keys, values, found[-1], starts, length, size**-0.5, True, None, -1, table, 0.0, plan, None
        )  # fmt: skip
    zeros, others, nan = found
    assert torch.equal(zeros, others)
    assert nan.isnan().any()


def _segments(config: Any, tensors: dict[str, torch.Tensor], group: Any) -> list[tuple[int, int, int]]:
    """Return (address, distance of blocks, bytes) of all that vLLM zeroes of a block of one group; nothing of a state."""
    spec = group.kv_cache_spec
    spec = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    if not isinstance(spec, AttentionSpec):
        return []
    # The host counts kernel blocks by the views alone; their size in tokens only has to divide a block's.
    layers = [layer for layer in group.layer_names if layer in tensors]
    one = SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=0, layer_names=layers, kernel_block_stride=0)
    context = {layer: SimpleNamespace(kv_cache=tensors[layer]) for layer in layers}
    made = KVBlockZeroer(torch.device("cpu"), [one], [spec.block_size], context, config.num_blocks)
    assert made._meta is not None
    starts, strides, words = (part.tolist() for part in made._meta[:3])
    return [(start, 4 * stride, 4 * count) for start, stride, count in zip(starts, strides, words, strict=True)]


def _names() -> list[str]:
    return list(adapters_tests("recorded").families())


@pytest.mark.never_wrong("A11")
@pytest.mark.parametrize("name", _names())
def test_a_read_writes_every_byte_that_the_host_would_zero(name: str) -> None:
    """Order a token in a block of each group, in every layout that the host allocates, between all recorded sizes."""
    recorder, recorded = adapters_tests("record_layouts"), adapters_tests("recorded")
    backend = recorded.families()[name]["backend"]
    layer = Layer(SimpleNamespace(get_name=lambda: backend), "vec")
    for tp in map(int, recorded.families()[name]["tp"]):
        config, tensors = recorder.allocate(name, tp)
        document = local_document(
            recorded.engine_facts(name, tp, 0), layer_caches(tensors, config, dict.fromkeys(tensors, layer))
        )
        first = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
        size = max(t.untyped_storage().data_ptr() + t.untyped_storage().nbytes() for t in tensors.values()) - first
        for peer_tp in map(int, recorded.families()[name]["tp"]):
            try:
                plan = Planner().plan(document, recorded.engine(name, peer_tp, 1 << 50), peer_tp=peer_tp)
            except (GeometryMismatch, UnsupportedTopology):
                assert tp != peer_tp
                continue
            for number, group in enumerate(config.kv_cache_groups):
                lists = [BlockList((3,) if n == number else (), 0) for n in range(len(config.kv_cache_groups))]
                written = np.zeros(size, bool)
                for rank in plan.producer_ranks:
                    local, _ = plan.indices(rank, lists, lists, tokens=1)
                    for address, length, _ in expand_rows(plan.local_rows(rank))[local].tolist():
                        written[address - first : address - first + length] = True
                for start, stride, length in _segments(config, tensors, group):
                    at = start + 3 * stride - first
                    left = length - int(written[at : at + length].sum())
                    assert not left, (
                        f"tp {peer_tp} to {tp}, group {number}: {left} of {length} bytes keep their old value"
                    )
