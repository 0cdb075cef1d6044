"""Checks of layouts, and tests that no byte has two owners: fields of a page, and groups of a request that share memory.

Fields. Fields that are woven into each other (a head's key, then its value, token by token) overlap as ranges but not as
bytes. Most are woven regularly: all of them step over the same outermost axis, and everything inside one step fits into
that step. Then step i of one field can only meet step i of another, and it is enough to compare step 0; the next axis is
treated alike. What is left after that is enumerated, within a budget.

Worked example. 2 heads, 4 tokens, keys and values of 8 bytes packed in cells of 16: the key has axes (head: 2 steps of
64 bytes), (token: 4 steps of 16), offset 0; the value the same, offset 8. As ranges they are [0, 120) and [8, 128).
One head of both spans 8 + 56 = 64 bytes, which fits a step of 64: compare head 0. One token of both spans 16 bytes,
which fits a step of 16: compare token 0. Key [0, 8) and value [8, 16) are apart.

Groups. Hybrid engines hand the same pages to either group, one at a time. Regions whose memory overlaps form a cluster.
Clusters of one shape (those of the first layers of all groups, of the second layers, ...) would all give the same answer,
so one of each shape is kept.

Worked example. Two groups over one memory, pages of 64 bytes: group 0 has 2 pages per block, group 1 has pages of 128
bytes, 1 per block. Local blocks (3) and (3): group 0 writes bytes 384..511 (pages 6 and 7), group 1 writes 384..511 too,
so the request is refused. Blocks (3) and (4) write 384..511 and 512..639 and are fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import numpy as np

from kv_topology.arithmetic import box_runs, count_up, flat_outer_sum, run_count
from kv_topology.errors import InvalidBlocks, InvalidGeometry, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_topology.arithmetic import Ints
    from kv_topology.model import Axis, FieldLayout, Group, Layout, Region

_T = TypeVar("_T")

__all__ = [
    "LIMITS",
    "Budget",
    "SharedView",
    "check_disjoint",
    "check_disjoint_groups",
    "check_in_range",
    "check_layout",
    "clusters",
    "find_aliases",
]

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


def check_in_range(what: str, value: int, low: int, high: int, where: str) -> None:
    """Raise `size-out-of-range` unless it is an integer and low <= value <= high."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidGeometry(
            "size-out-of-range",
            f"{what} of {where} is {shown(value)}; it must be an integer of {low}..{high}.",
            {"value": value, "low": low, "high": high},
        )


def _check_axis(axis: Axis, where: str) -> None:
    check_in_range(f"axis {axis.name!r} size", axis.size, 1, LIMITS["axis_size"], where)
    if not 0 <= axis.start < axis.stop <= axis.size:
        raise InvalidGeometry(
            "interval-out-of-range",
            f"Axis {axis.name!r} of {where} holds [{axis.start}, {axis.stop}) of {axis.size} parts; "
            "the interval must be non-empty and inside the axis.",
            {"start": axis.start, "stop": axis.stop, "size": axis.size},
        )
    if axis.split not in {"whole", "tp"}:
        raise InvalidGeometry("bad-split", f"Axis {axis.name!r} of {where} is split {axis.split!r}; known: whole, tp.")
    if axis.split == "whole" and axis.count != axis.size:
        raise InvalidGeometry(
            "whole-axis-partial",
            f"Axis {axis.name!r} of {where} is not split, but holds only {axis.count} of {axis.size} parts.",
            {"count": axis.count, "size": axis.size},
        )
    check_in_range(f"axis {axis.name!r} stride_bytes", axis.stride_bytes, 1, LIMITS["page_bytes"], where)


def _check_field(field: FieldLayout, where: str) -> None:
    check_in_range("element_bytes", field.element_bytes, 1, LIMITS["page_bytes"], where)
    check_in_range("offset_bytes", field.offset_bytes, 0, LIMITS["page_bytes"], where)
    check_in_range("number of axes", len(field.axes), 0, LIMITS["axes"], where)
    for axis in field.axes:
        _check_axis(axis, where)
    names = [axis.name for axis in field.axes]
    if len(set(names)) != len(names):
        raise InvalidGeometry("axis-repeated", f"Axis names of {where} repeat: {', '.join(names)}.", {"names": names})
    if sum(axis.split == "tp" for axis in field.axes) > 1:
        raise InvalidGeometry(
            "two-split-axes", f"{where} splits more than one axis over tensor-parallel ranks.", {"names": names}
        )
    _check_strides(field, where)
    token = field.token_axis
    if token is not None and token.split != "whole":
        raise InvalidGeometry(
            "token-axis-split", f"The token axis of {where} is split {token.split!r}; it must be whole."
        )
    if field.packing and token is not None:
        raise InvalidGeometry(
            "packed-token-axis", f"{where} is in the order {field.packing!r} of a kernel, and names tokens."
        )


