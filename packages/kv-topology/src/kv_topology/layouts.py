"""Describe a tensor that holds pages, from names of its axes: `region("page kv head token channel", tensor)`.

Theory of operation. A pattern names each axis of the tensor, outermost first; parentheses name several axes of the model
that lie in one axis of the tensor, as einops writes them. `_memory_of` tells where the tensor lies and how far apart
its elements are. `page` becomes the region's page stride, `kv` the offsets of its fields, each other axis an `Axis`.

Worked example. A float16 cache of shape (100, 2, 8, 16, 64), dense, named "page kv head token channel". One step along
the axes is 32768, 16384, 2048, 128 and 2 bytes. So a page has 32768 bytes; field `key` begins at byte 0 and `value` at
16384; in both the axes are token (16 of 128 bytes), head (8 of 2048 bytes) and channel (64 of 2 bytes). The value of page 7,
head 3, token 5, channel 0 lies at 7 * 32768 + 16384 + 3 * 2048 + 5 * 128 = 252544 bytes from the start.
"""

from __future__ import annotations

import re
from math import prod
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kv_topology.arithmetic import even_interval
from kv_topology.checks import LIMITS, Budget, check_layout
from kv_topology.errors import InvalidGeometry, demand
from kv_topology.model import TOKEN_AXIS, Axis, FieldLayout, Layout, Member, Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from kv_topology.model import MemoryKind, Split

__all__ = ["region"]

_PAGE, _HEAD = "page", "head"
_KV = "kv"
_WORD = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def region(
    axes: str,
    tensor: object,
    *,
    layer: str = "",
    group: int = 0,
    fields: Sequence[str] = ("key", "value"),
    heads: int | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    **sizes: int,
) -> Region:
    """Return the region of a tensor whose axes are named; nothing is copied and the tensor is not kept.

    Example: a cache of 100 pages of 16 tokens, 8 heads of 64 channels, keys before values in each page::

        >>> import numpy as np
        >>> from kv_topology import Group, RankGeometry
        >>> from kv_topology.layouts import region
        >>> cache = np.zeros((100, 2, 8, 16, 64), dtype=np.float16)
        >>> made = region("page kv head token channel", cache, layer="layers.0")
        >>> made.page_count, made.page_bytes, made.page_stride_bytes
        (100, 32768, 32768)
        >>> [(part.name, part.offset_bytes) for part in made.members[0].layout.fields]
        [('key', 0), ('value', 16384)]
        >>> [(axis.name, axis.stride_bytes) for axis in made.members[0].layout.fields[0].axes]
        [('token', 128), ('head', 2048), ('channel', 2)]
        >>> rank = RankGeometry(tp_size=1, tp_rank=0, groups=(Group("attention", 16),), regions=(made,))

    Any order and any strides will do. Rank 1 of 2 keeps 4 of the 8 heads, each cell a key and then its value, in a
    flat pool of 1600 slots for a token::

        >>> pool = np.zeros((1600, 4, 128), dtype=np.float16)
        >>> half = region("(page token) head (kv channel)", pool, token=16, heads=8, tp_size=2, tp_rank=1)
        >>> half.page_count, [(a.name, a.start, a.stop) for a in half.members[0].layout.fields[0].axes]
        (100, [('token', 0, 16), ('head', 4, 8), ('channel', 0, 64)])

    Latent attention has one field and no `kv`: ``region("page token channel", cache, fields=["latent"])``. A cache that
    keeps keys and values in tensors, or halves of a tensor, of their own is two regions of one layer:
    ``region("page head token channel", cache[0], fields=["key"])`` and the like for values.

    Args:
        axes: A name for each axis of the tensor, outermost first. `page` counts pages and must be there, `kv` counts
            `fields`, `token` the tokens of a page, `head` is dealt out over tensor-parallel ranks; every other axis is
            held whole by each rank. Names in parentheses share one axis of the tensor.
        tensor: A PyTorch tensor, or any object with NumPy's or CUDA's array interface.
        layer: Name of the layer, as peers call it.
        group: KV-cache group of the layer.
        fields: Names of what `kv` counts; one name if there is no `kv`.
        heads: Heads of the whole model; needed if `tp_size` is above 1 and there is an axis `head`.
        tp_size: Tensor-parallel ranks.
        tp_rank: This rank.
        **sizes: Sizes of axes by name: all but one of those that share parentheses. Others are compared.

    Raises:
        InvalidGeometry: `axes-malformed`, `axis-repeated`, `page-axis-missing`, `axes-count`, `axis-size-differs`,
            `fields-count`, `tensor-malformed`, `heads-missing`, `shard-irregular`, `axis-outside-page`,
            `size-out-of-range`, `strides-overlap`, `fields-overlap`, ...
    """
    demand("axes", axes, str)
    demand("fields", fields, list, tuple)
    for name in fields:
        demand("each of fields", name, str)
    for name, size in {"tp_size": tp_size, "tp_rank": tp_rank, **sizes}.items():
        demand(name, size, int)
    demand("heads", heads, int, NoneType)
    memory = _memory_of(tensor)
    element_bytes = memory.view.itemsize
    steps = _read_steps(axes, memory.view, field_count=len(fields), sizes=sizes)
    page, apart = steps.pop(_PAGE, None), steps.pop(_KV, None)
    if page is None:
        raise InvalidGeometry(
            "page-axis-missing", f"{axes!r} has no axis 'page', so it does not say what a block id counts."
        )
    wanted = 1 if apart is None else apart.parts
    if len(fields) != wanted or len(set(fields)) != wanted:
        raise InvalidGeometry(
            "fields-count",
            f"Pages of {axes!r} hold {wanted} fields, and the names {list(fields)} were given; each field needs one of its own.",
            {"fields": list(fields), "wanted": wanted},
        )
    inner: list[Axis] = []
    # In the order of the other layouts: tokens, heads, then the rest as the tensor has them.
    for step in sorted(steps.values(), key=lambda step: {TOKEN_AXIS: 0, _HEAD: 1}.get(step.name, 2)):
        # The stride of an axis with one part is never used, and tensors give it any value.
        stride = step.stride_bytes if step.parts > 1 else element_bytes
        split: Split = "tp" if step.name == _HEAD else "whole"
        inner.append(Axis(step.name, *_held(step, heads, tp_size, tp_rank), stride, split))
    step_bytes = 0 if apart is None else apart.stride_bytes
    layout = Layout(
        tuple(FieldLayout(name, element_bytes, place * step_bytes, tuple(inner)) for place, name in enumerate(fields))
    )
    check_layout(layout, repr(axes), Budget())
    _check_inside_page(axes, page, layout.extent_bytes, (*steps.values(), *([apart] if apart else [])))
    stride = page.stride_bytes if page.parts > 1 else layout.extent_bytes
    member = Member(layer, layout, group)
    return Region(memory.address, layout.extent_bytes, stride, page.parts, (member,), memory.kind, memory.device)


