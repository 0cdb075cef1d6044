"""Layouts of the attention caches that exist, from a handful of model numbers.

Every constructor returns a `Layout` for one layer on one rank. Sizes are the whole model's; the rank's share of the
heads follows from `tp_size` and `tp_rank`. Letters name axes from the outermost in memory: B block, H head, N token,
C content.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from kv_topology._errors import InvalidGeometry
from kv_topology._model import TOKEN_AXIS, Axis, FieldLayout, Layout, Member, RankGeometry, Region
from kv_topology._shards import even_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._model import Group

__all__ = [
    "AttentionShape",
    "PageOrder",
    "cells_layout",
    "cpu_layout",
    "halves_layout",
    "keys_by_channel_layout",
    "layer_regions",
    "mla_layout",
    "packed_layout",
    "rank_geometry",
    "split_layouts",
]

PageOrder = Literal["HND", "NHD"]


@final
@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers of one attention layer and of the rank that holds a share of it.

    Attributes:
        kv_heads: KV heads of the whole model.
        head_dim: Elements of a key or value of one head.
        page_tokens: Tokens in a page (the kernel's block).
        element_bytes: Bytes of an element.
        tp_size: Tensor-parallel ranks.
        tp_rank: This rank.
    """

    kv_heads: int
    head_dim: int
    page_tokens: int
    element_bytes: int = 2
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def interval(self) -> tuple[int, int]:
        """Heads that the rank holds."""
        return even_interval(self.kv_heads, self.tp_size, self.tp_rank)

    @property
    def heads(self) -> int:
        """Number of heads that the rank holds."""
        start, stop = self.interval
        return stop - start

    @property
    def content_bytes(self) -> int:
        """Bytes of one key (or value) of one head and token."""
        return self.head_dim * self.element_bytes

    @property
    def half_bytes(self) -> int:
        """Bytes of the keys (or values) of one page."""
        return self.heads * self.page_tokens * self.content_bytes


def _kv_field(name: str, shape: AttentionShape, offset: int, head_stride: int, token_stride: int) -> FieldLayout:
    start, stop = shape.interval
    return FieldLayout(
        name,
        shape.element_bytes,
        offset,
        (
            Axis(TOKEN_AXIS, shape.page_tokens, 0, shape.page_tokens, token_stride),
            Axis("head", shape.kv_heads, start, stop, head_stride, "tp"),
            Axis("channel", shape.head_dim, 0, shape.head_dim, shape.element_bytes),
        ),
    )


def _strides(shape: AttentionShape, order: PageOrder, content: int) -> tuple[int, int]:
    """Return (head stride, token stride) of cells of `content` bytes."""
    if order == "HND":
        return shape.page_tokens * content, content
    if order == "NHD":
        return content, shape.heads * content
    raise InvalidGeometry(f"Page order is {order!r}; known: HND, NHD.", code="bad-page-order")


def packed_layout(
    shape: AttentionShape,
    order: PageOrder = "HND",
    *,
    head_stride_bytes: int | None = None,
    token_stride_bytes: int | None = None,
) -> Layout:
    """Return a page whose cells hold a head's key and then its value (vLLM from 0.27: LBHNC is HND, LBNHC is NHD).

    Args:
        shape: The layer's numbers.
        order: Order of memory.
        head_stride_bytes: Bytes from one head to the next, for views with strides of their own.
        token_stride_bytes: Bytes from one token to the next, likewise.
    """
    head, token = _strides(shape, order, 2 * shape.content_bytes)
    head = head if head_stride_bytes is None else head_stride_bytes
    token = token if token_stride_bytes is None else token_stride_bytes
    return Layout(
        (_kv_field("key", shape, 0, head, token), _kv_field("value", shape, shape.content_bytes, head, token))
    )


def cells_layout(
    kv_heads: int,
    page_tokens: int,
    content_bytes: int,
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    head_stride_bytes: int | None = None,
    token_stride_bytes: int | None = None,
) -> Layout:
    """Return a page of cells (head, token) whose contents are opaque: any mix of keys, values and scales.

    This is the view (block, head, token, content) that vLLM gives of every attention cache from 0.27 on. Both sides
    must use it for a layer, and agree on the content.

    Args:
        kv_heads: KV heads of the whole model.
        page_tokens: Tokens in a page.
        content_bytes: Bytes of a cell.
        tp_size: Tensor-parallel ranks.
        tp_rank: This rank.
        head_stride_bytes: Bytes from one head to the next; heads outermost and dense by default.
        token_stride_bytes: Bytes from one token to the next; a cell by default.
    """
    start, stop = even_interval(kv_heads, tp_size, tp_rank)
    token = content_bytes if token_stride_bytes is None else token_stride_bytes
    head = page_tokens * content_bytes if head_stride_bytes is None else head_stride_bytes
    axes = (
        Axis(TOKEN_AXIS, page_tokens, 0, page_tokens, token),
        Axis("head", kv_heads, start, stop, head, "tp"),
        Axis("content", content_bytes, 0, content_bytes, 1),
    )
    return Layout((FieldLayout("cell", 1, 0, axes),))