def _check_strides(field: FieldLayout, where: str) -> None:
    """Raise unless every axis steps over all that lies inside it."""
    extent = field.element_bytes
    for axis in sorted((axis for axis in field.axes if axis.count > 1), key=lambda axis: axis.stride_bytes):
        if axis.stride_bytes < extent:
            raise InvalidGeometry(
                "strides-overlap",
                f"Axis {axis.name!r} of {where} steps {axis.stride_bytes} bytes over cells of {extent} bytes; "
                "neighbours would share memory.",
                {"stride_bytes": axis.stride_bytes, "extent_bytes": extent},
            )
        extent += (axis.count - 1) * axis.stride_bytes


def check_layout(layout: Layout, where: str, budget: Budget) -> None:
    """Raise unless the fields of a layout are sound, differ in name, and keep to different bytes."""
    if not layout.fields:
        raise InvalidGeometry("layout-empty", f"The layout of {where} has no fields.")
    names = [field.name for field in layout.fields]
    if len(set(names)) != len(names):
        raise InvalidGeometry("field-twice", f"The layout of {where} has a field name twice: {', '.join(names[:8])}.")
    for field in layout.fields:
        _check_field(field, f"field {field.name!r} of {where}")
    check_disjoint(((field.name, field, field.offset_bytes) for field in layout.fields), where, budget)


@final
class Budget:
    """Work that checking one geometry may still take: fields compared with others, and runs of bytes enumerated."""

    def __init__(self) -> None:
        self._fields = LIMITS["compared_fields"]
        self._runs = LIMITS["compared_runs"]

    def spend(self, *, fields: int = 0, runs: int = 0) -> None:
        """Take off work before it is done; raises `InvalidGeometry` (`layout-too-fine`) if it is too much."""
        self._fields -= fields
        self._runs -= runs
        if self._fields < 0 or self._runs < 0:
            raise InvalidGeometry(
                "layout-too-fine",
                "The fields of the pages are woven into each other too finely to be checked: a geometry may take "
                f"{LIMITS['compared_fields']} comparisons of fields and {LIMITS['compared_runs']} runs of bytes. Keep fields "
                "apart, or let them step alike.",
                {"fields": fields, "runs": runs},
            )


class _Part(NamedTuple):
    """A field of a page: what a person calls it, first byte, cell size and axes (count, stride), the largest stride first."""

    name: str
    offset: int
    element_bytes: int
    axes: Sequence[tuple[int, int]]

    @property
    def stop(self) -> int:
        return self.offset + sum((count - 1) * stride for count, stride in self.axes) + self.element_bytes


def clusters(spans: Iterable[tuple[int, int, _T]]) -> list[list[tuple[int, int, _T]]]:
    """Return spans (start, stop, value) in groups whose ranges do not touch those of other groups, by their starts."""
    found: list[list[tuple[int, int, _T]]] = []
    end = -1
    for span in sorted(spans, key=lambda span: span[:2]):
        if span[0] >= end:
            found.append([])
        found[-1].append(span)
        end = max(end, span[1])
    return found


def check_disjoint(fields: Iterable[tuple[str, FieldLayout, int]], where: str, budget: Budget) -> None:
    """Raise unless the fields, each with its name and offset, keep to different bytes of a page.

    Raises:
        InvalidGeometry: `fields-overlap`, or `layout-too-fine` when the budget is used up.
    """
    parts: list[_Part] = []
    for name, field, offset in fields:
        axes = sorted(((a.count, a.stride_bytes) for a in field.axes if a.count > 1), key=lambda axis: -axis[1])
        parts.append(_Part(name, offset, field.element_bytes, axes))
    shared = _find_shared_byte(parts, budget)
    if shared is not None:
        one, two, byte = shared
        raise InvalidGeometry(
            "fields-overlap",
            f"{one} and {two} share byte {byte} of the pages of {where}.",
            {"first": one, "second": two, "offset_bytes": byte},
        )


def _find_shared_byte(parts: Sequence[_Part], budget: Budget) -> tuple[str, str, int] | None:
    """Return the names of two fields that share a byte, and that byte."""
    budget.spend(fields=len(parts))
    for cluster in clusters((part.offset, part.stop, part) for part in parts):
        if len(cluster) > 1:
            touching = [part for _, _, part in cluster]
            inside = _first_step(touching)
            found = _find_shared_byte(inside, budget) if inside is not None else _enumerate(touching, budget)
            if found is not None:
                return found
    return None


