"""Pages of attention layers: plainly strided heads, latent vectors, or a kernel's own order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.cache.documents import AxisEntry
from vllm_adapter.cache.facts import KEYS_BY_CHANNEL, PAIRS_IN_TILES
from vllm_adapter.cache.fields import dense_bytes, make_field, unknown_shape, whole_page

if TYPE_CHECKING:
    from vllm_adapter.cache.documents import FieldDocument
    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["attention_fields", "latent_fields"]


def attention_fields(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Return the fields of an attention page, or of one head's part of it where heads lie apart.

    Raises:
        AdapterError: `unknown-cache-shape`, naming layer, shape and strides.
    """
    if len(cache.shape) != 4:
        raise unknown_shape(cache, "attention caches have the axes block, head, token and content")
    if cache.is_opaque:
        # Only engines with equal pages and the same back end can read each other's.
        packing = f"planes:{cache.backend}:{cache.head_slots or cache.shape[1]}x{cache.shape[2]}x{cache.shape[3]}"
        return whole_page(
            facts, f"cells_{cache.head_slot}" if cache.head_slots else "cells", dense_bytes(cache), packing
        )
    if cache.kernel_order == KEYS_BY_CHANNEL:
        return _keys_by_channel(facts, cache)
    if cache.kernel_order == PAIRS_IN_TILES:
        return _pairs_in_tiles(facts, cache)
    if cache.kernel_order:
        return _kernel_ordered(facts, cache)
    return _packed(facts, cache)


def latent_fields(facts: EngineFacts, cache: LayerCache, page_tokens: int) -> list[FieldDocument]:
    """Return the field of a latent page: one vector per token, or per several tokens, on every rank.

    Some back ends keep the scales of all tokens behind the vectors (DeepSeek V4's 8-bit pages): such a page is opaque.

    A page of the sparse indexer has that shape too, but vLLM's writers (`indexer_k_quant_and_cache`) put the values of all its
    tokens first and their scales after them, and tile the values on ROCm, so its tokens have no separate byte ranges.

    Raises:
        AdapterError: `unknown-cache-shape`, naming layer, shape and strides.
    """
    if len(cache.shape) == 4 and cache.shape[1] == 1:
        vectors, channels, vector_step, channel_step = (*cache.shape[2:], *cache.stride_bytes[2:])
    elif len(cache.shape) == 3:
        vectors, channels, vector_step, channel_step = (*cache.shape[1:], *cache.stride_bytes[1:])
    else:
        raise unknown_shape(cache, "latent caches have the axes block, token and channel")
    if cache.is_indexer:
        packing = f"indexer:{cache.backend}:{page_tokens}:{vectors}x{channels}"
        return whole_page(facts, "index", dense_bytes(cache), packing, is_replicated=True)
    if vectors != page_tokens:
        used = vectors * channels
        axes: list[AxisEntry] = [AxisEntry("interior", used, 0, used, channel_step)]
        return [make_field("latent", cache.element_bytes, 0, axes, f"compressed:{page_tokens}:{vectors}x{channels}")]
    if cache.is_opaque:
        packing = f"latent:{cache.backend}:{page_tokens}:{vectors}x{channels}"
        return whole_page(facts, "latent", dense_bytes(cache), packing, is_replicated=True)
    axes = [
        AxisEntry("token", vectors, 0, vectors, vector_step),
        AxisEntry("channel", channels, 0, channels, channel_step),
    ]
    return [make_field("latent", cache.element_bytes, 0, axes)]