def _held(step: _Step, heads: int | None, tp_size: int, tp_rank: int) -> tuple[int, int, int]:
    """Return (size in the whole model, first part held, one past the last): 4 of 8 heads on rank 1 of 2 are (8, 4, 8)."""
    if step.name != _HEAD:
        return step.parts, 0, step.parts
    if not 0 <= tp_rank < tp_size <= LIMITS["tp"]:
        raise InvalidGeometry(
            "size-out-of-range", f"tp_rank {tp_rank} of tp_size {tp_size} is no rank.", {"value": tp_rank}
        )
    if heads is None and tp_size > 1:
        raise InvalidGeometry(
            "heads-missing",
            f"A rank of {tp_size} holds {step.parts} heads; give the heads of the whole model, "
            "since ranks beyond their number hold copies.",
        )
    whole = step.parts if heads is None else heads
    share = even_interval(whole, tp_size, tp_rank) if whole > 0 else (0, 0)
    if share[1] - share[0] != step.parts:
        raise InvalidGeometry(
            "shard-irregular",
            f"The tensor has {step.parts} heads; the even share of rank {tp_rank} of {tp_size} is "
            f"[{share[0]}, {share[1]}) of {whole}.",
            {"held": step.parts, "expected": share},
        )
    return whole, share[0], share[1]


def _check_inside_page(axes: str, page: _Step, extent_bytes: int, inner: Sequence[_Step]) -> None:
    """Raise unless one page ends before the next one begins."""
    if page.parts > 1 and page.stride_bytes < extent_bytes:
        outer = [step.name for step in inner if step.parts > 1 and step.stride_bytes >= page.stride_bytes]
        raise InvalidGeometry(
            "axis-outside-page",
            f"Pages of {axes!r} are {page.stride_bytes} bytes apart and each spans {extent_bytes}, because of "
            f"{', '.join(outer) or 'their overlap'}. "
            "Make a region of each part that lies outside of the pages, such as tensor[0] and tensor[1].",
            {"page_stride_bytes": page.stride_bytes, "extent_bytes": extent_bytes, "outside": outer},
        )


class _Step(NamedTuple):
    """An axis by its name: how many parts the tensor holds, and how far apart they are."""

    name: str
    parts: int
    stride_bytes: int


