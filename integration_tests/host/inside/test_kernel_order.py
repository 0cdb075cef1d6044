"""The order that vLLM's CPU kernels really write pages in, against the geometry that we describe."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_adapter.cache.attention import attention_fields
from vllm_adapter.cache.facts import KEYS_BY_CHANNEL, CacheGroup, EngineFacts, LayerCache
from vllm_adapter.host import cache_config

HEADS, BLOCKS = 2, 3


def _facts(head_size: int) -> EngineFacts:
    return EngineFacts(
        engine_id="e", host="127.0.0.1", port=1, tp=1, tp_rank=0, pp=1, pp_rank=0, dcp=1, total_kv_heads=HEADS,
        head_size=head_size, block_count=BLOCKS, generation=1, layout="LBHNC", kernel_order=KEYS_BY_CHANNEL,
        attention_backend="CPU_ATTN", connector_version=14,
        groups=(CacheGroup("attention", 16, 0, 0, ("layer",)),), group_ids=(0,),
    )  # fmt: skip


def _places(field: Any) -> dict[tuple[int, ...], int]:
    """Return the element offset in a page of every (token, head, channel) of a field."""
    sizes = [axis[3] - axis[2] for axis in field["axes"]]
    assert [axis[0] for axis in field["axes"]] == ["token", "head", "channel"]
    places: dict[tuple[int, ...], int] = {}
    for number in range(prod(sizes)):
        rest, cell = number, []
        for size in reversed(sizes):
            rest, index = divmod(rest, size)
            cell.append(index)
        cell.reverse()
        steps = (axis[4] * index for axis, index in zip(field["axes"], cell, strict=True))
        places[tuple(cell)] = (field["offset_bytes"] + sum(steps)) // field["element_bytes"]
    return places


@pytest.mark.parametrize("tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_vector_kernels_write_keys_by_channel(dtype: torch.dtype, head_size: int, tokens: int) -> None:
    isa = _get_attn_isa(dtype, tokens, head_size)
    if isa not in cache_config._VECTOR_KERNELS:
        pytest.skip(f"this CPU's kernel for {dtype}, {tokens} tokens and heads of {head_size} is {isa}")
    tensor = torch.zeros(BLOCKS, HEADS, tokens, 2 * head_size, dtype=dtype)
    keys, values = tensor.view(BLOCKS, HEADS, 2 * tokens, head_size).chunk(2, dim=2)
    # Whole numbers up to 256 are exact in bfloat16: token + head and channel tell a cell apart in two passes.
    for code in (lambda t, h, _c: t + 128 * h, lambda _t, _h, c: c):
        key = torch.tensor(
            [[[code(t, h, c) for c in range(head_size)] for h in range(HEADS)] for t in range(tokens)], dtype=dtype
        )
        slots = torch.arange(tokens, dtype=torch.int64) + tokens  # block 1
        scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
        ops.cpu_attn_reshape_and_cache(key, key.clone(), keys, values, slots, isa, **scales)
        page = tensor[1].reshape(-1).float()
        size = tensor.element_size()
        cache = LayerCache(
            layer="layer", group=0, address=0, shape=tuple(tensor.shape),
            stride_bytes=tuple(step * size for step in tensor.stride()), element_bytes=size, memory_kind="DRAM",
            device=0, page_bytes=tensor[1].numel() * size,
        )  # fmt: skip
        for field in attention_fields(_facts(head_size), cache):
            wrong = [cell for cell, place in _places(field).items() if page[place] != code(*cell)]
            assert not wrong, f"{isa}: {field['name']} of {wrong[:3]} lie elsewhere"
