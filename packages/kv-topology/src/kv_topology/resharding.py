"""Layouts and geometries of another rank of the same make: another shard, another page size.

Theory of operation. In a dense page the stride of an axis is the product of everything that lies inside it. Giving an
inner axis another count therefore scales the strides of all axes outside of it, and nothing else. A field behind others
moves by as many bytes as those have grown or shrunk: in the page, or, where fields share cells (a head's keys, then its
values), in the cell. A layout for which that is not so (fields woven into each other by rows) is refused.

Worked example. A page holds the keys of 4 heads, 16 tokens each, 8 bytes a cell, then the values. A token steps 8 bytes, a
head 16 * 8 = 128; the keys take 4 * 128 = 512 bytes, so the values begin at 512. On a rank with 2 heads and pages of 32
tokens a token steps 8 bytes, a head 256; the keys take 2 * 256 = 512 bytes again.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from types import NoneType
from typing import TYPE_CHECKING, Literal

from kv_topology.arithmetic import TokenDeal, even_interval
from kv_topology.checks import LIMITS, check_in_range
from kv_topology.document import from_document, to_document
from kv_topology.errors import UnsupportedTopology, demand
from kv_topology.geometry import RankGeometry
from kv_topology.model import Group, Layout, Member, Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology.model import Axis, FieldLayout

__all__ = ["Order", "reshard", "reshard_layout"]

Order = Literal["HN", "NH"]
"""Heads outside tokens in memory, or inside."""


def reshard(  # noqa: PLR0913 - the numbers that another rank differs in
    local: Mapping[str, object],
    *,
    tp_size: int,
    tp_rank: int,
    page_tokens: int,
    pages_per_block: int = 1,
    pp_size: int = 1,
    pp_rank: int = 0,
    context_sizes: Sequence[int] = (),
    order: Order | None = None,
) -> dict[str, object]:
    """Return the document of another rank of the same make, its regions dense and at addresses that count up from 0.

    Regions keep their order, and those that begin at one address still do: a caller that knows the real addresses,
    strides and counts puts them in.

    Args:
        local: The document of a rank with dense layouts.
        tp_size: Tensor-parallel ranks of the other rank's engine.
        tp_rank: The rank among them.
        page_tokens: Tokens of a page in groups that count tokens.
        pages_per_block: Pages of a block in those groups.
        pp_size: Pipeline stages of its engine.
        pp_rank: The rank's stage.
        context_sizes: Context-parallel size of each group, turns being whole blocks; empty for none.
        order: "HN" for heads outside tokens in memory, "NH" for inside, None for as it is here.

    Raises:
        UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
    """
    ours, tp = from_document(local), (tp_size, tp_rank)
    demand("context_sizes", context_sizes, list, tuple)
    demand("tp_rank", tp_rank, int)
    demand("order", order, "HN", "NH", NoneType)
    for number in (tp_size, page_tokens, pages_per_block, *context_sizes):
        check_in_range("a number", number, 1, LIMITS["axis_size"], "the other rank")
    layouts = {
        layout: reshard_layout(layout, tp=tp, page_tokens=page_tokens, order=order)
        for layout in dict.fromkeys(member.layout for region in ours.regions for member in region.members)
    }
    packed = [_packed(region, layouts) for region in ours.regions]
    bases = _spread(ours, [page_bytes for _, page_bytes in packed])
    regions = [
        Region(base, page_bytes, page_bytes, region.page_count, members, region.memory_kind, region.device)
        for region, base, (members, page_bytes) in zip(ours.regions, bases, packed, strict=True)
    ]
    sizes = (*context_sizes, *(1 for _ in ours.groups))
    blocks = (page_tokens * pages_per_block, pages_per_block)
    groups = tuple(_group(group, blocks, size, tp_rank) for group, size in zip(ours.groups, sizes, strict=False))
    made = RankGeometry(tp_size, tp_rank, groups, tuple(regions), pp_size, pp_rank, null_block=ours.null_block)
    return to_document(made)


def _spread(local: RankGeometry, page_bytes: Sequence[int]) -> list[int]:
    """Return a base per region: one for all that begin at one address, with room for the largest of them.

    Example: regions at addresses A, B, A, B of 10 pages each, with pages of 4, 4, 6 and 6 bytes: bases 0, 60, 0, 60.
    """
    places = [(region.memory_kind, region.device, region.base_address) for region in local.regions]
    room: dict[tuple[str, int, int], int] = {}
    for place, region, size in zip(places, local.regions, page_bytes, strict=True):
        room[place] = max(room.get(place, 0), size * region.page_count)
    bases = dict(zip(room, accumulate(room.values(), initial=0), strict=False))
    return [bases[place] for place in places]


def _packed(region: Region, layouts: dict[Layout, Layout]) -> tuple[tuple[Member, ...], int]:
    """Return the members of a region one after the other with their new layouts, and the bytes of a page."""
    members: list[Member] = []
    size = 0
    for member in sorted(region.members, key=lambda member: member.offset_bytes):
        layout = layouts[member.layout]
        members.append(Member(member.layer, layout, member.group, size))
        size += layout.extent_bytes
    return tuple(members), size


def _group(group: Group, blocks: tuple[int, int], context: int, tp_rank: int) -> Group:
    if group.is_state:
        return group
    deal = TokenDeal(context, tp_rank % context, blocks[0]) if context > 1 else TokenDeal()
    return Group(group.kind, *blocks, group.window_tokens, deal)


def reshard_layout(layout: Layout, *, tp: tuple[int, int], page_tokens: int, order: Order | None = None) -> Layout:
    """Return the layout that another rank of the same make has.

    Args:
        layout: A dense layout of ours.
        tp: Tensor-parallel ranks of the other engine, and the rank among them.
        page_tokens: Tokens in its pages; ignored by fields without tokens.
        order: "HN" or "NH" to say whether heads lie outside tokens or inside, None for as it is here.

    Raises:
        UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
    """
    done: list[tuple[FieldLayout, FieldLayout]] = []
    old_end = new_end = 0
    for field in sorted(layout.fields, key=lambda part: part.offset_bytes):
        changed = _reshard_field(field, tp, page_tokens, order)
        place = _place_in_cell(field, changed, done[-1]) if done else None
        if place is None and field.offset_bytes < old_end:
            raise UnsupportedTopology(
                "layout-not-dense",
                f"Field {field.name!r} is woven into {done[-1][0].name!r}, so its place on another shard is unknown.",
                {"field": field.name, "other": done[-1][0].name},
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
    outside = _axes_beyond(old, step)
    if not outside or outside != _axes_beyond(field, step):
        return None
    slack = step - _inside_bytes(old, outside)
    cells = [[axis for axis in each.axes if axis.name in outside] for each in (new, changed)]
    if slack < 0 or cells[0] != cells[1]:
        return None
    return new.offset_bytes + _inside_bytes(new, outside) + slack


def _axes_beyond(field: FieldLayout, step: int) -> set[str]:
    """Return the names of the axes along which neighbours lie more than `step` bytes apart."""
    return {axis.name for axis in field.axes if axis.stride_bytes > step}


def _inside_bytes(field: FieldLayout, outside: set[str]) -> int:
    """Return how many bytes a field spans within one cell."""
    inside = (axis for axis in field.axes if axis.name not in outside)
    return sum((axis.count - 1) * axis.stride_bytes for axis in inside) + field.element_bytes


def _reshard_field(field: FieldLayout, tp: tuple[int, int], page_tokens: int, order: Order | None) -> FieldLayout:
    token = field.token_axis
    changed: dict[str, Axis] = {}
    for axis in field.axes:
        if axis is token:
            changed[axis.name] = replace(axis, size=page_tokens, stop=page_tokens)
        elif axis.split == "tp":
            start, stop = even_interval(axis.size, *tp)
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
                "layout-not-dense",
                f"Axis {axis.name!r} of field {field.name!r} steps {axis.stride_bytes} bytes, which is not dense over "
                "the axes inside it.",
                {"field": field.name, "axis": axis.name, "stride_bytes": axis.stride_bytes},
            )
        strides[axis.name] = stride
        old *= axis.count
        new *= changed[axis.name].count
    return strides


def _reordered(field: FieldLayout, order: Order | None) -> FieldLayout:
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
            "layout-not-dense",
            f"Field {field.name!r} has something between its heads and its tokens, so they cannot be swapped.",
            {"field": field.name, "order": order},
        )
    strides = {inner.name: cell, outer.name: cell * inner.count}
    axes = tuple(replace(axis, stride_bytes=strides.get(axis.name, axis.stride_bytes)) for axis in field.axes)
    return replace(field, axes=axes)
