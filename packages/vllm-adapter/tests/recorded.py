"""Engines made of recorded cache layouts (`data/layouts.json`, written by `record_layouts.py` from vLLM's own allocation)."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

from byte_oracle.oracle import Request
from factories import facts

from kv_topology import BlockList
from vllm_adapter.cache.documents import GeometryDocument
from vllm_adapter.cache.facts import KEYS_BY_CHANNEL, CacheGroup, EngineFacts, GroupKind, LayerCache
from vllm_adapter.cache.geometry import local_document

LAYOUTS = Path(__file__).parent / "data" / "layouts.json"
Rank = tuple[int, int]


@lru_cache(maxsize=1)
def families() -> dict[str, dict[str, Any]]:
    """Return all recorded families by name."""
    found: dict[str, dict[str, Any]] = json.loads(LAYOUTS.read_text())["families"]
    return found


def spec_of(rank: dict[str, Any], layer: str) -> dict[str, Any] | None:
    """Return a layer's cache spec: its own or its group's; None for a layer that uses another one's cache."""
    own: dict[str, Any] | None = rank["tensors"][layer].get("spec")
    return own or next((group for group in rank["groups"] if layer in group["layers"]), None)


def is_state(group: dict[str, Any]) -> bool:
    """Whether a request has one block of the group, whatever its length."""
    return group["class"] in {"MambaSpec", "CircularBufferSpec"}


def _group(recorded: dict[str, Any]) -> CacheGroup:
    kinds: dict[str, GroupKind] = {
        "MambaSpec": "state",
        "CircularBufferSpec": "state",
        "SlidingWindowSpec": "sliding-window",
        "SlidingWindowMLASpec": "sliding-window",
        "MLAAttentionSpec": "latent",
    }
    kind = kinds.get(recorded["class"], "attention")
    return CacheGroup(
        kind,
        recorded["block_tokens"],
        recorded.get("window_tokens", 0),
        0,
        tuple(recorded["layers"]),
        chunk_tokens=recorded.get("chunk_tokens", 0),
    )


def engine_facts(name: str, tp: int, tp_rank: int) -> EngineFacts:
    """Return what the adapter knows of a recorded engine's rank."""
    family = families()[name]
    rank = family["tp"][str(tp)]
    groups = tuple(_group(group) for group in rank["groups"])
    return facts(
        tp=tp,
        rank=tp_rank,
        heads=family["total_kv_heads"],
        blocks=rank["blocks"],
        head_size=family["head_size"],
        layout=family["layout"],
        attention_backend=family["backend"],
        groups=groups,
        state_groups=_state_groups(name),
    )


def _state_groups(name: str) -> int:
    """Return the model's groups of B and C, which one rank alone holds without copies; 0 without Mamba-2 layers."""
    rank = families()[name]["tp"]["1"]
    for layer in rank["tensors"]:
        spec = spec_of(rank, layer)
        if spec is not None and spec.get("mamba_type") == "MAMBA2":
            heads, head_dim, state = spec["state_shapes"][1]
            return (max(spec["state_shapes"][0]) - heads * head_dim) // (2 * state)
    return 0


def layer_caches(name: str, tp: int, address: int) -> list[LayerCache]:
    """Return the caches of a rank of a recorded family as the host seam describes them, allocated at `address`."""
    family = families()[name]
    return rank_caches(family["tp"][str(tp)], address, family["backend"])


def rank_caches(rank: dict[str, Any], address: int, backend: str) -> list[LayerCache]:
    """Return a recorded rank's caches as the host seam describes them, allocated at `address`."""
    group_of = {layer: number for number, group in enumerate(rank["groups"]) for layer in group["layers"]}
    return [
        LayerCache(
            layer=layer,
            group=group_of[layer],
            address=address + tensor["offset_bytes"],
            shape=tuple(tensor["shape"]),
            stride_bytes=tuple(step * tensor["element_bytes"] for step in tensor["stride"]),
            element_bytes=tensor["element_bytes"],
            memory_kind="DRAM",
            device=0,
            page_bytes=spec["page_bytes"],
            **_spec_facts(tensor, spec),
            backend=backend,
            kernel_order=KEYS_BY_CHANNEL if backend == "CPU_ATTN" else "",
            is_opaque=bool(spec.get("has_planes")),
        )
        for layer, tensor in rank["tensors"].items()
        if (spec := spec_of(rank, layer)) is not None
    ]


def _spec_facts(tensor: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Return what the host seam reads off a layer's spec."""
    if spec["class"] == "CircularBufferSpec":
        shape = tuple(tensor["shape"][1:])
        return {"state_shapes": (shape,), "state_element_bytes": (tensor["element_bytes"],), "state_kind": "RING"}
    if spec["class"] == "MambaSpec":
        return {
            "state_shapes": tuple(tuple(shape) for shape in spec["state_shapes"]),
            "state_element_bytes": tuple(spec["state_element_bytes"]),
            "state_kind": spec["mamba_type"],
            "is_replicated": spec["is_replicated"],
        }
    if "MLA" in spec["class"]:
        return {"is_latent": True, "is_indexer": spec.get("cache_role") == "INDEXER"}
    return {"key_size": spec["head_size"], "value_size": spec["head_size_v"]}


def engine(name: str, tp: int, address: int) -> dict[Rank, GeometryDocument]:
    """Return the geometry documents of all ranks of a recorded engine; each rank has its own memory."""
    return {
        (0, rank): local_document(engine_facts(name, tp, rank), layer_caches(name, tp, address + (rank << 32)))
        for rank in range(tp)
    }


def request(consumer: str, producer: str) -> Request:
    """Return a request that ends a token into its last blocks; no two groups share a block, as in the host."""
    rows = [families()[name]["tp"]["1"]["groups"] for name in (consumer, producer)]
    tokens = math.lcm(*(g["block_tokens"] for row in rows for g in row if not is_state(g))) + 1
    sides: list[list[BlockList]] = []
    for row, first in zip(rows, (1, 2), strict=True):
        free = iter(range(first, 1 << 20, 2))
        counts = [1 if is_state(group) else -(-tokens // group["block_tokens"]) for group in row]
        sides.append([BlockList([next(free) for _ in range(count)][::-1], null=0) for count in counts])
    return Request(sides[0], sides[1], tokens)
