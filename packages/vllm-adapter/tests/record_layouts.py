"""Record how vLLM allocates KV caches, family by family: shapes, strides and specs, into `data/layouts.json`.

Run it in the host's environment (it imports vLLM and torch; a machine without a GPU will do):

    python packages/vllm-adapter/tests/record_layouts.py [--check]

Each record is made by the host's own code: the attention back end's `customize_spec` and kernel block sizes, the grouping of
layers (`get_kv_cache_groups`), the placement of their tensors (`get_kv_cache_config_from_groups`) and the allocation
(`allocate_kv_cache`), with the cache in ordinary memory. Two back ends cannot be imported without their GPU package;
what the recorder knows of them is transcribed from their source, and the record's `source` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import vllm
from layout_families import FAMILIES, find_backend
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache, select_common_block_size

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

OUTPUT = Path(__file__).parent / "data" / "layouts.json"
BLOCKS = 40
MAX_LINE = 120


def _group_specs(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kernel_blocks(config: KVCacheConfig, backends: dict[str, Any]) -> list[int]:
    """Return tokens per kernel block of each group, by the rule of vLLM's workers (`prepare_kernel_block_sizes`)."""
    found: list[int] = []
    for group in config.kv_cache_groups:
        spec = _group_specs(group.kv_cache_spec)
        is_packed = any(
            tensor.block_stride > tensor.layer_stride
            for tensor in config.kv_cache_tensors
            if not set(tensor.layers).isdisjoint(group.layer_names)
        )
        if isinstance(spec, MambaSpec) or is_packed:
            found.append(spec.block_size)
        else:
            used = list({backends[layer] for layer in group.layer_names})
            given = (spec.block_size, used, [spec] * len(used))  # before 0.32 without the specs
            found.append(select_common_block_size(*given[: len(signature(select_common_block_size).parameters)]))
    return found


def allocate(name: str, tp: int) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the tensors that a rank of a family's engine gets."""
    from vllm import envs
    from vllm.model_executor.layers.mamba import mamba_utils

    family = FAMILIES[name]
    envs.VLLM_SSM_CONV_STATE_LAYOUT = family.get("conv", "DS")
    mamba_utils.is_conv_state_dim_first = lambda: envs.VLLM_SSM_CONV_STATE_LAYOUT == "DS"
    main, _ = find_backend(family["backend"])
    others = {
        "index": find_backend(family["indexer"])[0] if "indexer" in family else main,
        "draft": find_backend(family["draft"])[0] if "draft" in family else main,
    }
    specs: dict[str, KVCacheSpec] = {}
    backends: dict[str, Any] = {}
    for layer, spec in family["specs"](tp).items():
        backends[layer] = others["index" if layer.endswith("index") else "draft"] if (
            layer.endswith("index") or layer.startswith("draft")
        ) else main  # fmt: skip
        specs[layer] = backends[layer].customize_spec(spec) if isinstance(spec, AttentionSpec) else spec
    config = VllmConfig()
    config.cache_config.kv_cache_layout = family.get("layout", "LBHNC")
    config.cache_config.num_gpu_blocks_override = BLOCKS
    groups = planning.get_kv_cache_groups(config, specs)
    cache = planning.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    tensors = allocate_kv_cache(
        cache, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), _kernel_blocks(cache, backends)
    )
    for layer, owner in family.get("shares", {}).items():
        tensors[layer] = tensors[owner]
    return cache, tensors


def _spec_facts(spec: KVCacheSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "class": type(spec).__name__,
        "block_tokens": spec.block_size,
        "page_bytes": spec.page_size_bytes,
    }
    if isinstance(spec, MambaSpec):
        facts["state_shapes"] = [list(shape) for shape in spec.shapes]
        facts["state_element_bytes"] = [dtype.itemsize for dtype in spec.dtypes]
        facts |= {"mamba_type": spec.mamba_type.name, "is_replicated": spec.tp_replicated}
    elif isinstance(spec, AttentionSpec):
        facts |= {"kv_heads": spec.num_kv_heads, "head_size": spec.head_size, "head_size_v": spec.head_size_v}
        facts["has_planes"] = spec.num_head_slots is not None
        if hasattr(spec, "cache_role"):
            facts["cache_role"] = spec.cache_role.name
    if isinstance(spec, SlidingWindowSpec):
        facts["window_tokens"] = spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        facts["chunk_tokens"] = spec.attention_chunk_size
    return facts


def _rank(name: str, tp: int) -> dict[str, Any]:
    cache, tensors = allocate(name, tp)
    groups = [
        {"layers": list(group.layer_names), **_spec_facts(_group_specs(group.kv_cache_spec))}
        for group in cache.kv_cache_groups
    ]
    start = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    found = {
        layer: {
            "offset_bytes": tensor.data_ptr() - start,
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "element_bytes": tensor.element_size(),
        }
        for layer, tensor in tensors.items()
    }
    for group, facts in zip(cache.kv_cache_groups, groups, strict=True):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):  # a layer's own facts, where they are not its group's
            for layer, own in spec.kv_cache_specs.items():
                if {**facts, **_spec_facts(own)} != facts:
                    found[layer]["spec"] = _spec_facts(own)
    return {"blocks": cache.num_blocks, "groups": groups, "tensors": found}


def record(name: str) -> dict[str, Any]:
    """Return the record of one family: facts of the engine, and what a rank holds by tensor-parallel size."""
    family = FAMILIES[name]
    backend, source = find_backend(family["backend"])
    return {
        "backend": backend.get_name(),
        "source": source,
        "layout": family.get("layout", "LBHNC"),
        "conv_order": family.get("conv", "DS"),
        "total_kv_heads": 1 if family.get("mla") else family.get("heads", 4),
        "head_size": 576 if family.get("mla") else family.get("size", 32),
        "tp": {str(tp): _rank(name, tp) for tp in family.get("tp", (1, 2))},
    }


def render(document: dict[str, Any]) -> str:
    """Return JSON with one tensor or group a line, so that a change is easy to review."""

    def lines(value: Any, indent: int) -> str:
        flat = json.dumps(value)
        if not isinstance(value, dict) or len(flat) + indent <= MAX_LINE or "shape" in value or "layers" in value:
            if isinstance(value, list) and len(flat) + indent > MAX_LINE:
                inner = ",\n".join(" " * (indent + 1) + lines(item, indent + 1) for item in value)
                return f"[\n{inner}\n{' ' * indent}]"
            return flat
        inner = ",\n".join(f"{' ' * (indent + 1)}{json.dumps(k)}: {lines(v, indent + 1)}" for k, v in value.items())
        return f"{{\n{inner}\n{' ' * indent}}}"

    return lines(document, 0) + "\n"


def main(arguments: list[str]) -> int:
    """Write the recordings, or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only; exit with 1 if the file is out of date")
    options = parser.parse_args(arguments)
    text = render({"vllm": vllm.__version__, "families": {name: record(name) for name in FAMILIES}})
    if options.check:
        return int(not OUTPUT.exists() or OUTPUT.read_text() != text)
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
