"""Agent metadata of a rank in vLLM's names and order, so that vLLM's own connector can read from us as well."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from vllm_adapter.cache.documents import natural
from vllm_adapter.cache.geometry import kernel_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["metadata_fields"]

_SHARED_BY_GROUPS = -1
"""Group id of a region that layers of several groups share. Source: vLLM's wire."""


class _Region(NamedTuple):
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
    pages = max((kernel_blocks(facts, cache) for cache in caches), default=1)
    return {
        "engine_id": facts.engine_id,
        "agent_metadata": agent_metadata,
        **{name: [getattr(region, name) for region in regions] for name in _Region._fields},
        "device_id": caches[0].device,
        "num_blocks": facts.block_count * pages,
        "kv_cache_layout": facts.layout,
        "block_size": _block_tokens(facts) // pages,
        "ssm_sizes": _state_bytes(caches),
        "attn_backend_name": facts.attention_backend,
        "physical_blocks_per_logical_kv_block": pages,
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
    for cache in sorted(caches, key=lambda cache: natural(cache.layer)):
        count = kernel_blocks(facts, cache)
        address, page_bytes = cache.address, cache.page_bytes // count
        stride = cache.stride_bytes[0] if len(cache.stride_bytes) > 1 else page_bytes
        if stride > page_bytes and not _is_dense(cache, page_bytes):
            # Such layers share rows, and vLLM's own connector registers whole rows.
            address, page_bytes = _row_address(cache, caches), stride
        known = regions.get(address)
        if known is None:
            size = page_bytes, stride, facts.block_count * count
            regions[address] = _Region(address, *size, cache.group, cache.layer, cache.memory_kind)
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
