"""Test that fields keep to different bytes of a page, without counting bytes.

Theory of operation. Fields that are woven into each other (a head's key, then its value, token by token) overlap as
ranges but not as bytes. Most are woven regularly: all of them step over the same outermost axis, and everything inside
one step fits into that step. Then step i of one field can only meet step i of another, and it is enough to look at
step 0; the next axis is treated alike. What is left after that is enumerated, within a budget.

Worked example. 2 heads, 4 tokens, keys and values of 8 bytes packed in cells of 16: the key has axes (head: 2 steps of
64 bytes), (token: 4 steps of 16), offset 0; the value the same, offset 8. As ranges they are [0, 120) and [8, 128).
One head of both spans 8 + 56 = 64 bytes, which fits a step of 64: look at head 0. One token of both spans 16 bytes,
which fits a step of 16: look at token 0. Key [0, 8) and value [8, 16) are apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology._errors import InvalidGeometry
from kv_topology._runs import box_runs, run_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._parts import FieldLayout

__all__ = ["Budget", "Shared", "find_shared_byte"]


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
                "The fields of the pages are woven into each other too finely to be checked: a geometry may take "
                f"{self._most_fields} comparisons of fields and {self._most_runs} runs of bytes. Keep fields apart, or "
                "let them step alike.",
                code="layout-too-fine",
                context={"fields": fields, "runs": runs},
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
