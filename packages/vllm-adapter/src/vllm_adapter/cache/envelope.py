"""Agent metadata of a rank in vLLM's names and order, so that vLLM's own connector can read from us as well."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["metadata_fields"]

_SHARED_BY_GROUPS = -1
"""Group id of a region that layers of several groups share. Source: vLLM's wire."""


class _Region(NamedTuple):
    """Registered memory of a layer, or of several that share it.

    Attributes:
        address: Start address, bytes.
        name: Name of the first layer.
        group: KV-cache group, or -1 if layers of several groups share the region.
        page_bytes: Bytes of a page.
        stride_bytes: Bytes from one page to the next.
        pages: Number of pages.
        memory_kind: ``DRAM`` or ``VRAM``.
    """

    address: int
    name: str
    group: int
    page_bytes: int
    stride_bytes: int
    pages: int
    memory_kind: str


def metadata_fields(
    facts: EngineFacts,
    caches: Sequence[LayerCache],
    *,
    agent_metadata: bytes,
    fence: tuple[int, int, int] | None,
    geometry: bytes,
    generation: int,
    streams: tuple[int, int, int, int] | None = None,
) -> Mapping[str, object]:
    """Return the values of the agent metadata by wire name.

    Regions are sorted by their layers' names, with numbers compared as numbers; a tensor that several layers share appears once.
    vLLM's own connector pairs regions by that order.
    """
    regions = _regions(facts, caches)
    kernel_blocks = max((_kernel_blocks(facts, cache) for cache in caches), default=1)
    return {
        "engine_id": facts.engine_id,
        "agent_metadata": agent_metadata,
        "kv_caches_base_addr": [region.address for region in regions],
        "block_lens": [region.page_bytes for region in regions],
        "block_strides": [region.stride_bytes for region in regions],
        "region_num_blocks": [region.pages for region in regions],
        "region_group_ids": [region.group for region in regions],
        "region_names": [region.name for region in regions],
        "region_mem_types": [region.memory_kind for region in regions],
        "device_id": caches[0].device,
        "num_blocks": facts.block_count * kernel_blocks,
        "kv_cache_layout": facts.layout,
        "block_size": _block_tokens(facts) // kernel_blocks,
        "ssm_sizes": _state_bytes(caches),
        "attn_backend_name": facts.attention_backend,
        "physical_blocks_per_logical_kv_block": kernel_blocks,
        "dcp_size": facts.dcp,
        "fence": fence,
        "streams": streams,
        "geometry": geometry,
        "generation": generation,
    }


def _block_tokens(facts: EngineFacts) -> int:
    """Return the tokens of the largest block of attention; without attention, those of the first group's blocks."""
    return max((g.block_tokens for g in facts.groups if g.kind != "state"), default=facts.groups[0].block_tokens)


def _regions(facts: EngineFacts, caches: Sequence[LayerCache]) -> tuple[_Region, ...]:
    """Return the registered regions, one per address, in the order of their first layer's name."""
    regions: dict[int, _Region] = {}
    for cache in sorted(caches, key=lambda cache: _natural(cache.layer)):
        address = cache.address
        page_bytes, stride, pages = _pages(facts, cache)
        if stride > page_bytes and not _is_dense(cache, page_bytes):
            # Such layers share rows, and vLLM's own connector registers whole rows.
            address, page_bytes = _row_address(cache, caches), stride
        known = regions.get(address)
        if known is None:
            regions[address] = _Region(address, cache.layer, cache.group, page_bytes, stride, pages, cache.memory_kind)
        elif known.group != cache.group:
            regions[address] = known._replace(group=_SHARED_BY_GROUPS)
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


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that orders layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


def _kernel_blocks(facts: EngineFacts, cache: LayerCache) -> int:
    """Return the kernel blocks per scheduler block; 1 for states and for flat views, whose pages are the scheduler's."""
    if facts.groups[cache.group].kind == "state" or len(cache.stride_bytes) == 1:
        return 1
    return max(1, cache.shape[0] // facts.block_count)


def _pages(facts: EngineFacts, cache: LayerCache) -> tuple[int, int, int]:
    """Return (page bytes, stride, count) of a cache in kernel blocks."""
    kernel_blocks = _kernel_blocks(facts, cache)
    page_bytes = cache.page_bytes // kernel_blocks
    block_stride, *inner = cache.stride_bytes
    stride = block_stride if inner else page_bytes
    return page_bytes, stride, facts.block_count * kernel_blocks


def _state_bytes(caches: Sequence[LayerCache]) -> tuple[int, int]:
    """Return the bytes of the convolution's inputs and of the recurrent state of a state layer, zeros without one."""
    for cache in caches:
        if cache.state_shapes and cache.state_kind != "RING":
            shapes = zip(cache.state_shapes, cache.state_element_bytes, strict=True)
            conv, *others = (prod(shape) * element_bytes for shape, element_bytes in shapes)
            return conv, sum(others)
    return 0, 0
