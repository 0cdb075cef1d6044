"""The same layout for another shard or page size: how a peer of the same make lays out its pages.

Theory of operation. In a dense page the stride of an axis is the product of everything that lies inside it. Giving an
inner axis another count therefore scales the strides of all axes outside of it, and nothing else. Fields that follow
each other move up by what the fields before them gained, in the page or, where they share cells (a head's keys, then its
values), in the cell. A layout for which that is not so (fields woven into each other by rows) is refused rather than
guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kv_topology._errors import UnsupportedTopology
from kv_topology._model import Layout
from kv_topology._shards import even_interval

if TYPE_CHECKING:
    from kv_topology._model import Axis, FieldLayout

__all__ = ["reshard_layout"]


def reshard_layout(layout: Layout, *, tp_size: int, tp_rank: int, page_tokens: int, order: str | None = None) -> Layout:
    """Return the layout that another rank of the same make has.

    Args:
        layout: A dense layout of ours.
        tp_size: The other rank's tensor-parallel size.
        tp_rank: The other rank.
        page_tokens: Tokens in its pages; ignored by fields without tokens.
        order: "HN" or "NH" to say whether heads lie outside tokens or inside, None for as it is here.

    Raises:
        UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
    """
    done: list[tuple[FieldLayout, FieldLayout]] = []
    old_end = new_end = 0
    for field in sorted(layout.fields, key=lambda part: part.offset_bytes):
        changed = _reshard_field(field, tp_size, tp_rank, page_tokens, order)
        place = _place_in_cell(field, changed, done[-1]) if done else None
        if place is None and field.offset_bytes < old_end:
            raise UnsupportedTopology(
                f"Field {field.name!r} is woven into {done[-1][0].name!r}, so its place on another shard is unknown.",
                code="layout-not-dense",
                context={"field": field.name, "other": done[-1][0].name},
            )
        changed = replace(changed, offset_bytes=new_end + field.offset_bytes - old_end if place is None else place)
        done.append((field, changed))
        old_end = max(old_end, field.offset_bytes + field.extent_bytes)
        new_end = max(new_end, changed.offset_bytes + changed.extent_bytes)
    by_name = {changed.name: changed for _, changed in done}
    return Layout(tuple(by_name[field.name] for field in layout.fields))


def _place_in_cell(field: FieldLayout, changed: FieldLayout, before: tuple[FieldLayout, FieldLayout]) -> int | None:
    """Return the changed field's offset if it shares cells with the one before (a head's keys, then its values)."""
    old, new = before
    step = field.offset_bytes - old.offset_bytes
    # Axes that step over both fields lead from cell to cell; the others lie inside.
    outside = {axis.name for axis in old.axes if axis.stride_bytes > step}
    if not outside or outside != {axis.name for axis in field.axes if axis.stride_bytes > step}:
        return None
    slack = step - _inside_bytes(old, outside)
    cells = [[axis for axis in part.axes if axis.name in outside] for part in (new, changed)]
    if slack < 0 or cells[0] != cells[1]:
        return None
    return new.offset_bytes + _inside_bytes(new, outside) + slack


def _inside_bytes(field: FieldLayout, outside: set[str]) -> int:
    """Return how many bytes a field spans within one cell."""
    inside = (axis for axis in field.axes if axis.name not in outside)
    return sum((axis.count - 1) * axis.stride_bytes for axis in inside) + field.element_bytes


def _reshard_field(field: FieldLayout, tp_size: int, tp_rank: int, page_tokens: int, order: str | None) -> FieldLayout:
    token = field.token_axis
    changed: dict[str, Axis] = {}
    for axis in field.axes:
        if axis is token:
            changed[axis.name] = replace(axis, size=page_tokens, stop=page_tokens)
        elif axis.split == "tp":
            start, stop = even_interval(axis.size, tp_size, tp_rank)
            changed[axis.name] = replace(axis, start=start, stop=stop)
        else:
            changed[axis.name] = axis
    nest = sorted(field.axes, key=lambda axis: (axis.stride_bytes, axis.count))
    strides = _new_strides(field, nest, changed)
    axes = tuple(replace(changed[axis.name], stride_bytes=strides[axis.name]) for axis in field.axes)
    return _reordered(replace(field, axes=axes), order)


def _new_strides(field: FieldLayout, nest: list[Axis], changed: dict[str, Axis]) -> dict[str, int]:
    """Return the strides after the counts of axes inside have changed; `nest` is innermost first."""
    strides: dict[str, int] = {}
    old, new = 1, 1
    for axis in nest:
        stride, rest = divmod(axis.stride_bytes * new, old)
        if rest:
            raise UnsupportedTopology(
                f"Axis {axis.name!r} of field {field.name!r} steps {axis.stride_bytes} bytes, which is not dense over "
                "the axes inside it.",
                code="layout-not-dense",
                context={"field": field.name, "axis": axis.name, "stride_bytes": axis.stride_bytes},
            )
        strides[axis.name] = stride
        old *= axis.count
        new *= changed[axis.name].count
    return strides


def _reordered(field: FieldLayout, order: str | None) -> FieldLayout:
    """Return the field with heads outside ("HN") or inside ("NH") tokens; to swap them, nothing may lie between."""
    token, head = field.token_axis, field.axis("head")
    if order is None or token is None or head is None:
        return field
    if (head.stride_bytes > token.stride_bytes) == (order == "HN"):
        return field
    cell = min(token.stride_bytes, head.stride_bytes)
    outer, inner = (head, token) if order == "HN" else (token, head)
    is_adjacent = outer.stride_bytes == cell and inner.stride_bytes == cell * outer.count
    if not is_adjacent and min(head.count, token.count) > 1:
        raise UnsupportedTopology(
            f"Field {field.name!r} has something between its heads and its tokens, so they cannot be swapped.",
            code="layout-not-dense",
            context={"field": field.name, "order": order},
        )
    strides = {inner.name: cell, outer.name: cell * inner.count}
    axes = tuple(replace(axis, stride_bytes=strides.get(axis.name, axis.stride_bytes)) for axis in field.axes)
    return replace(field, axes=axes)
