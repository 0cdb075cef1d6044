"""`region`: every element of a tensor lies where NumPy's own indexing finds it, and wrong patterns are refused by name."""

import doctest
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import AttentionShape
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_topology import Group, InvalidGeometry, RankGeometry, layouts
from kv_topology.layouts import region

KINDS = ["<f2", "<f4", "|u1", "<f8"]


@dataclass
class LikeTorch:
    """NumPy memory behind PyTorch's methods; `docs/examples/torch_engine.py` passes real tensors."""

    array: Any
    device: Any = None

    @property
    def shape(self):
        return self.array.shape

    def data_ptr(self):
        return self.array.__array_interface__["data"][0]

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self):
        return self.array.itemsize


@dataclass
class Device:
    type: str
    index: int | None = None


@dataclass
class LikeCuda:
    __cuda_array_interface__: dict[str, Any]


@st.composite
def named_caches(draw):
    """A strided cache: its axes in any order of memory, padded, `page` outermost in memory; names as the tensor has them."""
    names = ["page", *draw(st.permutations(["kv", "token", "head", "channel"]))]
    counts = {name: draw(st.integers(1, 4)) for name in names} | {"kv": 2}
    padded = [counts[name] + draw(st.integers(0, 2)) for name in names]
    full = np.zeros(padded, dtype=draw(st.sampled_from(KINDS)))
    view = full[tuple(slice(counts[name]) for name in names)]
    order = draw(st.permutations(range(5)))
    return [names[place] for place in order], view.transpose(order), counts


def address_in(made, index):
    """Return where the model says that an element lies."""
    (member,) = made.members
    part = member.layout.fields[index["kv"]]
    inside = sum(index[axis.name] * axis.stride_bytes for axis in part.axes)
    return made.base_address + index["page"] * made.page_stride_bytes + member.offset_bytes + part.offset_bytes + inside


@settings(deadline=None)
@given(named_caches())
def test_every_element_lies_where_numpy_finds_it(cache):
    names, array, counts = cache
    made = region(" ".join(names), array, layer="layers.0")
    RankGeometry(1, 0, (Group("attention", counts["token"]),), (made,))  # accepted as it stands
    for place in itertools.product(*(range(counts[name]) for name in names)):
        element = array[(*place, ...)]  # a view without axes: NumPy says where it lies
        assert address_in(made, dict(zip(names, place, strict=True))) == element.__array_interface__["data"][0]


@settings(deadline=None)
@given(named_caches())
def test_a_tensor_with_torchs_methods_gives_the_same_region(cache):
    names, array, _ = cache
    assert region(" ".join(names), LikeTorch(array)) == region(" ".join(names), array)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_parentheses_are_numpys_reshape(pages, tokens, heads, channels):
    split = np.zeros((pages, tokens, heads, 2, channels), dtype="<f2")
    joined = split.reshape(pages * tokens, heads, 2 * channels)
    assert region("(page token) head (kv channel)", joined, token=tokens) == region("page token head kv channel", split)


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_layouts_from_numbers_and_from_a_tensor_agree(tp_rank):
    shape = AttentionShape(kv_heads=8, head_dim=64, page_tokens=16, tp_size=2, tp_rank=tp_rank)
    sharded: dict[str, Any] = {"heads": 8, "tp_size": 2, "tp_rank": tp_rank}
    halves = region("page kv head token channel", np.zeros((9, 2, 4, 16, 64), np.float16), **sharded)
    packed = region("page token head (kv channel)", np.zeros((9, 16, 4, 128), np.float16), **sharded)
    assert halves.members[0].layout == shape.layout("halves-HND")
    assert packed.members[0].layout == shape.layout("packed-NHD")


def test_pages_of_one_field_and_of_a_state():
    latent = region("page token channel", np.zeros((7, 16, 576), np.float16), fields=["latent"])
    assert [part.name for part in latent.members[0].layout.fields] == ["latent"]
    state = region("page channel width", np.zeros((7, 32, 4), np.float32), fields=["conv"], group=1)
    assert (state.page_bytes, state.members[0].group) == (512, 1)


def test_where_memory_lives():
    cache = np.zeros((3, 16, 8), np.float16)

    def latent(tensor):
        return region("page token channel", tensor, fields=["latent"])

    on_device = latent(LikeTorch(cache, Device("cuda", 3)))
    assert (on_device.memory_kind, on_device.device) == ("VRAM", 3)
    on_host = latent(LikeTorch(cache, Device("cpu")))
    assert (on_host.memory_kind, on_host.device) == ("DRAM", 0)
    by_interface = latent(LikeCuda(cache.__array_interface__))
    assert (by_interface.memory_kind, by_interface.page_bytes) == ("VRAM", 256)
    strided = latent(cache[:, ::2])
    assert (strided.page_bytes, strided.page_stride_bytes) == (240, 256)


