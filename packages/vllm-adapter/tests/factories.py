"""Values that the tests of this package share: an engine's facts and caches without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facts import facts as facts_of

from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache

ELEMENT_BYTES = 4
HEAD_SIZE = 64
TOKENS = 128


def write_secret(file: Path, content: bytes, mode: int = 0o440) -> str:
    """Replace a file, as a mounted secret is replaced; return its path."""
    fresh = file.with_suffix(".fresh")
    fresh.unlink(missing_ok=True)
    fresh.write_bytes(content)
    fresh.chmod(mode)
    fresh.replace(file)
    return str(file)


def facts(
    *, tp: int = 1, rank: int = 0, heads: int = 4, blocks: int = 64, engine_id: str = "engine", **changes: Any
) -> EngineFacts:
    values: dict[str, Any] = {
        "tp": tp,
        "tp_rank": rank,
        "total_kv_heads": heads,
        "head_size": HEAD_SIZE,
        "block_count": blocks,
        "attention_backend": "FLASH_ATTN",
        "groups": (CacheGroup("attention", TOKENS, 0, 0, ("layers.0", "layers.1")),),
        "factors": {"model": "tiny"},
    }
    return facts_of(engine_id, **{**values, **changes})


def attention_caches(**changes: Any) -> list[LayerCache]:
    """The caches of the two layers of `facts()`, at addresses where nothing is."""
    return [attention_cache(f"layers.{number}", address=(1 + number) << 40, **changes) for number in (0, 1)]


def attention_cache(
    layer: str, *, address: int, heads: int = 4, blocks: int = 64, tokens: int = TOKENS, group: int = 0
) -> LayerCache:
    """A layer's cache of shape (block, head, token, key|value), head-major and dense."""
    content = 2 * HEAD_SIZE
    shape = (blocks, heads, tokens, content)
    strides = (heads * tokens * content, tokens * content, content, 1)
    return LayerCache(
        layer=layer,
        group=group,
        address=address,
        shape=shape,
        stride_bytes=tuple(step * ELEMENT_BYTES for step in strides),
        element_bytes=ELEMENT_BYTES,
        memory_kind="DRAM",
        device=0,
        page_bytes=heads * tokens * content * ELEMENT_BYTES,
    )
