"""From the tensors that the engine allocated to this rank's geometry document (the format is kv-topology's, version 1).

Everything is read off real shapes, strides and cache specs; names of attention back ends decide nothing except whether the
inside of a page is plainly strided or in a kernel's own order.

What the host allocates (its axes: B kernel block, H head, N token, C content; "LBHNC" names their order in memory):

- attention: (B, H, N, C), a head's key and then its value in C; strides say which of H and N is outer, and whether the
  pages of several layers lie side by side. vLLM's CPU kernel keeps (B, H) apart and orders the rest to its own liking;
- latent attention: (B, 1, N, C) or (B, N, C), one vector per token on every rank;
- state layers: pages of bytes that hold the convolution's inputs and then the recurrent state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.facts import CacheGroup, EngineFacts, LayerCache
    from vllm_adapter.ports import MemoryKind

__all__ = ["local_document", "registration_ranges"]

SCHEMA = "kv-topology/geometry"
Axis = list[object]
Field = dict[str, object]


def local_document(facts: EngineFacts, caches: Sequence[LayerCache]) -> dict[str, object]:
    """Return this rank's geometry document.

    Raises:
        AdapterError: `unknown-cache-shape`, naming layer, shape and strides.
    """
    if not caches:
        raise AdapterError("the engine registered no layer that keeps a KV cache", code="no-cache-layers")
    layouts: list[list[Field]] = []
    regions: list[dict[str, object]] = []
    pages_per_block = _pages_per_block(facts, caches)
    for cache in caches:
        group = facts.groups[cache.group]
        layout = _layout(facts, cache, group)
        if layout not in layouts:
            layouts.append(layout)
        regions.append(_region(facts, cache, group, layouts.index(layout), pages_per_block[cache.group]))
    return {
        "schema": SCHEMA,
        "version": 1,
        "tp": [facts.tp, facts.tp_rank],
        "pp": [facts.pp, facts.pp_rank],
        # Block 0 is the scheduler's placeholder for blocks that a request does not have (any more).
        "null_block": 0,
        "stage_layers": [],
        "groups": [
            {
                "kind": group.kind,
                "block_tokens": 0 if group.kind == "state" else group.block_tokens,
                "pages_per_block": pages_per_block[number],
                "window_tokens": group.window_tokens,
                "context": [facts.dcp, facts.tp_rank % facts.dcp, 1] if group.kind != "state" else [1, 0, 1],
            }
            for number, group in enumerate(facts.groups)
        ],
        "layouts": layouts,
        "regions": regions,
    }


def registration_ranges(caches: Sequence[LayerCache]) -> tuple[tuple[int, int, int, MemoryKind], ...]:
    """Return (address, length_bytes, device, memory kind) ranges that cover all caches, overlapping ones merged."""
    merged: list[tuple[MemoryKind, int, int, int]] = []
    for cache in sorted(caches, key=lambda cache: (cache.memory_kind, cache.device, cache.address)):
        kind, device, start, stop = cache.memory_kind, cache.device, cache.address, cache.address + _extent_bytes(cache)
        if merged and merged[-1][:2] == (kind, device) and start <= merged[-1][3]:
            merged[-1] = (kind, device, merged[-1][2], max(stop, merged[-1][3]))
        else:
            merged.append((kind, device, start, stop))
    return tuple((start, stop - start, device, kind) for kind, device, start, stop in merged)


def _extent_bytes(cache: LayerCache) -> int:
    return sum((n - 1) * step for n, step in zip(cache.shape, cache.stride_bytes, strict=True)) + cache.element_bytes


def _pages_per_block(facts: EngineFacts, caches: Sequence[LayerCache]) -> list[int]:
    """Kernel blocks per scheduler block, by group, from how many pages the tensors really have."""
    found = [1] * len(facts.groups)
    for cache in caches:
        if facts.groups[cache.group].kind != "state" and len(cache.shape) > 1:
            found[cache.group] = max(1, cache.shape[0] // facts.block_count)
    return found


def _region(
    facts: EngineFacts, cache: LayerCache, group: CacheGroup, layout: int, pages_per_block: int
) -> dict[str, object]:
    if group.kind == "state" or len(cache.shape) == 1:
        stride = cache.stride_bytes[0] if len(cache.shape) > 1 else cache.page_bytes
        page_bytes, page_count = min(cache.page_bytes, stride), facts.block_count
    else:
        stride, page_count = cache.stride_bytes[0], facts.block_count * pages_per_block
        page_bytes = min(stride, _page_extent_bytes(cache))
    return {
        "base_address": cache.address,
        "page_bytes": page_bytes,
        "page_stride_bytes": stride,
        "page_count": page_count,
        "memory_kind": cache.memory_kind,
        "device": cache.device,
        "members": [[cache.layer, layout, cache.group, 0]],
    }


def _page_extent_bytes(cache: LayerCache) -> int:
    inner = zip(cache.shape[1:], cache.stride_bytes[1:], strict=True)
    return sum((n - 1) * step for n, step in inner) + cache.element_bytes


def _layout(facts: EngineFacts, cache: LayerCache, group: CacheGroup) -> list[Field]:
    if group.kind == "state":
        return _state_layout(facts, cache)
    if facts.is_mla:
        return _latent_layout(cache)
    if len(cache.shape) == 4:
        return _kernel_ordered_layout(facts, cache) if facts.kernel_order else _packed_layout(facts, cache)
    raise _unknown(cache, "attention caches have the axes block, head, token and content")


def _head_interval(facts: EngineFacts, cache: LayerCache, held: int) -> tuple[int, int, int]:
    """Return (first head, one past the last, heads of the model) of a rank, heads shared when there are too few."""
    total = max(facts.total_kv_heads, 1)
    start = facts.tp_rank * total // facts.tp
    stop = max((facts.tp_rank + 1) * total // facts.tp, start + 1)
    if stop - start != held:
        raise _unknown(cache, f"this rank should hold heads {start} to {stop - 1} of {total}, not {held} heads")
    return start, stop, total


def _packed_layout(facts: EngineFacts, cache: LayerCache) -> list[Field]:
    _, heads, tokens, content = cache.shape
    _, head_stride, token_stride, element_stride = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache, heads)
    key_size = facts.head_size
    if not 0 < key_size < content:
        raise _unknown(cache, f"the content should hold a key of {key_size} elements and then a value")
    parts = (("key", 0, key_size), ("value", key_size * cache.element_bytes, content - key_size))
    return [
        _field(
            name,
            cache.element_bytes,
            offset,
            [
                ["token", tokens, 0, tokens, token_stride, "whole"],
                ["head", total, start, stop, head_stride, "tp"],
                ["channel", size, 0, size, element_stride, "whole"],
            ],
        )
        for name, offset, size in parts
    ]


def _kernel_ordered_layout(facts: EngineFacts, cache: LayerCache) -> list[Field]:
    """Per head the page's keys and then its values, each in an order that only the same kernel understands."""
    _, heads, tokens, content = cache.shape
    _, head_stride, _, element_stride = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache, heads)
    interior = tokens * content // 2
    packing = f"{facts.kernel_order}:{tokens}"
    return [
        _field(
            name,
            cache.element_bytes,
            half * interior * cache.element_bytes,
            [
                ["head", total, start, stop, head_stride, "tp"],
                ["interior", interior, 0, interior, element_stride, "whole"],
            ],
            packing,
        )
        for half, name in enumerate(("key", "value"))
    ]