CACHE = np.zeros((10, 2, 4, 16, 8), np.float16)
REFUSED = [
    ("page kv [head] token channel", CACHE, {}, "axes-malformed"),
    ("page kv head token Channel", CACHE, {}, "axes-malformed"),
    ("page kv head token (channel", CACHE, {}, "axes-malformed"),
    ("page kv head token ()", CACHE, {}, "axes-malformed"),
    ("page kv head token channel", CACHE, {"width": 4}, "axes-malformed"),
    ("(page token) (head channel)", CACHE[0, 0, 0], {"token": 1}, "axes-malformed"),
    ("page kv head token page", CACHE, {}, "axis-repeated"),
    ("block kv head token channel", CACHE, {}, "page-axis-missing"),
    ("page kv head token", CACHE, {}, "axes-count"),
    ("page kv head token channel", CACHE, {"token": 15}, "axis-size-differs"),
    ("(page part) kv head token channel", CACHE, {"part": 3}, "axis-size-differs"),
    ("page kv head token channel", CACHE[:0], {}, "axis-size-differs"),
    ("page kv head token channel", CACHE, {"token": 0}, "size-out-of-range"),
    ("page kv head token channel", CACHE, {"token": True}, "wrong-type"),
    ("page kv head token channel", CACHE, {"fields": ["key"]}, "fields-count"),
    ("page kv head token channel", CACHE, {"fields": ["key", "key"]}, "fields-count"),
    ("page token channel", CACHE[:, 0, 0], {}, "fields-count"),
    ("page kv head token channel", CACHE, {"tp_size": 2}, "heads-missing"),
    ("page kv head token channel", CACHE, {"tp_size": 2, "heads": 6}, "shard-irregular"),
    ("page kv head token channel", CACHE, {"heads": 0}, "shard-irregular"),
    ("page kv head token channel", CACHE, {"tp_size": 2, "tp_rank": 2, "heads": 8}, "size-out-of-range"),
    ("kv page head token channel", np.moveaxis(np.zeros((2, 10, 4, 16, 8)), 0, 0), {}, "axis-outside-page"),
    ("page kv head token channel", CACHE[::-1], {}, "axis-outside-page"),
    ("page kv head token channel", CACHE[:, ::-1], {}, "size-out-of-range"),
    ("page kv head token channel", CACHE[..., ::-1], {}, "size-out-of-range"),
    ("page kv head token channel", np.broadcast_to(CACHE[:, :, :, :1], CACHE.shape), {}, "size-out-of-range"),
    ("page kv head token channel", np.broadcast_to(CACHE[:, :1], CACHE.shape), {}, "fields-overlap"),
    (
        "page head token channel",
        np.lib.stride_tricks.as_strided(CACHE, (3, 4, 16, 8), (2048, 8, 16, 2)),
        {"fields": ["key"]},
        "strides-overlap",
    ),
    ("page token", [[1, 2]], {}, "tensor-malformed"),
    ("page token", LikeTorch(None), {}, "tensor-malformed"),
    ("page token", LikeCuda({"typestr": "<q9", "shape": (1, 2), "data": (8, False)}), {}, "tensor-malformed"),
    ("page token", LikeCuda({"typestr": "<f2", "shape": (1, 2), "data": (0, False)}), {}, "tensor-malformed"),
    ("page token", LikeCuda({"typestr": "<f2", "shape": (1, 2)}), {}, "tensor-malformed"),
]


@pytest.mark.parametrize(("axes", "tensor", "options", "code"), REFUSED)
def test_refusals(axes, tensor, options, code):
    with pytest.raises(InvalidGeometry) as caught:
        region(axes, tensor, **options)
    assert (caught.value.code, caught.value.fault, caught.value.is_retry_safe) == (code, "local", False)


def test_keys_and_values_in_tensors_of_their_own_are_two_regions():
    cache = np.zeros((2, 10, 4, 16, 8), np.float16)
    with pytest.raises(InvalidGeometry, match=r"because of kv\..*tensor\[0\]"):
        region("kv page head token channel", cache)
    both = tuple(
        region("page head token channel", half, layer="a", fields=[name])
        for name, half in zip(("key", "value"), cache, strict=True)
    )
    made = RankGeometry(1, 0, (Group("attention", 16),), both)
    assert [name for layer in made.own_layers for name in layer.fields] == ["key", "value"]


@settings(deadline=None)
@given(st.text(alphabet="pagektv ()h-1", max_size=24), st.integers(0, 4))
def test_any_pattern_is_read_or_refused_with_a_code(axes, depth):
    try:
        region(axes, np.zeros((2,) * depth, np.float16), fields=["key"])
    except InvalidGeometry as error:
        assert error.code


def test_the_examples_of_the_docstring():
    assert doctest.testmod(layouts) == doctest.TestResults(failed=0, attempted=12)
