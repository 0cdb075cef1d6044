"""vLLM's KV-cache configuration as plain facts: groups of layers, and the tensor of each layer."""

from __future__ import annotations

import hashlib
import platform
from typing import TYPE_CHECKING, Any, Literal

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_adapter.cache.facts import KEYS_BY_CHANNEL, PAIRS_IN_TILES, CacheGroup, LayerCache
from vllm_adapter.errors import UnsupportedHost

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = ["cache_groups", "layer_caches", "state_groups", "transfer_group_ids"]

_CPU_BACKEND = "CPU_ATTN"
_VECTOR_KERNELS = ("vec", "vec16")
_LONGEST_SCALES = 64
_EIGHT_BIT_TYPES = {
    "fp8": "torch.float8_e4m3fn",
    "fp8_e4m3": "torch.float8_e4m3fn",
}
"""Types of elements of one byte by a layer's `kv_cache_dtype`. All others keep scales in their pages, or are AMD's or Gaudi's;
under `fp8_e5m2` vLLM's Triton kernels write e4m3."""
_KNOWN_BACKENDS = frozenset(
    {
        *(
            "B12X",
            "FLASHINFER",
            "FLASH_ATTN",
            "FLASH_ATTN_DIFFKV",
            "FLEX_ATTENTION",
            "HPC_ATTN",
            "ROCM_AITER_UNIFIED_ATTN",
        ),
        *("ROCM_SEGMENTED_ATTN", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "TURBOQUANT"),
        *("AITER_TRITON_MLA", "AMX_MLA", "CPU_MLA", "CUTLASS_MLA", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE"),
        *("FLASHINFER_MLA_SPARSE_SM120", "FLASHINFER_MLA_SPARSE_SM90", "FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA"),
        *("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE_FA4", "ROCM_AITER_MLA", "ROCM_AITER_MLA_SPARSE"),
        *("TOKENSPEED_MLA", "TRITON_MLA", "XPU_MLA_SPARSE"),
    }
)
"""Back ends that keep each token of each head where its tensor's strides say (without planes), as a key and then a value, or as
one latent vector. Source: their writers in vLLM 0.30 to 0.33."""


def layer_caches(caches: dict[str, torch.Tensor], cache: KVCacheConfig, layers: Mapping[str, Any]) -> list[LayerCache]:
    """Describe the tensors that the engine allocated, layer by layer; skip layers that only share another layer's cache.

    Args:
        caches: Tensor of each layer.
        cache: The host's description of them.
        layers: The host's layers by name (its static forward context), each of which knows its own back end.

    Raises:
        UnsupportedHost: `unknown-cache-layer`: a layer has a cache and is not among the host's layers.
    """
    specs = _layer_specs(cache)
    found: list[LayerCache] = []
    for layer, tensor in caches.items():
        if layer not in specs:
            continue
        group, spec = specs[layer]
        element_bytes = tensor.element_size()
        types = spec.dtypes if isinstance(spec, MambaSpec) else (tensor.dtype,)
        names = tuple(str(each) for each in types if each.itemsize > 1)
        found.append(
            LayerCache(
                layer=layer,
                group=group,
                address=tensor.data_ptr(),
                shape=tuple(tensor.shape),
                stride_bytes=tuple(step * element_bytes for step in tensor.stride()),
                element_bytes=element_bytes,
                memory_kind="DRAM" if tensor.device.type == "cpu" else "VRAM",
                device=max(tensor.get_device(), 0),
                page_bytes=spec.page_size_bytes,
                element_types=names if element_bytes > 1 or names else _eight_bit_type(layers[layer]),
                **_spec_facts(spec, tuple(tensor.shape[1:]), element_bytes),
                **_order_facts(spec, layer, layers, str(tensor.dtype)),
                elements=_elements(layers[layer]) if element_bytes == 1 else "",
            )
        )
    return found


def _order_facts(spec: KVCacheSpec, name: str, layers: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return what is known of the order inside a page: from the layer itself, since the layers of a model may differ.

    Sources: the orders of CPU kernels on x86 were derived from pages that they wrote (a host test repeats this); for other
    processors they are only named. A layer's `isa` is the kernel that the host chose for it, before it registers caches.
    """
    layer = layers.get(name)
    if layer is None:
        raise UnsupportedHost(
            f"layer {name} has a KV cache and is not among the {len(layers)} layers that vLLM lists, so the order inside its "
            "pages is unknown; use vLLM's own NixlConnector for this model",
            code="unknown-cache-layer",
            context={"layer": name},
        )
    backend = str(layer.get_attn_backend().get_name())
    if backend == _CPU_BACKEND:
        isa = str(getattr(layer, "isa", ""))
        is_x86 = platform.machine() == "x86_64"
        if isa in _VECTOR_KERNELS and is_x86:
            return {"backend": backend, "kernel_order": KEYS_BY_CHANNEL}
        if isa == "amx" and is_x86:
            return {"backend": backend, "kernel_order": PAIRS_IN_TILES}
        return {"backend": backend, "kernel_order": f"vllm-cpu:{isa}:{dtype}", "is_opaque": not isa}
    has_planes = getattr(spec, "num_head_slots", None) is not None
    is_opaque = has_planes or backend not in _KNOWN_BACKENDS
    if backend.endswith("_INDEXER") and current_platform.is_rocm():
        backend += "@rocm"  # ROCm tiles the values, under the same name
    return {"backend": backend, "is_opaque": is_opaque}


def _eight_bit_type(layer: Any) -> tuple[str, ...]:  # noqa: ANN401  (vLLM's, which types little of it)
    """Return the type of an 8-bit cache whose numbers are its bytes' own, because its layer's scales are known to be 1."""
    is_known = all(getattr(layer, name, None) is not None for name in ("_k_scale", "_v_scale"))
    name = _EIGHT_BIT_TYPES.get(str(getattr(layer, "kv_cache_dtype", "")), "")
    return (name,) if name and is_known and not _elements(layer) else ()


def _elements(layer: Any) -> str:  # noqa: ANN401  (vLLM's, which types little of it)
    """Return what the numbers of a layer's 8-bit cache are besides its dtype's, as text; empty for the dtype's own.

    A layer keeps its scales (per tensor, or per head of this rank) outside of its pages, 1 where the checkpoint has none.
    """
    tensors: list[Any] = [getattr(layer, name, None) for name in ("_k_scale", "_v_scale")]
    values = [scale for tensor in tensors if tensor is not None for scale in tensor.flatten().tolist()]
    scales = ", ".join(f"{scale:.9g}" for scale in values) if {*values} != {1.0} else ""
    if len(scales) > _LONGEST_SCALES:
        scales = hashlib.sha256(scales.encode()).hexdigest()[:32]
    is_amds = str(getattr(layer, "kv_cache_dtype", "")).startswith("fp8") and current_platform.is_fp8_fnuz()
    return (" (fnuz)" if is_amds else "") + (f" (scales {scales})" if scales else "")


def _is_ring(spec: object) -> bool:
    """Return whether a request keeps all its tokens in one page, written in a circle; transfers treat such a page as a state."""
    return any("CircularBuffer" in base.__name__ for base in type(spec).__mro__)


def _spec_facts(spec: KVCacheSpec, page_shape: tuple[int, ...], element_bytes: int) -> dict[str, Any]:
    """Return the form of a layer's states, or of its heads, which may differ between layers and from the configuration."""
    if isinstance(spec, MambaSpec):
        return {
            "state_shapes": tuple(tuple(shape) for shape in spec.shapes),
            "state_element_bytes": tuple(dtype.itemsize for dtype in spec.dtypes),
            "state_kind": _name_of(spec, "mamba_type"),
            "is_replicated": bool(getattr(spec, "tp_replicated", False)),
        }
    if _is_ring(spec):
        return {"state_shapes": (page_shape,), "state_element_bytes": (element_bytes,), "state_kind": "RING"}
    if any("MLA" in base.__name__ for base in type(spec).__mro__):
        return {"is_latent": True, "is_indexer": _name_of(spec, "cache_role") == "INDEXER"}
    return {"key_size": getattr(spec, "head_size", 0), "value_size": getattr(spec, "head_size_v", None) or 0}


def _name_of(spec: object, attribute: str) -> str:
    """Return the name of an attribute's value, an enum's member or a text, in capitals."""
    value: Any = getattr(spec, attribute, "")
    return str(getattr(value, "name", value)).upper()


def _transfer_groups(cache: KVCacheConfig) -> tuple[Any, ...]:
    groups: Any = getattr(cache, "transfer_groups", None)
    return tuple(cache.kv_cache_groups if groups is None else groups)


def transfer_group_ids(cache: KVCacheConfig) -> tuple[int, ...]:
    """Return the numbers of the transferable groups among all of the scheduler's groups."""
    ids: Any = getattr(cache, "transfer_group_ids", None)
    return tuple(range(len(cache.kv_cache_groups))) if ids is None else tuple(ids)


def cache_groups(cache: KVCacheConfig) -> tuple[CacheGroup, ...]:
    """Describe the transferable groups."""
    return tuple(_cache_group(group.kv_cache_spec, group.layer_names) for group in _transfer_groups(cache))


def _cache_group(spec: KVCacheSpec, layers: list[str]) -> CacheGroup:
    first: Any = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    kind: Literal["attention", "sliding-window", "latent", "state"] = "attention"
    window_tokens, chunk_tokens, scratch_blocks = 0, 0, 0
    if isinstance(first, MambaSpec):
        kind, scratch_blocks = "state", first.num_speculative_blocks
    elif _is_ring(first):
        kind = "state"
    elif isinstance(first, SlidingWindowSpec):
        kind, window_tokens = "sliding-window", first.sliding_window
    elif isinstance(first, ChunkedLocalAttentionSpec):
        chunk_tokens = first.attention_chunk_size
    elif isinstance(first, MLAAttentionSpec):
        kind = "latent"
    is_dealt = kind == "state" or bool(getattr(spec, "dcp_sharded", True))
    # A uniform spec of several layers gives the bytes of all of them; any other spec gives those of one layer.
    pages = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(layers)
    block_bytes = pages * spec.page_size_bytes
    return CacheGroup(
        kind, spec.block_size, window_tokens, scratch_blocks, tuple(layers), is_dealt, block_bytes, chunk_tokens
    )


def _layer_specs(cache: KVCacheConfig) -> dict[str, tuple[int, KVCacheSpec]]:
    """Return each layer's group and cache spec."""
    found: dict[str, tuple[int, KVCacheSpec]] = {}
    for index, group in enumerate(_transfer_groups(cache)):
        spec = group.kv_cache_spec
        for layer in group.layer_names:
            found[layer] = index, spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    return found


def state_groups(config: VllmConfig) -> int:
    """Return the model's groups of B and C in Mamba-2 layers, 0 if there are none or they differ.

    A layer's own count includes the copies that it makes where there are more ranks than groups (1 group on 4 ranks counts as
    4); only its norm keeps the model's number.
    """
    layers: dict[str, Any] = config.compilation_config.static_forward_context
    mixers = [each for each in layers.values() if any(base.__name__ == "MambaMixer2" for base in type(each).__mro__)]
    found = {int(getattr(getattr(mixer, "norm", None), "n_groups", 0)) for mixer in mixers}
    return found.pop() if len(found) == 1 else 0