def _latent_layout(cache: LayerCache) -> list[Field]:
    if len(cache.shape) == 4 and cache.shape[1] == 1:
        tokens, channels, token_stride, channel_stride = (*cache.shape[2:], *cache.stride_bytes[2:])
    elif len(cache.shape) == 3:
        tokens, channels, token_stride, channel_stride = (*cache.shape[1:], *cache.stride_bytes[1:])
    else:
        raise _unknown(cache, "latent caches have the axes block, token and channel")
    axes: list[Axis] = [
        ["token", tokens, 0, tokens, token_stride, "whole"],
        ["channel", channels, 0, channels, channel_stride, "whole"],
    ]
    return [_field("latent", cache.element_bytes, 0, axes)]


def _state_layout(facts: EngineFacts, cache: LayerCache) -> list[Field]:
    """Mamba-2: the convolution's inputs of x, B and C (channel before row), then the state (heads, head_dim, state)."""
    if len(cache.state_shapes) != 2 or len(cache.state_shapes[1]) != 3:
        raise _unknown(cache, f"state layers of this kind are not known (state shapes {cache.state_shapes})")
    (conv_channels, rows), (heads, head_dim, state) = cache.state_shapes
    conv_bytes, state_bytes = cache.state_element_bytes
    groups = conv_channels - heads * head_dim
    if groups <= 0 or groups % (2 * state):
        raise _unknown(cache, f"{conv_channels} convolution channels do not divide into x, B and C of {heads} heads")
    groups //= 2 * state
    row_bytes, channel_bytes = conv_bytes, rows * conv_bytes
    fields: list[Field] = []
    offset = 0
    for name, parts, channels in (("conv_x", heads, head_dim), ("conv_b", groups, state), ("conv_c", groups, state)):
        first = facts.tp_rank * parts
        fields.append(
            _field(
                name,
                conv_bytes,
                offset,
                [
                    ["group", parts * facts.tp, first, first + parts, channels * channel_bytes, "tp"],
                    ["channel", channels, 0, channels, channel_bytes, "whole"],
                    ["row", rows, 0, rows, row_bytes, "whole"],
                ],
            )
        )
        offset += parts * channels * channel_bytes
    first = facts.tp_rank * heads
    fields.append(
        _field(
            "ssm",
            state_bytes,
            offset,
            [
                ["head", heads * facts.tp, first, first + heads, head_dim * state * state_bytes, "tp"],
                ["channel", head_dim, 0, head_dim, state * state_bytes, "whole"],
                ["state", state, 0, state, state_bytes, "whole"],
            ],
        )
    )
    return fields


def _field(name: str, element_bytes: int, offset_bytes: int, axes: list[Axis], packing: str = "") -> Field:
    return {
        "name": name,
        "element_bytes": element_bytes,
        "offset_bytes": offset_bytes,
        "packing": packing,
        "axes": axes,
    }


def _unknown(cache: LayerCache, expected: str) -> AdapterError:
    return AdapterError(
        f"layer {cache.layer}: its cache of shape {cache.shape} and strides {cache.stride_bytes} (bytes) is not "
        f"understood: {expected}",
        code="unknown-cache-shape",
        context={"layer": cache.layer, "shape": cache.shape, "stride_bytes": cache.stride_bytes},
    )