def halves_layout(shape: AttentionShape, order: PageOrder = "HND") -> Layout:
    """Return a page whose first half is keys and whose second half is values (blocks first)."""
    head, token = _strides(shape, order, shape.content_bytes)
    return Layout((_kv_field("key", shape, 0, head, token), _kv_field("value", shape, shape.half_bytes, head, token)))


def split_layouts(shape: AttentionShape, order: PageOrder = "HND") -> tuple[Layout, Layout]:
    """Return the layouts of a key page and of a value page, for caches that keep them in two regions."""
    head, token = _strides(shape, order, shape.content_bytes)
    return Layout((_kv_field("key", shape, 0, head, token),)), Layout((_kv_field("value", shape, 0, head, token),))


def keys_by_channel_layout(shape: AttentionShape) -> Layout:
    """Return a page that holds, head by head, the keys channel by channel and then the values token by token.

    Source: the pages that vLLM's CPU kernels for vector instructions ("vec", "vec16") write.
    """
    start, stop = shape.interval
    half = shape.page_tokens * shape.content_bytes
    size = shape.element_bytes

    def part(name: str, offset: int, token_stride: int, channel_stride: int) -> FieldLayout:
        axes = (
            Axis(TOKEN_AXIS, shape.page_tokens, 0, shape.page_tokens, token_stride),
            Axis("head", shape.kv_heads, start, stop, 2 * half, "tp"),
            Axis("channel", shape.head_dim, 0, shape.head_dim, channel_stride),
        )
        return FieldLayout(name, size, offset, axes)

    key = part("key", 0, size, shape.page_tokens * size)
    return Layout((key, part("value", half, shape.content_bytes, size)))


def cpu_layout(shape: AttentionShape, kernel_order: str) -> Layout:
    """Return a page in a kernel's own order: per head the page's keys, then its values, each in that order.

    Heads can be told apart, tokens cannot: the kernel interleaves tokens and channels to suit the instruction set, so
    both sides must use the same instruction set and block size.

    Args:
        shape: The layer's numbers.
        kernel_order: Name of the kernel's order, such as "amx".
    """
    start, stop = shape.interval
    interior = shape.page_tokens * shape.head_dim
    half = interior * shape.element_bytes

    def part(name: str, offset: int) -> FieldLayout:
        axes = (
            Axis("head", shape.kv_heads, start, stop, 2 * half, "tp"),
            Axis("interior", interior, 0, interior, shape.element_bytes),
        )
        return FieldLayout(name, shape.element_bytes, offset, axes, f"vllm-cpu:{kernel_order}:{shape.page_tokens}")

    return Layout((part("key", 0), part("value", half)))


def mla_layout(latent_dim: int, page_tokens: int, element_bytes: int = 2, *, field: str = "latent") -> Layout:
    """Return a page of latent attention (MLA): one vector per token that every rank holds.

    The keys of a sparse-attention indexer lie alike: `mla_layout(index_dim, page_tokens, 1, field="index")`.

    Args:
        latent_dim: Elements per token: kv_lora_rank + qk_rope_head_dim.
        page_tokens: Tokens in a page.
        element_bytes: Bytes of an element.
        field: Name of the vector.
    """
    axes = (
        Axis(TOKEN_AXIS, page_tokens, 0, page_tokens, latent_dim * element_bytes),
        Axis("channel", latent_dim, 0, latent_dim, element_bytes),
    )
    return Layout((FieldLayout(field, element_bytes, 0, axes),))


def layer_regions(
    layers: Sequence[str],
    layout: Layout,
    *,
    base_address: int,
    page_count: int,
    group: int = 0,
    page_bytes: int | None = None,
    page_stride_bytes: int | None = None,
    gap_bytes: int = 0,
) -> tuple[Region, ...]:
    """Return one region per layer, one after the other in memory.

    Args:
        layers: Layer names.
        layout: Fields that each page holds.
        base_address: Address of the first layer's page 0.
        page_count: Pages per layer.
        group: KV-cache group of the layers.
        page_bytes: Usable bytes of a page where it is padded beyond its fields.
        page_stride_bytes: Distance between pages; `page_bytes` when left out.
        gap_bytes: Unused bytes between layers.
    """
    page = layout.extent_bytes if page_bytes is None else page_bytes
    stride = page if page_stride_bytes is None else page_stride_bytes
    step = stride * page_count + gap_bytes
    return tuple(
        Region(base_address + number * step, page, stride, page_count, (Member(layer, layout, group),))
        for number, layer in enumerate(layers)
    )


def rank_geometry(
    groups: Sequence[Group], regions: Sequence[Region], *, tp_size: int = 1, tp_rank: int = 0
) -> RankGeometry:
    """Return the geometry of a rank without pipeline stages, its groups' context ranks set from `tp_rank`."""
    dealt = tuple(
        replace(group, deal=replace(group.deal, rank=tp_rank % group.deal.size)) if group.deal.size > 1 else group
        for group in groups
    )
    return RankGeometry(tp_size, tp_rank, dealt, tuple(regions))