def _head_interval(facts: EngineFacts, cache: LayerCache) -> tuple[int, int, int]:
    """Return (first head, one past the last, heads of the model) of the page; ranks share heads when there are too few.

    A layer may have a head count other than the model's (a draft model's, a global layer's): then each rank holds its own heads.
    """
    held = cache.head_slots or cache.shape[1]
    total = max(facts.total_kv_heads, 1)
    start = facts.tp_rank * total // facts.tp
    stop = max((facts.tp_rank + 1) * total // facts.tp, start + 1)
    if stop - start != held:
        start, stop, total = facts.tp_rank * held, (facts.tp_rank + 1) * held, held * facts.tp
    if cache.head_slots:
        start, stop = start + cache.head_slot, start + cache.head_slot + 1
    return start, stop, total


def _packed(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Per head and token a key and then a value; one opaque cell where a quantized cache packs them."""
    _, _, tokens, content = cache.shape
    _, head_step, token_step, element_step = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache)
    key_size = cache.key_size or facts.head_size
    value_size = cache.value_size or content - key_size
    parts = [("cell", 0, content)]
    if value_size > 0 and key_size + value_size == content:
        parts = [("key", 0, key_size), ("value", key_size * cache.element_bytes, value_size)]
    return [
        make_field(
            name,
            cache.element_bytes,
            offset,
            [
                AxisEntry("token", tokens, 0, tokens, token_step),
                AxisEntry("head", total, start, stop, head_step, "tp"),
                AxisEntry("channel", size, 0, size, element_step),
            ],
        )
        for name, offset, size in parts
    ]


def _keys_by_channel(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Per head the page's keys, tokens innermost, and then its values, channels innermost."""
    _, _, tokens, content = cache.shape
    _, head_step, _, element_step = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache)
    channels = content // 2

    def part(name: str, offset: int, token_step: int, channel_step: int) -> FieldDocument:
        return make_field(
            name,
            cache.element_bytes,
            offset,
            [
                AxisEntry("token", tokens, 0, tokens, token_step),
                AxisEntry("head", total, start, stop, head_step, "tp"),
                AxisEntry("channel", channels, 0, channels, channel_step),
            ],
        )

    # Of a hybrid, the release before describes these pages by its first layer's back end, as token by token: with names of their
    # own they are refused there, and its pages here.
    prefix = "channel_" if facts.has_state else ""
    key = part(f"{prefix}key", 0, element_step, tokens * element_step)
    value_at = tokens * channels * element_step
    return [key, part(f"{prefix}value", value_at, channels * element_step, element_step)]


def _pairs_in_tiles(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Per head the page's keys and then its values, as the matrix kernel ("amx") keeps them; its pages hold 32 * n tokens.

    Keys: tiles of 16 tokens, in each for two channels after two the 16 tokens' pairs of values. Values: columns of 16 channels,
    in each for two tokens after two the 16 channels' pairs. So tokens have bytes of their own in runs of 16 alone, which no unit
    of two such pages cuts. Within a run the strides below do not name the real place of a token or channel.

    Example: heads of 64 channels, a page of 160 tokens. Tokens 32 to 63 are elements 32 * 64 to 64 * 64 of the keys, and of each
    of the 4 columns of 160 * 16 values the elements 32 * 16 to 64 * 16.
    """
    _, _, tokens, content = cache.shape
    _, head_step, _, element_step = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache)
    channels = content // 2
    head = AxisEntry("head", total, start, stop, head_step, "tp")

    def token(step: int) -> AxisEntry:
        return AxisEntry("token", tokens, 0, tokens, step * element_step)

    key = [token(channels), head, AxisEntry("channel", channels, 0, channels, element_step)]
    columns = channels // 16
    column = AxisEntry("column", columns, 0, columns, 16 * tokens * element_step)
    value = [token(16), head, column, AxisEntry("channel", 16, 0, 16, element_step)]
    # Names of their own: an engine with another order has no such fields, and is refused.
    return [
        make_field("tiled_key", cache.element_bytes, 0, key),
        make_field("tiled_value", cache.element_bytes, tokens * channels * element_step, value),
    ]


def _kernel_ordered(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Per head the page's keys and then its values, each in an order that only the same kernel understands."""
    _, _, tokens, content = cache.shape
    _, head_step, _, element_step = cache.stride_bytes
    start, stop, total = _head_interval(facts, cache)
    interior = tokens * content // 2
    packing = f"{cache.kernel_order}:{tokens}"
    return [
        make_field(
            name,
            cache.element_bytes,
            half * interior * cache.element_bytes,
            [
                AxisEntry("head", total, start, stop, head_step, "tp"),
                AxisEntry("interior", interior, 0, interior, element_step),
            ],
            packing,
        )
        for half, name in enumerate(("key", "value"))
    ]
