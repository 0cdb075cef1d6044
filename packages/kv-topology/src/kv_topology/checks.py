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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology.arithmetic import box_runs, count_up, flat_outer_sum, run_count
from kv_topology.errors import InvalidBlocks, InvalidGeometry, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology.arithmetic import Ints
    from kv_topology.model import Axis, FieldLayout, Group, Layout, Region

__all__ = [
    "LIMITS",
    "Budget",
    "Shared",
    "SharedView",
    "check_disjoint",
    "check_disjoint_groups",
    "check_in_range",
    "check_layout",
    "find_aliases",
    "find_shared_byte",
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
    _check_names(field, where)
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


def _check_names(field: FieldLayout, where: str) -> None:
    names = [axis.name for axis in field.axes]
    if len(set(names)) != len(names):
        raise InvalidGeometry("axis-repeated", f"Axis names of {where} repeat: {', '.join(names)}.", {"names": names})
    if sum(axis.split == "tp" for axis in field.axes) > 1:
        raise InvalidGeometry(
            "two-split-axes", f"{where} splits more than one axis over tensor-parallel ranks.", {"names": names}
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


def check_disjoint(fields: list[tuple[str, FieldLayout, int]], where: str, budget: Budget) -> None:
    """Raise unless the fields, each with its offset, keep to different bytes of a page."""
    shared = find_shared_byte([(field, offset) for _, field, offset in fields], budget)
    if shared is not None:
        one, two = fields[shared.first], fields[shared.second]
        raise InvalidGeometry(
            "fields-overlap",
            f"{one[0]} and {two[0]} share byte {shared.offset_bytes} of the pages of {where}.",
            {"first": one[0], "second": two[0], "offset_bytes": shared.offset_bytes},
        )


def check_layout(layout: Layout, where: str, budget: Budget) -> None:
    """Raise unless the fields of a layout are sound, differ in name, and keep to different bytes."""
    if not layout.fields:
        raise InvalidGeometry("layout-empty", f"The layout of {where} has no fields.")
    names = [field.name for field in layout.fields]
    if len(set(names)) != len(names):
        raise InvalidGeometry("field-twice", f"The layout of {where} has a field name twice: {', '.join(names[:8])}.")
    for field in layout.fields:
        _check_field(field, f"field {field.name!r} of {where}")
    check_disjoint([(field.name, field, field.offset_bytes) for field in layout.fields], where, budget)


@final
class Budget:
    """Work that checking one geometry may still take.

    Args:
        fields: Fields that may be compared with others.
        runs: Runs of bytes that may be enumerated.
    """

    def __init__(self, fields: int, runs: int) -> None:
        self._fields = self._most_fields = fields
        self._runs = self._most_runs = runs

    def spend(self, *, fields: int = 0, runs: int = 0) -> None:
        """Take off work before it is done; raises `InvalidGeometry` (`layout-too-fine`) if it is too much."""
        self._fields -= fields
        self._runs -= runs
        if self._fields < 0 or self._runs < 0:
            raise InvalidGeometry(
                "layout-too-fine",
                "The fields of the pages are woven into each other too finely to be checked: a geometry may take "
                f"{self._most_fields} comparisons of fields and {self._most_runs} runs of bytes. Keep fields apart, or "
                "let them step alike.",
                {"fields": fields, "runs": runs},
            )


class Shared(NamedTuple):
    """A byte that two fields share, and their places in the list that was checked."""

    first: int
    second: int
    offset_bytes: int


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """A field: its place in the list, first byte, cell size and axes (count, stride), the largest stride first."""

    number: int
    offset: int
    element_bytes: int
    axes: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> int:
        return self.offset + sum((count - 1) * stride for count, stride in self.axes) + self.element_bytes


def find_shared_byte(fields: Sequence[tuple[FieldLayout, int]], budget: Budget) -> Shared | None:
    """Return a byte that two of the fields (each with its offset in the page) share, or None.

    Raises:
        InvalidGeometry: `layout-too-fine` when the budget is used up.
    """
    parts: list[_Part] = []
    for number, (field, offset) in enumerate(fields):
        axes = sorted(((a.count, a.stride_bytes) for a in field.axes if a.count > 1), key=lambda axis: -axis[1])
        parts.append(_Part(number, offset, field.element_bytes, tuple(axes)))
    return _find(parts, budget)


def _find(parts: Sequence[_Part], budget: Budget) -> Shared | None:
    budget.spend(fields=len(parts))
    for cluster in _clusters(parts):
        found = None
        if len(cluster) > 1:
            inside = _first_step(cluster)
            found = _find(inside, budget) if inside is not None else _enumerate(cluster, budget)
        if found is not None:
            return found
    return None


def _clusters(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Return the parts in groups whose ranges do not touch those of other groups."""
    clusters: list[list[_Part]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part.offset):
        if part.offset >= end:
            clusters.append([])
        clusters[-1].append(part)
        end = max(end, part.stop)
    return clusters


def _first_step(parts: Sequence[_Part]) -> list[_Part] | None:
    """Return the parts without their common outermost axis, or None if they have none or a step does not hold all."""
    strides = {part.axes[0][1] if part.axes else 0 for part in parts}
    if len(strides) != 1 or 0 in strides:
        return None
    inside = [replace(part, axes=part.axes[1:]) for part in parts]
    span = max(part.stop for part in inside) - min(part.offset for part in inside)
    return inside if span <= strides.pop() else None


def _enumerate(parts: Sequence[_Part], budget: Budget) -> Shared | None:
    boxes = [[(count, stride, stride) for count, stride in part.axes] for part in parts]
    counts = [run_count(box, part.element_bytes) for box, part in zip(boxes, parts, strict=True)]
    budget.spend(runs=sum(counts))
    runs = [box_runs(box, part.element_bytes, part.offset, 0) for box, part in zip(boxes, parts, strict=True)]
    starts = np.concatenate([run.here for run in runs])
    stops = starts + np.concatenate([run.length for run in runs])
    order = np.argsort(starts, kind="stable")
    overlap = np.flatnonzero(starts[order][1:] < stops[order][:-1])
    if not len(overlap):
        return None
    owner = np.repeat([part.number for part in parts], [len(run) for run in runs])[order]
    place = int(overlap[0])
    return Shared(int(owner[place]), int(owner[place + 1]), int(starts[order][place + 1]))


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
    views: set[tuple[str, int, int, int, SharedView]] = set()
    for region in regions:
        stop = region.base_address + region.page_stride_bytes * (region.page_count - 1) + region.page_bytes
        for group in {member.group for member in region.members}:
            per_block = groups[group].pages_per_block
            view = SharedView(0, group, region.page_stride_bytes, region.page_bytes, per_block)
            views.add((region.memory_kind, region.device, region.base_address, stop, view))
    shapes: set[tuple[SharedView, ...]] = set()
    cluster: list[SharedView] = []
    origin, end = ("", 0, 0), 0
    for kind, device, base, stop, view in [*sorted(views), ("", -1, 0, 0, SharedView(0, 0, 0, 0, 0))]:
        if (kind, device) != origin[:2] or base >= end:
            if len({member.group for member in cluster}) > 1:
                shapes.add(tuple(cluster))
            cluster, origin, end = [], (kind, device, base), stop
        cluster.append(view._replace(offset=base - origin[2]))
        end = max(end, stop)
    return tuple(sorted(shapes))


def check_disjoint_groups(aliases: Sequence[Sequence[SharedView]], ids: Sequence[Ints]) -> None:
    """Raise `InvalidBlocks` (`local-block-twice`) if two groups that share memory are to be written in one place.

    Args:
        aliases: From `find_aliases`.
        ids: Real local blocks per group, int64 (n,).
    """
    for cluster in aliases:
        used = [view for view in cluster if len(ids[view.group])]
        if len({view.group for view in used}) >= 2:
            _check_disjoint_pages(used, [_page_starts(view, ids[view.group]) for view in used])


def _check_disjoint_pages(views: Sequence[SharedView], page_starts: Sequence[Ints]) -> None:
    """Raise unless no page of a request begins within another one of the same cluster.

    Example: the pages 384..447 and 448..511 of one group beside 384..511 of another: sorted by their starts, the first
    stops at 448, beyond the start 384 of the second, so the two groups are refused.
    """
    counts = [len(starts) for starts in page_starts]
    starts = np.concatenate(page_starts)
    stops = starts + np.repeat([view.page_bytes for view in views], counts)
    order = np.argsort(starts)
    touching = np.flatnonzero(starts[order][1:] < stops[order][:-1])
    if len(touching):
        owner = np.repeat([view.group for view in views], counts)[order]
        groups = sorted({int(owner[touching[0]]), int(owner[touching[0] + 1])})
        raise InvalidBlocks(
            "local-block-twice",
            f"Groups {groups} share memory, and their local block lists both name the page at byte "
            f"{int(starts[order][touching[0] + 1])}; a block belongs to one group at a time.",
            {"groups": tuple(groups)},
        )


def _page_starts(view: SharedView, ids: Ints) -> Ints:
    """Return the first bytes of the pages of blocks, from the cluster's first byte."""
    pages = flat_outer_sum(ids * view.pages_per_block, count_up(view.pages_per_block))
    return pages * view.stride + view.offset