def _first_step(parts: Sequence[_Part]) -> list[_Part] | None:
    """Return the parts without their common outermost axis, or None if they have none or a step does not hold all."""
    strides = {part.axes[0][1] if part.axes else 0 for part in parts}
    if len(strides) != 1 or 0 in strides:
        return None
    inside = [part._replace(axes=part.axes[1:]) for part in parts]
    span = max(part.stop for part in inside) - min(part.offset for part in inside)
    return inside if span <= strides.pop() else None


def _enumerate(parts: Sequence[_Part], budget: Budget) -> tuple[str, str, int] | None:
    boxes = [[(count, stride, stride) for count, stride in part.axes] for part in parts]
    budget.spend(runs=sum(run_count(box, part.element_bytes) for box, part in zip(boxes, parts, strict=True)))
    runs = [box_runs(box, part.element_bytes, part.offset, 0) for box, part in zip(boxes, parts, strict=True)]
    starts = np.concatenate([run.here for run in runs])
    owners = np.repeat(np.arange(len(parts)), [len(run.here) for run in runs])
    touching = _first_overlap(starts, np.concatenate([run.length for run in runs]))
    if touching is None:
        return None
    one, two = touching
    return parts[int(owners[one])].name, parts[int(owners[two])].name, int(starts[two])


def _first_overlap(starts: Ints, lengths: Ints) -> tuple[int, int] | None:
    """Return the places of two neighbours that overlap, by their starts; None if all ranges are apart."""
    order = np.argsort(starts, kind="stable")
    starts, lengths = starts[order], lengths[order]
    overlap = np.flatnonzero(starts[1:] < starts[:-1] + lengths[:-1])
    return (int(order[overlap[0]]), int(order[overlap[0] + 1])) if len(overlap) else None


class SharedView(NamedTuple):
    """Pages of one group in a cluster of memory that several groups share.

    Attributes:
        offset: First byte of page 0, from the cluster's first byte.
        group: KV-cache group.
        stride: Bytes from page to page.
        page_bytes: Bytes of a page.
        pages_per_block: Pages of a block.
    """

    offset: int
    group: int
    stride: int
    page_bytes: int
    pages_per_block: int


def find_aliases(regions: Sequence[Region], groups: Sequence[Group]) -> tuple[tuple[SharedView, ...], ...]:
    """Return the shapes of the clusters of memory that several groups share, as hybrid engines have them."""
    spans: dict[tuple[str, int], set[tuple[int, int, SharedView]]] = {}
    for region in regions:
        for group in {member.group for member in region.members}:
            per_block = groups[group].pages_per_block
            view = SharedView(0, group, region.page_stride_bytes, region.page_bytes, per_block)
            memory = spans.setdefault((region.memory_kind, region.device), set())
            memory.add((region.base_address, region.stop_address, view))
    shapes: set[tuple[SharedView, ...]] = set()
    for memory in spans.values():
        for cluster in clusters(sorted(memory)):
            if len({view.group for _, _, view in cluster}) > 1:
                shapes.add(tuple(view._replace(offset=base - cluster[0][0]) for base, _, view in cluster))
    return tuple(sorted(shapes))


def check_disjoint_groups(aliases: Sequence[Sequence[SharedView]], ids: Sequence[Ints]) -> None:
    """Raise `InvalidBlocks` (`local-block-twice`) if two groups that share memory are to be written in one place.

    Example: the pages 384..447 and 448..511 of one group beside 384..511 of another: sorted by their starts, the first
    stops at 448, beyond the start 384 of the second, so the two groups are refused.

    Args:
        aliases: From `find_aliases`.
        ids: Real local blocks per group, int64 (n,).
    """
    for cluster in aliases:
        views = [view for view in cluster if len(ids[view.group])]
        if len({view.group for view in views}) < 2:
            continue
        starts: list[Ints] = []  # of the pages, from the cluster's first byte
        for view in views:
            pages = flat_outer_sum(ids[view.group] * view.pages_per_block, count_up(view.pages_per_block))
            starts.append(pages * view.stride + view.offset)
        owner = np.repeat(np.arange(len(views)), [len(found) for found in starts])
        every = np.concatenate(starts)
        touching = _first_overlap(every, np.array([view.page_bytes for view in views])[owner])
        if touching is not None:
            groups = tuple(sorted({views[int(owner[place])].group for place in touching}))
            raise InvalidBlocks(
                "local-block-twice",
                f"Groups {list(groups)} share memory, and their local block lists both name the page at byte "
                f"{int(every[touching[1]])}; a block belongs to one group at a time.",
                {"groups": groups},
            )
