"""Fields of a page: attention and latent caches, and states of state-space layers.

Pages of attention layers hold plainly strided heads, latent vectors, or a kernel's own order. Pages of state layers hold the
convolution's last inputs, and then the recurrent state.

The convolution keeps its projections side by side, each with the channels of this rank's heads or groups. The kind of layer
determines which projections these are (the shapes cannot tell). Its rows are the last few inputs: the host keeps the rows of a
channel together ("DS") or the channels of a row ("SD").
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from vllm_adapter.cache.documents import FieldDocument
from vllm_adapter.cache.facts import KEYS_BY_CHANNEL, PAIRS_IN_TILES
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cache.documents import AxisEntry
    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["attention_fields", "dense_bytes", "extent_bytes", "held_bytes", "latent_fields", "state_fields"]


def _field(name: str, element_bytes: int, offset_bytes: int, axes: list[AxisEntry], packing: str = "") -> FieldDocument:
    """Return a field; `packing` names a kernel's own order of the bytes."""
    return FieldDocument(name=name, element_bytes=element_bytes, offset_bytes=offset_bytes, packing=packing, axes=axes)


def _whole(name: str, count: int, step: int) -> AxisEntry:
    """Return an axis that every rank holds whole."""
    return name, count, 0, count, step, "whole"


def _whole_page(
    facts: EngineFacts, name: str, page_bytes: int, packing: str, *, is_replicated: bool = False
) -> list[FieldDocument]:
    """Return the field of an opaque page: it moves unchanged, between equal ranks of equally sized engines.

    Args:
        facts: This engine and rank.
        name: Name of the field.
        page_bytes: Bytes that hold data.
        packing: Name of the order inside the page, which both engines must share.
        is_replicated: Whether all ranks hold the same bytes, so that the sizes of the engines do not matter.
    """
    interior = _whole("interior", page_bytes, 1)
    if is_replicated:
        return [_field(name, 1, 0, [interior], packing)]
    shard: AxisEntry = ("shard", facts.tp, facts.tp_rank, facts.tp_rank + 1, page_bytes, "tp")
    return [_field(name, 1, 0, [shard, interior], packing)]


def dense_bytes(cache: LayerCache) -> int:
    """Return the bytes of data in a page of the tensor."""
    return cache.element_bytes * prod(cache.shape[1:])


def held_bytes(field: FieldDocument) -> int:
    """Return the bytes of all elements of a field that a rank holds."""
    return field["element_bytes"] * prod(stop - start for _, _, start, stop, _, _ in field["axes"])


def extent_bytes(layout: Sequence[FieldDocument]) -> int:
    """Return the bytes from a layer's place in a page to the end of its last field."""
    return max(
        field["offset_bytes"]
        + sum((stop - start - 1) * step for _, _, start, stop, step, _ in field["axes"])
        + field["element_bytes"]
        for field in layout
    )


def _unknown_shape(cache: LayerCache, expected: str) -> AdapterError:
    """Return the error that refuses a cache of unknown shape."""
    return AdapterError(
        f"layer {cache.layer}: its cache of shape {cache.shape} and strides {cache.stride_bytes} (bytes) is not "
        f"understood: {expected}",
        code="unknown-cache-shape",
        context={"layer": cache.layer, "shape": cache.shape, "stride_bytes": cache.stride_bytes},
    )


