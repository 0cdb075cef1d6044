"""Read the names of a tensor's axes, einops-style: "(page token) head channel" and a tensor of (1600, 8, 64) give four steps.

Worked example. A dense float16 tensor of (1600, 8, 64) has strides of 1024, 128 and 2 bytes. Of its first axis, 16 parts are
tokens of one page, so 1600 // 16 = 100 are pages: token has 16 parts 1024 bytes apart, page 100 parts 16384 bytes apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, final

from kv_topology._validate_layouts import refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KV", "Step", "read_steps"]

KV = "kv"
_WORD = re.compile(r"\(([^()]*)\)|([^\s()]+)|(\S)")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@final
@dataclass(frozen=True, slots=True)
class Step:
    """An axis by its name: how many parts the tensor holds, and how far apart they are."""

    name: str
    count: int
    stride_bytes: int


def read_steps(
    axes: str,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    *,
    field_count: int,
    sizes: Mapping[str, int],
) -> dict[str, Step]:
    """Return the steps of a tensor by name.

    Args:
        axes: The pattern.
        shape: Parts of each axis of the tensor.
        strides_bytes: Distance of neighbours along each.
        field_count: Parts of `kv` where it shares an axis of the tensor.
        sizes: Sizes that the caller gives, by name.
    """
    parsed = _parse(axes)
    if len(parsed) != len(shape):
        raise refusal(
            "axes-count",
            f"The tensor has {len(shape)} axes, {list(shape)}; {axes!r} names {len(parsed)}.",
            shape=list(shape),
            named=len(parsed),
        )
    _check_sizes(axes, {name for names in parsed for name in names}, sizes)
    steps: dict[str, Step] = {}
    for names, count, stride_bytes in zip(parsed, shape, strides_bytes, strict=True):
        known = {KV: field_count, **sizes} if len(names) > 1 else sizes
        inside = stride_bytes
        for name, each in reversed(_divided(names, count, known)):
            steps[name] = Step(name, each, inside)
            inside *= each
    return steps


def _parse(axes: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of each axis of the tensor: "(page token) head" gives (("page", "token"), ("head",))."""
    parsed = tuple(_names(axes, *found) for found in _WORD.findall(axes))
    every = [name for names in parsed for name in names]
    if len(set(every)) != len(every):
        raise refusal("axis-repeated", f"{axes!r} names an axis twice.", names=every)
    return parsed


def _names(axes: str, inside: str, alone: str, wrong: str) -> tuple[str, ...]:
    names = (alone,) if alone else tuple(inside.split())
    if wrong or not names or not all(map(_NAME.fullmatch, names)):
        raise refusal(
            "axes-malformed",
            f"{axes!r} is no list of axes: use names in small letters, and parentheses around those that share an axis, "
            'such as "(page token) head channel".',
        )
    return names


def _check_sizes(axes: str, names: set[str], sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if name not in names:
            raise refusal("axes-malformed", f"{axes!r} has no axis {name!r}, of which a size was given.", name=name)
        if type(size) is not int or size < 1:
            raise refusal("size-out-of-range", f"Axis {name!r} of {axes!r} is {size!r}; give 1 or more.", value=size)


def _divided(names: Sequence[str], count: int, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the sizes of axes that share one of `count` parts: 1600 as (page, token) of 16 tokens is 100 and 16."""
    known = {name: sizes[name] for name in names if name in sizes}
    unknown = [name for name in names if name not in sizes]
    if len(unknown) > 1:
        raise refusal(
            "axes-malformed",
            f"The sizes of {', '.join(unknown)} do not follow from one axis of {count}; give all but one of them.",
            names=unknown,
        )
    told = prod(known.values())
    rest = count // told if unknown else 1
    if count < 1 or rest * told != count:
        raise refusal(
            "axis-size-differs",
            f"An axis of {count} of the tensor cannot be ({' '.join(names)}) with the sizes {known}.",
            count=count,
            names=list(names),
        )
    return [(name, sizes.get(name, rest)) for name in names]
