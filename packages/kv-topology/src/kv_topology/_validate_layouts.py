"""Checks that the layouts of a geometry agree with themselves: axes, fields, and the bytes that fields share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_topology._disjoint import find_shared_byte
from kv_topology._errors import InvalidGeometry
from kv_topology._shown import shown

if TYPE_CHECKING:
    from kv_topology._disjoint import Budget
    from kv_topology._parts import Axis, FieldLayout, Layout

__all__ = ["LIMITS", "check_disjoint", "check_in_range", "check_layout", "refusal"]

LIMITS = {
    "tp": 1 << 12,
    "pp": 1 << 10,
    "devices": 1 << 16,
    "groups": 1 << 10,
    "regions": 1 << 15,
    "members": 1 << 16,
    "axes": 8,
    "axis_size": 1 << 31,
    "page_bytes": 1 << 40,
    "page_count": 1 << 31,
    "compared_fields": 1 << 15,
    "compared_runs": 1 << 17,
    "address": 1 << 64,
}
"""Sizes beyond which a geometry is refused as absurd."""


def refusal(code: str, message: str, **context: object) -> InvalidGeometry:
    """Return the error of that code."""
    return InvalidGeometry(message, code=code, context=context)


def check_in_range(what: str, value: int, low: int, high: int, where: str) -> None:
    """Raise `size-out-of-range` unless it is an integer and low <= value <= high."""
    if type(value) is not int or not low <= value <= high:
        raise refusal(
            "size-out-of-range",
            f"{what} of {where} is {shown(value)}; it must be an integer of {low}..{high}.",
            value=value,
            low=low,
            high=high,
        )


def _check_axis(axis: Axis, where: str) -> None:
    check_in_range(f"axis {axis.name!r} size", axis.size, 1, LIMITS["axis_size"], where)
    if not 0 <= axis.start < axis.stop <= axis.size:
        raise refusal(
            "interval-out-of-range",
            f"Axis {axis.name!r} of {where} holds [{axis.start}, {axis.stop}) of {axis.size} parts; "
            "the interval must be non-empty and inside the axis.",
            start=axis.start,
            stop=axis.stop,
            size=axis.size,
        )
    if axis.split not in {"whole", "tp"}:
        raise refusal("bad-split", f"Axis {axis.name!r} of {where} is split {axis.split!r}; known: whole, tp.")
    if axis.split == "whole" and axis.count != axis.size:
        raise refusal(
            "whole-axis-partial",
            f"Axis {axis.name!r} of {where} is not split, but holds only {axis.count} of {axis.size} parts.",
            count=axis.count,
            size=axis.size,
        )
    check_in_range(f"axis {axis.name!r} stride_bytes", axis.stride_bytes, 1, LIMITS["page_bytes"], where)


def _check_field(field: FieldLayout, where: str) -> None:
    check_in_range("element_bytes", field.element_bytes, 1, LIMITS["page_bytes"], where)
    check_in_range("offset_bytes", field.offset_bytes, 0, LIMITS["page_bytes"], where)
    check_in_range("number of axes", len(field.axes), 0, LIMITS["axes"], where)
    for axis in field.axes:
        _check_axis(axis, where)
    _check_names(field, where)
    _check_strides(field, where)
    token = field.token_axis
    if token is not None and token.split != "whole":
        raise refusal("token-axis-split", f"The token axis of {where} is split {token.split!r}; it must be whole.")
    if field.packing and token is not None:
        raise refusal("packed-token-axis", f"{where} is in the order {field.packing!r} of a kernel, and names tokens.")


def _check_names(field: FieldLayout, where: str) -> None:
    names = [axis.name for axis in field.axes]
    if len(set(names)) != len(names):
        raise refusal("axis-repeated", f"Axis names of {where} repeat: {', '.join(names)}.", names=names)
    if sum(axis.split == "tp" for axis in field.axes) > 1:
        raise refusal("two-split-axes", f"{where} splits more than one axis over tensor-parallel ranks.", names=names)


def _check_strides(field: FieldLayout, where: str) -> None:
    """Raise unless every axis steps over all that lies inside it."""
    extent = field.element_bytes
    for axis in sorted((axis for axis in field.axes if axis.count > 1), key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes < extent:
            raise refusal(
                "strides-overlap",
                f"Axis {axis.name!r} of {where} steps {axis.stride_bytes} bytes over cells of {extent} bytes; "
                "neighbours would share memory.",
                stride_bytes=axis.stride_bytes,
                extent_bytes=extent,
            )
        extent += (axis.count - 1) * axis.stride_bytes


def check_disjoint(fields: list[tuple[str, FieldLayout, int]], where: str, budget: Budget) -> None:
    """Raise unless the fields, each with its offset, keep to different bytes of a page."""
    shared = find_shared_byte([(field, offset) for _, field, offset in fields], budget)
    if shared is not None:
        one, two = fields[shared.first], fields[shared.second]
        raise refusal(
            "fields-overlap",
            f"{one[0]} and {two[0]} share byte {shared.offset_bytes} of the pages of {where}.",
            first=one[0],
            second=two[0],
            offset_bytes=shared.offset_bytes,
        )


def check_layout(layout: Layout, where: str, budget: Budget) -> None:
    """Raise unless the fields of a layout are sound, differ in name, and keep to different bytes."""
    if not layout.fields:
        raise refusal("layout-empty", f"The layout of {where} has no fields.")
    names = [field.name for field in layout.fields]
    if len(set(names)) != len(names):
        raise refusal("field-twice", f"The layout of {where} has a field name twice: {', '.join(names[:8])}.")
    for field in layout.fields:
        _check_field(field, f"field {field.name!r} of {where}")
    check_disjoint([(field.name, field, field.offset_bytes) for field in layout.fields], where, budget)
