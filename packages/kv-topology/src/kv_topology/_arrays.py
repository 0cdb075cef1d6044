"""The few numpy idioms that the package repeats, with exact types."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bools", "Indices", "Ints", "Rows", "count_up", "flat_outer_sum", "grid", "ints", "outer_sum"]

_Array = TypeVar("_Array", bound="npt.NDArray[np.generic]")
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int32]


def ints(values: Sequence[int]) -> Ints:
    """Return values as int64 (n,)."""
    return np.array(values, dtype=np.int64)


def count_up(count: int) -> Ints:
    """Return 0, 1, ... count-1 as int64 (n,)."""
    return np.arange(count, dtype=np.int64)


def grid(values: _Array, rows: int, columns: int) -> _Array:
    """Return the values as a (rows, columns) view."""
    return cast("_Array", np.reshape(values, (rows, columns)))


def outer_sum(rows: Ints, columns: Ints) -> Ints:
    """Return int64 (len(rows), len(columns)) of all sums."""
    return cast("Ints", rows[:, None] + columns[None, :])


def flat_outer_sum(rows: Ints, columns: Ints) -> Ints:
    """Return all sums as int64 (len(rows) * len(columns),), row by row."""
    return outer_sum(rows, columns).ravel()
