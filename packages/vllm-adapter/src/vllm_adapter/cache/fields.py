"""The fields in a page of a cache, in the words of the geometry document, and what all makers of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from vllm_adapter.cache.facts import EngineFacts, LayerCache

__all__ = ["Axis", "Field", "dense_bytes", "make_field", "unknown_shape", "whole_page"]

Axis = list[object]
"""Name, size in the whole model, first index held, one past the last, bytes per step, what splits it."""
Field = dict[str, object]


def make_field(name: str, element_bytes: int, offset_bytes: int, axes: list[Axis], packing: str = "") -> Field:
    """Return a field; `packing` names a kernel's own order of the bytes."""
    return {
        "name": name,
        "element_bytes": element_bytes,
        "offset_bytes": offset_bytes,
        "packing": packing,
        "axes": axes,
    }


def whole_page(
    facts: EngineFacts, name: str, page_bytes: int, packing: str, *, is_replicated: bool = False
) -> list[Field]:
    """Return a page whose inside is not known: it moves as it is, between equal ranks of equally sized engines.

    Args:
        facts: This engine and rank.
        name: What the field is called.
        page_bytes: Bytes that hold data.
        packing: Name of the order inside; both engines must have the same.
        is_replicated: Whether all ranks hold the same bytes, so that the sizes of the engines do not matter.
    """
    interior: Axis = ["interior", page_bytes, 0, page_bytes, 1, "whole"]
    if is_replicated:
        return [make_field(name, 1, 0, [interior], packing)]
    shard: Axis = ["shard", facts.tp, facts.tp_rank, facts.tp_rank + 1, page_bytes, "tp"]
    return [make_field(name, 1, 0, [shard, interior], packing)]


def dense_bytes(cache: LayerCache) -> int:
    """Return the bytes of data in a page of the tensor."""
    total = cache.element_bytes
    for length in cache.shape[1:]:
        total *= length
    return total


def unknown_shape(cache: LayerCache, expected: str) -> AdapterError:
    """Return the refusal of a cache that is not understood."""
    return AdapterError(
        f"layer {cache.layer}: its cache of shape {cache.shape} and strides {cache.stride_bytes} (bytes) is not "
        f"understood: {expected}",
        code="unknown-cache-shape",
        context={"layer": cache.layer, "shape": cache.shape, "stride_bytes": cache.stride_bytes},
    )
