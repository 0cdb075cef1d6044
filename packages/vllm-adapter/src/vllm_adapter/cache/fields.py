"""Fields in the pages of a cache, as the geometry document lists them, and shared helpers that build fields."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from vllm_adapter.cache.documents import AxisEntry, FieldDocument
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["dense_bytes", "extent_bytes", "held_bytes", "make_field", "unknown_shape", "whole_page"]


def make_field(
    name: str, element_bytes: int, offset_bytes: int, axes: list[AxisEntry], packing: str = ""
) -> FieldDocument:
    """Return a field; `packing` names a kernel's own order of the bytes."""
    return FieldDocument(name=name, element_bytes=element_bytes, offset_bytes=offset_bytes, packing=packing, axes=axes)


def whole_page(
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
    interior = AxisEntry("interior", page_bytes, 0, page_bytes, 1)
    if is_replicated:
        return [make_field(name, 1, 0, [interior], packing)]
    shard = AxisEntry("shard", facts.tp, facts.tp_rank, facts.tp_rank + 1, page_bytes, "tp")
    return [make_field(name, 1, 0, [shard, interior], packing)]


def dense_bytes(cache: LayerCache) -> int:
    """Return the bytes of data in a page of the tensor."""
    return cache.element_bytes * prod(cache.shape[1:])


def held_bytes(field: FieldDocument) -> int:
    """Return the bytes of all elements of a field that a rank holds."""
    return field["element_bytes"] * prod(axis.stop - axis.start for axis in field["axes"])


def extent_bytes(layout: Sequence[FieldDocument]) -> int:
    """Return the bytes from a layer's place in a page to the end of its last field."""
    return max(
        field["offset_bytes"]
        + sum((axis.stop - axis.start - 1) * axis.stride_bytes for axis in field["axes"])
        + field["element_bytes"]
        for field in layout
    )


def unknown_shape(cache: LayerCache, expected: str) -> AdapterError:
    """Return the error that refuses a cache of unknown shape."""
    return AdapterError(
        f"layer {cache.layer}: its cache of shape {cache.shape} and strides {cache.stride_bytes} (bytes) is not "
        f"understood: {expected}",
        code="unknown-cache-shape",
        context={"layer": cache.layer, "shape": cache.shape, "stride_bytes": cache.stride_bytes},
    )
