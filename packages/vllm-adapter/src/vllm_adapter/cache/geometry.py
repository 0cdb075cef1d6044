"""Conversion of the engine's tensors into what this rank sends to peers.

That is its geometry document (in kv-topology's format, version 1), and the agent metadata in vLLM's names and order, so that
vLLM's own connector can read from us as well.

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
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from vllm_adapter.cache.documents import GeometryDocument, GroupDocument, RegionDocument, natural
from vllm_adapter.cache.fields import attention_fields, dense_bytes, latent_fields, state_fields
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cache.documents import FieldDocument, StageEntry
    from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
    from vllm_adapter.ports import MemoryKind

__all__ = ["local_document", "metadata_fields", "region_caches", "registration_ranges", "whole_engine", "with_stages"]

SCHEMA = "kv-topology/geometry"
_STAGE_BITS = 57
"""Size of an address in a process: the addresses of different stages are set apart above it."""
_SHARED_BY_GROUPS = -1
"""Group id of a region that layers of several groups share. Source: vLLM's wire."""


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
        pages_per_block[cache.group] = max(_kernel_blocks(facts, cache), pages_per_block[cache.group])
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
                element_types=sorted(map(list, {c.element_types for c in caches if c.group == number} - {()})),
            )
            for number, group in enumerate(facts.groups)
        ],
        layouts=layouts,
        regions=regions,
    )


def with_stages(document: GeometryDocument, stages: Sequence[GeometryDocument]) -> GeometryDocument:
    """Return a rank's document with the layers of all pipeline stages, from which a reader counts a producer rank's readers."""
    return {**document, "stages": [_stage_layers(stage) for stage in stages]} if len(stages) > 1 else document


def _stage_layers(document: GeometryDocument) -> list[StageEntry]:
    found: dict[str, StageEntry] = {}
    for layer, layout, group, _ in (member for region in document["regions"] for member in region["members"]):
        names = dict.fromkeys(field["name"] for field in document["layouts"][layout])
        found.setdefault(layer, (layer, group, list(names)))
    return list(found.values())


def whole_engine(stages: Sequence[GeometryDocument]) -> GeometryDocument:
    """Return the document that the stages of one tensor-parallel rank would have as a single rank.

    Addresses in two processes may be equal, so the regions of each stage are moved to a range of their own.
    """
    layouts: list[list[FieldDocument]] = []
    regions: list[RegionDocument] = []
    for number, stage in enumerate(stages):
        for region in stage["regions"]:
            members = [(layer, len(layouts) + layout, group, at) for layer, layout, group, at in region["members"]]
            base_address = region["base_address"] + (number << _STAGE_BITS)
            regions.append({**region, "base_address": base_address, "members": members})
        layouts += stage["layouts"]
    # A stage without layers of a group does not know how many pages a block of it has.
    groups = [
        max(each, key=lambda group: group["pages_per_block"])
        for each in zip(*(s["groups"] for s in stages), strict=True)
    ]
    return {**stages[0], "groups": groups, "layouts": layouts, "regions": regions}


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


