"""Conversion of the engine's tensors into this rank's geometry document (in kv-topology's format, version 1).

Everything is derived from real shapes, strides and cache specs. The name of a layer's own back end decides only whether the
inside of its page is plainly strided, in a kernel's own order, or unknown.

What the host allocates (its axes: B kernel block, H head, N token, C content; "LBHNC" names their order in memory):

- attention: (B, H, N, C), a head's key and then its value in C; strides say which of H and N is outer, whether the pages
  of several layers lie side by side, and whether the heads of a page lie apart (then each head is a region of its own).
  vLLM's CPU kernel keeps (B, H) apart and orders the rest in its own way;
- latent attention: (B, 1, N, C) or (B, N, C), one vector per token on every rank;
- its sparse indexer: the same shape, but the page holds the values of all tokens and then their scales, so it is opaque;
- state layers: pages of bytes that hold the convolution's inputs and then the recurrent state.

Pages that are not understood in detail (planes of keys and of values, unknown states and back ends) move whole between engines of
equal size, and are refused when a plan for other sizes is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_adapter.cache.documents import GeometryDocument, GroupDocument, RegionDocument
from vllm_adapter.cache.fields import attention_fields, dense_bytes, latent_fields, state_fields
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cache.documents import FieldDocument
    from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
    from vllm_adapter.ports import MemoryKind

__all__ = ["kernel_blocks", "local_document", "region_caches", "registration_ranges"]

SCHEMA = "kv-topology/geometry"


def local_document(facts: EngineFacts, caches: Sequence[LayerCache]) -> GeometryDocument:
    """Return this rank's geometry document; its regions are those of `region_caches`.

    Raises:
        AdapterError: `unknown-cache-shape`, naming layer, shape and strides.
    """
    if not caches:
        raise AdapterError(
            "the engine registered no layer that keeps a KV cache, so there is nothing to hand over; leave "
            "--kv-transfer-config out for this model",
            code="no-cache-layers",
        )
    layouts: list[list[FieldDocument]] = []
    regions: list[RegionDocument] = []
    pages_per_block = [1] * len(facts.groups)
    for cache in caches:
        pages_per_block[cache.group] = max(kernel_blocks(facts, cache), pages_per_block[cache.group])
    for cache in region_caches(facts, caches):
        group, pages = facts.groups[cache.group], pages_per_block[cache.group]
        layout = _fields(facts, cache, group, pages)
        if layout not in layouts:
            layouts.append(layout)
        regions.append(_region(facts, cache, group, layouts.index(layout), pages))
    return GeometryDocument(
        schema=SCHEMA,
        version=1,
        tp=(facts.tp, facts.tp_rank),
        pp=(facts.pp, facts.pp_rank),
        # Block 0 is the scheduler's placeholder for blocks that a request does not have (any more).
        null_block=0,
        stage_layers=[],
        groups=[
            GroupDocument(
                kind=group.kind,
                block_tokens=0 if group.kind == "state" else group.block_tokens,
                pages_per_block=pages_per_block[number],
                window_tokens=group.window_tokens,
                context=facts.deal_of(group),
            )
            for number, group in enumerate(facts.groups)
        ],
        layouts=layouts,
        regions=regions,
    )


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


def _extent_bytes(cache: LayerCache, first_axis: int = 0) -> int:
    """Return the bytes from the first to the end of the last element along the axes from one on."""
    inner = zip(cache.shape[first_axis:], cache.stride_bytes[first_axis:], strict=True)
    return sum((n - 1) * step for n, step in inner) + cache.element_bytes


def kernel_blocks(facts: EngineFacts, cache: LayerCache) -> int:
    """Return the pages of a scheduler block, by the real number of pages; 1 for states and for flat views of whole blocks."""
    if facts.groups[cache.group].kind == "state" or len(cache.shape) == 1:
        return 1
    return max(1, cache.shape[0] // facts.block_count)


def _region(
    facts: EngineFacts, cache: LayerCache, group: CacheGroup, layout: int, pages_per_block: int
) -> RegionDocument:
    if group.kind == "state" or len(cache.shape) == 1:
        stride = cache.stride_bytes[0] if len(cache.shape) > 1 else cache.page_bytes
        page_bytes, page_count = min(cache.page_bytes, stride), facts.block_count
    else:
        stride, page_count = cache.stride_bytes[0], facts.block_count * pages_per_block
        page_bytes = min(stride, _extent_bytes(cache, 1))
    return RegionDocument(
        base_address=cache.address,
        page_bytes=page_bytes,
        page_stride_bytes=stride,
        page_count=page_count,
        memory_kind=cache.memory_kind,
        device=cache.device,
        members=[(cache.layer, layout, cache.group, 0)],
    )


def region_caches(facts: EngineFacts, caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the caches by region of the document: a cache whose heads lie apart becomes one cache per head."""
    found: list[LayerCache] = []
    for cache in caches:
        is_plain = facts.groups[cache.group].kind == "state" or cache.is_latent or len(cache.shape) != 4
        if is_plain or _extent_bytes(cache, 1) == dense_bytes(cache):
            found.append(cache)
            continue
        blocks, slots, *inner = cache.shape
        found += [
            replace(
                cache,
                address=cache.address + slot * cache.stride_bytes[1],
                shape=(blocks, 1, *inner),
                head_slot=slot,
                head_slots=slots,
            )
            for slot in range(slots)
        ]
    return found


def _fields(facts: EngineFacts, cache: LayerCache, group: CacheGroup, pages_per_block: int) -> list[FieldDocument]:
    if group.kind == "state":
        return state_fields(facts, cache)
    if cache.is_latent:
        return latent_fields(facts, cache, group.block_tokens // pages_per_block)
    return attention_fields(facts, cache)