def attention_fields(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Return the fields of an attention page, or of one head's part of it where heads lie apart.

    Raises:
        AdapterError: `unknown-cache-shape`, naming layer, shape and strides.
    """
    if len(cache.shape) != 4:
        raise _unknown_shape(cache, "attention caches have the axes block, head, token and content")
    if cache.is_opaque:
        # Only engines with equal pages and the same back end can read each other's.
        packing = f"planes:{cache.backend}:{cache.head_slots or cache.shape[1]}x{cache.shape[2]}x{cache.shape[3]}"
        return _whole_page(
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
        raise _unknown_shape(cache, "latent caches have the axes block, token and channel")
    if cache.is_indexer:
        packing = f"indexer:{cache.backend}:{page_tokens}:{vectors}x{channels}"
        return _whole_page(facts, "index", dense_bytes(cache), packing, is_replicated=True)
    if vectors != page_tokens:
        packing = f"compressed:{page_tokens}:{vectors}x{channels}"
        interior = _whole("interior", vectors * channels, channel_step)
        return [_field("latent", cache.element_bytes, 0, [interior], packing)]
    if cache.is_opaque:
        packing = f"latent:{cache.backend}:{page_tokens}:{vectors}x{channels}"
        return _whole_page(facts, "latent", dense_bytes(cache), packing, is_replicated=True)
    axes = [_whole("token", vectors, vector_step), _whole("channel", channels, channel_step)]
    return [_field("latent", cache.element_bytes, 0, axes)]


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


def _heads(facts: EngineFacts, cache: LayerCache) -> AxisEntry:
    start, stop, total = _head_interval(facts, cache)
    return "head", total, start, stop, cache.stride_bytes[1], "tp"


def _packed(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Per head and token a key and then a value; one opaque cell where a quantized cache packs them."""
    _, _, tokens, content = cache.shape
    _, _, token_step, element_step = cache.stride_bytes
    key_size = cache.key_size or facts.head_size
    value_size = cache.value_size or content - key_size
    parts = [("cell", 0, content)]
    if value_size > 0 and key_size + value_size == content:
        parts = [("key", 0, key_size), ("value", key_size * cache.element_bytes, value_size)]
    outer = [_whole("token", tokens, token_step), _heads(facts, cache)]
    return [
        _field(name, cache.element_bytes, offset, [*outer, _whole("channel", size, element_step)])
        for name, offset, size in parts
    ]


def _halves(
    cache: LayerCache, prefix: str, key: list[AxisEntry], value: list[AxisEntry], packing: str = ""
) -> list[FieldDocument]:
    """Per head the page's keys, and then as many bytes of its values."""
    _, _, tokens, content = cache.shape
    half = tokens * (content // 2) * cache.stride_bytes[3]
    fields = ("key", 0, key), ("value", half, value)
    return [_field(f"{prefix}{name}", cache.element_bytes, offset, axes, packing) for name, offset, axes in fields]


def _keys_by_channel(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """The page's keys have their tokens innermost, its values their channels."""
    _, _, tokens, content = cache.shape
    step, heads, channels = cache.stride_bytes[3], _heads(facts, cache), content // 2
    key = [_whole("token", tokens, step), heads, _whole("channel", channels, tokens * step)]
    value = [_whole("token", tokens, channels * step), heads, _whole("channel", channels, step)]
    # Of a hybrid, the release before describes these pages by its first layer's back end, as token by token: with names of their
    # own they are refused there, and its pages here.
    return _halves(cache, "channel_" if facts.has_state else "", key, value)


def _pairs_in_tiles(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Keys and values as the matrix kernel ("amx") keeps them; its pages hold 32 * n tokens.

    Keys: tiles of 16 tokens, in each for two channels after two the 16 tokens' pairs of values. Values: columns of 16 channels,
    in each for two tokens after two the 16 channels' pairs. So tokens have bytes of their own in runs of 16 alone, which no unit
    of two such pages cuts. Within a run the strides below do not name the real place of a token or channel.

    Example: heads of 64 channels, a page of 160 tokens. Tokens 32 to 63 are elements 32 * 64 to 64 * 64 of the keys, and of each
    of the 4 columns of 160 * 16 values the elements 32 * 16 to 64 * 16.
    """
    _, _, tokens, content = cache.shape
    step, heads, channels = cache.stride_bytes[3], _heads(facts, cache), content // 2
    key = [_whole("token", tokens, channels * step), heads, _whole("channel", channels, step)]
    column = _whole("column", channels // 16, 16 * tokens * step)
    value = [_whole("token", tokens, 16 * step), heads, column, _whole("channel", 16, step)]
    # Names of their own: an engine with another order has no such fields, and is refused.
    return _halves(cache, "tiled_", key, value)


def _kernel_ordered(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Keys and values each in an order that only the same kernel understands."""
    _, _, tokens, content = cache.shape
    axes = [_heads(facts, cache), _whole("interior", tokens * content // 2, cache.stride_bytes[3])]
    return _halves(cache, "", axes, axes, f"{cache.kernel_order}:{tokens}")


_Projection = tuple[str, int, int, int]
"""(name of the field, heads or groups on this rank, those in the model, channels of each) of a projection whose inputs the
convolution keeps, side by side with others. With fewer in the model than ranks, neighbouring ranks hold copies of one."""


def state_fields(facts: EngineFacts, cache: LayerCache) -> list[FieldDocument]:
    """Return the fields of a state page; one whole-page field where the kind of layer is not known.

    Raises:
        AdapterError: `unknown-cache-shape` for a state layer without shapes.
    """
    shapes = cache.state_shapes
    if not shapes:
        raise _unknown_shape(cache, "state layers have the shapes of their states")
    projections = None if cache.is_replicated else _projections(facts, cache)
    if projections is None:
        used = sum(prod(shape) * size for shape, size in zip(shapes, cache.state_element_bytes, strict=True))
        packing = f"state:{cache.state_kind}:{shapes}:{cache.state_element_bytes}".replace(" ", "")
        return _whole_page(facts, "state", used, packing, is_replicated=cache.is_replicated)
    fields, offset = _convolution(facts, cache, projections) if projections else ([], 0)
    if len(shapes) == 2 or not fields:
        fields.append(_recurrent(facts, shapes[-1], cache.state_element_bytes[-1], offset))
    return fields


def _projections(facts: EngineFacts, cache: LayerCache) -> list[_Projection] | None:
    """Return the projections whose inputs the convolution keeps; None for an unknown kind of layer."""
    ranks = tuple(len(shape) for shape in cache.state_shapes)
    channels = max(cache.state_shapes[0])
    if (cache.state_kind, ranks) == ("LINEAR", (3,)):
        return []
    if (cache.state_kind, ranks) == ("SHORT_CONV", (2,)) or (
        (cache.state_kind, ranks) == ("MAMBA1", (2, 2)) and cache.state_shapes[1][0] == channels
    ):
        return [("conv_x", channels, channels * facts.tp, 1)]
    return _grouped_projections(facts, cache, channels) if ranks == (2, 3) else None


def _grouped_projections(facts: EngineFacts, cache: LayerCache, channels: int) -> list[_Projection] | None:
    """Return the projections of a layer whose heads share groups.

    Example: 64 heads of 64 channels, one group, 128 states, on 2 ranks. A rank's convolution has 32 * 64 + 2 * 128 = 2304
    channels, so it holds (2304 - 2048) / (2 * 128) = 1 group: the same one as its neighbour, since the model has one.
    """
    heads, head_dim, state = cache.state_shapes[1]
    groups, rest = divmod(channels - heads * head_dim, 2 * state)
    if groups <= 0 or rest:
        return None
    total_heads, total_groups = heads * facts.tp, groups * facts.tp
    if cache.state_kind == "GDN_ATTN":
        return [
            ("conv_q", groups, total_groups, state),
            ("conv_k", groups, total_groups, state),
            ("conv_v", heads, total_heads, head_dim),
        ]
    if cache.state_kind != "MAMBA2":
        return None
    if facts.state_groups % facts.tp:  # vLLM extends the groups by copies where they do not divide by the ranks
        if groups != 1 or facts.state_groups > facts.tp:
            return None
        total_groups = facts.state_groups
    return [
        ("conv_x", heads, total_heads, head_dim),
        ("conv_b", groups, total_groups, state),
        ("conv_c", groups, total_groups, state),
    ]


def _convolution(
    facts: EngineFacts, cache: LayerCache, projections: list[_Projection]
) -> tuple[list[FieldDocument], int]:
    """Return the fields of the convolution, and the bytes that they take."""
    shape, element_bytes = cache.state_shapes[0], cache.state_element_bytes[0]
    channels, rows = max(shape), min(shape)
    is_channel_first = shape[0] == channels
    channel_step, row_step = (
        (rows * element_bytes, element_bytes) if is_channel_first else (element_bytes, channels * element_bytes)
    )
    fields: list[FieldDocument] = []
    offset = 0
    for name, held, total, width in projections:
        first = facts.tp_rank * total // facts.tp
        group: AxisEntry = ("group", total, first, first + held, width * channel_step, "tp")
        axes = [group, _whole("channel", width, channel_step), _whole("row", rows, row_step)]
        fields.append(_field(name, element_bytes, offset, axes))
        offset += held * width * channel_step
    return fields, channels * rows * element_bytes


def _recurrent(facts: EngineFacts, shape: tuple[int, ...], element_bytes: int, offset: int) -> FieldDocument:
    heads, *inner = shape
    names = (*("channel" for _ in inner[1:]), "state")
    first = facts.tp_rank * heads
    steps = [element_bytes * prod(inner[place:]) for place in range(len(inner) + 1)]
    axes: list[AxisEntry] = [("head", heads * facts.tp, first, first + heads, steps[0], "tp")]
    axes += [_whole(name, length, step) for name, length, step in zip(names, inner, steps[1:], strict=True)]
    return _field("ssm", element_bytes, offset, axes)