def _read_steps(
    axes: str, view: npt.NDArray[np.generic], *, field_count: int, sizes: Mapping[str, int]
) -> dict[str, _Step]:
    """Return the steps of a tensor by name; `field_count` is the parts of `kv` where it shares an axis of the tensor."""
    shape, parsed = view.shape, _parse(axes)
    if len(parsed) != len(shape):
        raise InvalidGeometry(
            "axes-count",
            f"The tensor has {len(shape)} axes, {list(shape)}; {axes!r} names {len(parsed)}.",
            {"shape": list(shape), "named": len(parsed)},
        )
    every = {name for names in parsed for name in names}
    for name, size in sizes.items():
        if name not in every:
            raise InvalidGeometry(
                "axes-malformed", f"{axes!r} has no axis {name!r}, but a size of it was given.", {"name": name}
            )
        if type(size) is not int or size < 1:
            raise InvalidGeometry(
                "size-out-of-range", f"Axis {name!r} of {axes!r} is {size!r}; give 1 or more.", {"value": size}
            )
    steps: dict[str, _Step] = {}
    for names, count, stride_bytes in zip(parsed, shape, view.strides, strict=True):
        known = {_KV: field_count, **sizes} if len(names) > 1 else sizes
        inside = stride_bytes
        for name, each in reversed(_divided(names, count, known)):
            steps[name] = _Step(name, each, inside)
            inside *= each
    return steps


def _parse(axes: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of each axis of the tensor: "(page token) head" gives (("page", "token"), ("head",))."""
    parsed: list[tuple[str, ...]] = []
    for inside, alone, wrong in _WORD.findall(axes):
        names = (alone,) if alone else tuple(inside.split())
        if wrong or not names or not all(map(_NAME.fullmatch, names)):
            raise InvalidGeometry(
                "axes-malformed",
                f"{axes!r} is not a list of axes: use names in small letters, and parentheses around those that share an axis, "
                'such as "(page token) head channel".',
            )
        parsed.append(names)
    every = [name for names in parsed for name in names]
    if len(set(every)) != len(every):
        raise InvalidGeometry("axis-repeated", f"{axes!r} names an axis twice.", {"names": every})
    return tuple(parsed)


def _divided(names: Sequence[str], count: int, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the sizes of axes that share one of `count` parts: 1600 as (page, token) of 16 tokens is 100 and 16."""
    known = {name: sizes[name] for name in names if name in sizes}
    unknown = [name for name in names if name not in sizes]
    if len(unknown) > 1:
        raise InvalidGeometry(
            "axes-malformed",
            f"The sizes of {', '.join(unknown)} do not follow from one axis of {count}; give all but one of them.",
            {"names": unknown},
        )
    size = prod(known.values())
    rest = count // size if unknown else 1
    if count < 1 or rest * size != count:
        raise InvalidGeometry(
            "axis-size-differs",
            f"An axis of {count} of the tensor cannot be ({' '.join(names)}) with the sizes {known}.",
            {"count": count, "names": list(names)},
        )
    return [(name, sizes.get(name, rest)) for name in names]


class _Memory(NamedTuple):
    """Where a tensor lies: a view of it whose elements are never read, its address, and the kind and number of its device."""

    view: npt.NDArray[np.generic]
    address: int
    kind: MemoryKind
    device: int


def _memory_of(tensor: object) -> _Memory:
    """Return where a tensor lies.

    Raises:
        InvalidGeometry: `tensor-malformed` for an object without any of the interfaces, or whose answers make no sense.
    """
    problem = "is not a tensor: it has neither PyTorch's data_ptr(), stride() and element_size() nor an array interface"
    try:
        found = _found(tensor)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        found, problem = None, f"does not say where it lies: {error!r}"
    if found is not None:
        if found.view.itemsize >= 1 and found.address >= 1:
            return found
        problem = (
            f"lies at {found.address} with shape {found.view.shape}, strides {found.view.strides} "
            f"and {found.view.itemsize} bytes an element, which cannot be the memory of a cache"
        )
    raise InvalidGeometry("tensor-malformed", f"A {type(tensor).__name__} {problem}.")


def _found(tensor: Any) -> _Memory | None:  # noqa: ANN401 - known by its methods
    kind: MemoryKind = "DRAM"
    device = 0
    if all(hasattr(tensor, name) for name in ("data_ptr", "stride", "element_size")):
        element_bytes = int(tensor.element_size())
        interface: dict[str, Any] = {
            "data": (int(tensor.data_ptr()), False),
            "shape": tuple(int(count) for count in tensor.shape),
            "strides": tuple(int(step) * element_bytes for step in tensor.stride()),
            "typestr": f"|V{element_bytes}",
            "version": 3,
        }
        kind = "DRAM" if getattr(tensor.device, "type", "cpu") == "cpu" else "VRAM"
        device = int(getattr(tensor.device, "index", None) or 0)
    elif hasattr(tensor, "__cuda_array_interface__"):
        interface, kind = tensor.__cuda_array_interface__, "VRAM"
    elif hasattr(tensor, "__array_interface__"):
        interface = tensor.__array_interface__
    else:
        return None
    return _Memory(np.asarray(SimpleNamespace(__array_interface__=interface)), interface["data"][0], kind, device)