def _kernel_blocks(facts: EngineFacts, cache: LayerCache) -> int:
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
        fields = latent_fields(facts, cache, group.block_tokens // pages_per_block)
    else:
        fields = attention_fields(facts, cache)
    # Names of their own: an engine whose elements stand for other numbers has no such fields, and is refused.
    return [{**field, "name": field["name"] + cache.elements} for field in fields] if cache.elements else fields


# ----------------------------------------------------------------------------------------------- for vLLM's own connector


class _WireRegion(NamedTuple):
    """Registered memory of a layer, or of several that share it; by the names of vLLM's wire.

    Attributes:
        kv_caches_base_addr: Start address, bytes.
        block_lens: Bytes of a page.
        block_strides: Bytes from one page to the next.
        region_num_blocks: Number of pages.
        region_group_ids: KV-cache group, or -1 if layers of several groups share the region.
        region_names: Name of the first layer.
        region_mem_types: ``DRAM`` or ``VRAM``.
    """

    kv_caches_base_addr: int
    block_lens: int
    block_strides: int
    region_num_blocks: int
    region_group_ids: int
    region_names: str
    region_mem_types: str


def metadata_fields(facts: EngineFacts, caches: Sequence[LayerCache]) -> Mapping[str, object]:
    """Return the values of the agent metadata about the engine and its caches, by wire name.

    Regions are sorted by their layers' names, with numbers compared as numbers, or with a ring in the order of `caches`; a tensor
    that several layers share appears once. vLLM's own connector pairs regions by that order. Beside a ring it keeps a replicated
    convolution apart from the states.
    """
    has_ring = any(cache.state_kind == "RING" for cache in caches)
    ordered = caches if has_ring else sorted(caches, key=lambda cache: natural(cache.layer))
    lone = [cache for cache in ordered if has_ring and cache.is_replicated]
    regions, groups = _wire_regions(facts, ordered), facts.groups
    # The largest block of attention; without attention, a block of the first group.
    block_tokens = max((g.block_tokens for g in groups if g.kind != "state"), default=groups[0].block_tokens)
    pages = max((_kernel_blocks(facts, cache) for cache in caches), default=1)
    return {
        "engine_id": facts.engine_id,
        **{name: [getattr(region, name) for region in regions] for name in _WireRegion._fields},
        "device_id": caches[0].device,
        "num_blocks": facts.block_count * pages,
        "kv_cache_layout": facts.layout,
        "block_size": block_tokens // pages,
        "ssm_sizes": _state_bytes([cache for cache in caches if cache not in lone]),
        "ple_block_len": lone[0].page_bytes // pages if lone else None,
        "attn_backend_name": facts.attention_backend,
        "physical_blocks_per_logical_kv_block": pages,
        "dcp_size": facts.dcp,
    }


def _wire_regions(facts: EngineFacts, caches: Sequence[LayerCache]) -> tuple[_WireRegion, ...]:
    """Return the registered regions, one per address, in the order of their first layer."""
    regions: dict[int, _WireRegion] = {}
    for cache in caches:
        count = _kernel_blocks(facts, cache)
        address, page_bytes = cache.address, cache.page_bytes // count
        stride = cache.stride_bytes[0] if len(cache.stride_bytes) > 1 else page_bytes
        if stride > page_bytes and not _is_dense(cache, page_bytes):
            # Such layers share rows, and vLLM's own connector registers whole rows.
            address, page_bytes = _row_address(cache, caches), stride
        known = regions.get(address)
        if known is None:
            size = page_bytes, stride, facts.block_count * count
            regions[address] = _WireRegion(address, *size, cache.group, cache.layer, cache.memory_kind)
        elif known.region_group_ids != cache.group:
            regions[address] = known._replace(region_group_ids=_SHARED_BY_GROUPS)
    return tuple(regions.values())


def _is_dense(cache: LayerCache, page_bytes: int) -> bool:
    """Return whether a page is one run of bytes without gaps, in the order of its axes."""
    run_bytes = cache.element_bytes
    for length, stride in zip(reversed(cache.shape[1:]), reversed(cache.stride_bytes[1:]), strict=True):
        if length > 1 and stride != run_bytes:
            return False
        run_bytes *= length
    return run_bytes == page_bytes


def _row_address(cache: LayerCache, caches: Sequence[LayerCache]) -> int:
    """Return the address of the first row in which a layer has its pages.

    Example: layers at 0 and 37 440, both with 46 136 bytes from block to block, share rows that begin at 0.
    """
    stride = cache.stride_bytes[0]
    return min(
        other.address
        for other in caches
        if other.stride_bytes[0] == stride and 0 <= cache.address - other.address < stride
    )


def _state_bytes(caches: Sequence[LayerCache]) -> tuple[int, int]:
    """Return the bytes of the convolution's inputs and of the recurrent state of a state layer, zeros without one."""
    for cache in caches:
        if cache.state_shapes and cache.state_kind != "RING":
            shapes = zip(cache.state_shapes, cache.state_element_bytes, strict=True)
            conv, *others = (prod(shape) * element_bytes for shape, element_bytes in shapes)
            return conv, sum(others)
    return 0, 0
