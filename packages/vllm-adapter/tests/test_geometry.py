"""Geometry documents: what the planner makes of them, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from factories import attention_cache, attention_caches, facts

from kv_topology import from_document
from vllm_adapter.cache.geometry import local_document, registration_ranges
from vllm_adapter.errors import AdapterError

PAGE = 4 * 128 * 128 * 4


def test_layers_side_by_side_in_one_allocation_are_registered_once() -> None:
    stride = 2 * PAGE
    caches = [
        dataclasses.replace(
            attention_cache(f"layers.{n}", address=0x10000 + n * PAGE),
            stride_bytes=(stride, *attention_cache("x", address=0).stride_bytes[1:]),
        )
        for n in range(2)
    ]
    assert registration_ranges(caches) == ((0x10000, 64 * stride, 0, "DRAM"),)
    geometry = from_document(local_document(facts(), caches))
    assert [region.page_stride_bytes for region in geometry.regions] == [stride, stride]


def test_separate_allocations_are_registered_apart() -> None:
    assert [length for _, length, _, _ in registration_ranges(attention_caches())] == [64 * PAGE, 64 * PAGE]


@pytest.mark.parametrize("shape", [(64, 4, 128), (64, 4, 128, 128, 2)])
def test_an_unknown_shape_is_refused_with_its_numbers(shape: tuple[int, ...]) -> None:
    cache = dataclasses.replace(attention_caches()[0], shape=shape, stride_bytes=tuple(4 for _ in shape))
    with pytest.raises(AdapterError, match=r"layers\.0") as caught:
        local_document(facts(), [cache])
    assert caught.value.code == "unknown-cache-shape"
    assert caught.value.context["shape"] == shape


def test_an_engine_without_a_cache_is_refused() -> None:
    with pytest.raises(AdapterError) as caught:
        local_document(facts(), [])
    assert caught.value.code == "no-cache-layers"


def test_a_group_names_the_types_of_its_elements_once_and_none_of_one_byte() -> None:
    types = (("torch.float32",), ("torch.bfloat16",), ("torch.bfloat16",), ())
    caches = [dataclasses.replace(attention_caches()[0], layer=f"l{n}", element_types=t) for n, t in enumerate(types)]
    (group,) = local_document(facts(), caches)["groups"]
    assert group.get("element_types") == [["torch.bfloat16"], ["torch.float32"]]
