"""Registered memory, and strided rows over it.

A row `(address, length_bytes, device, stride_bytes, count)` stands for `count` descriptors of `length_bytes` bytes,
the first at `address`, each `stride_bytes` behind the one before. Descriptors are numbered through all rows of a
table, so a table of a thousand regions with a million pages is a thousand rows, and block ids become indices by
arithmetic.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kv_nixl_agent.errors import AgentError, demand
from kv_nixl_agent.nixl.port import MEMORY_KINDS, MemoryKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import Handle, NixlPort
    from kv_nixl_agent.values import MemoryRegion

    Rows = npt.NDArray[np.uint64]

    Indices = npt.NDArray[np.int32]

__all__ = ["MemoryTable", "RowTable", "check_rows"]

_MAX_DESCRIPTORS = (1 << 31) - 1
_MAX_ADDRESS = float(1 << 63)
_SHORT = 64  # numbers that Python compares faster than NumPy where its code has left the caches: 10 us against 40


def _array(values: object) -> npt.NDArray[Any]:
    """Return an array; of values that make none, one without axes, which every check refuses."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError):
        return np.array(None)


def check_rows(rows: object) -> Rows:
    """Return `rows` as a read-only contiguous uint64 (n, 5) copy.

    Raises:
        AgentError: `bad-rows` with the first row that is wrong and why.
    """
    array = _array(rows)
    if array.ndim != 2 or array.shape[1] != 5 or array.shape[0] == 0:
        raise AgentError("bad-rows", f"rows have shape {array.shape}, needed is (n, 5) with n >= 1", shape=array.shape)
    if array.dtype.kind not in "iu":
        raise AgentError("bad-rows", f"rows have dtype {array.dtype}, needed are unsigned 64-bit integers")
    if array.dtype.kind == "i" and bool((array < 0).any()):
        raise AgentError("bad-rows", "rows hold negative numbers; addresses and lengths are unsigned")
    table = np.array(array, dtype=np.uint64, order="C")
    _refuse(table, (table[:, 1] == 0) | (table[:, 4] == 0), "has a zero length or count")
    _refuse(table, (table[:, 4] > 1) & (table[:, 3] < table[:, 1]), "has a stride below its length")
    span = table[:, 0].astype(np.float64) + table[:, 3].astype(np.float64) * table[:, 4] + table[:, 1]
    _refuse(table, span >= _MAX_ADDRESS, "ends beyond the address space")
    if float(table[:, 4].sum(dtype=np.float64)) > _MAX_DESCRIPTORS:
        raise AgentError("bad-rows", f"rows hold more than {_MAX_DESCRIPTORS} descriptors; split the table")
    table.flags.writeable = False
    return table


def _refuse(table: Rows, is_wrong: npt.NDArray[np.bool_], why: str) -> None:
    if bool(is_wrong.any()):
        row = int(np.flatnonzero(is_wrong)[0])
        raise AgentError("bad-rows", f"row {row} {table[row].tolist()} {why}", row=row)


@final
class RowTable:
    """Checked rows of one side of a peer, with the memory kind of each row.

    Args:
        rows: uint64 (n, 5); n is 0 for a peer that is only notified.
        kind: Memory kind of all rows, or one per row.
    """

    def __init__(self, rows: object, kind: MemoryKind | Sequence[MemoryKind]) -> None:
        demand("memory kind", kind, str, list, tuple)
        array = _array(rows)
        table = np.empty((0, 5), dtype=np.uint64) if array.shape == (0, 5) else check_rows(array)
        kinds = [kind] * len(table) if isinstance(kind, str) else list(kind)
        if len(kinds) != len(table) or any(one not in MEMORY_KINDS for one in kinds):
            raise AgentError("bad-rows", f"{len(table)} rows need as many kinds, each DRAM or VRAM; got {kinds[:8]}")
        counts = table[:, 4].astype(np.int64)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self.count = int(self._first[-1])
        """Descriptors in the table."""
        self._lengths = table[:, 1].astype(np.int64)
        lengths = set(self._lengths.tolist())
        self.uniform_bytes = lengths.pop() if len(lengths) == 1 else 0
        """Length of every descriptor, 0 if they differ."""
        self._is_device: npt.NDArray[np.bool_] = np.array([one == "VRAM" for one in kinds], dtype=bool)
        self._group_first: npt.NDArray[np.int64] = np.array(self._first[:-1])
        self.groups: dict[MemoryKind, Rows] = {}
        """Rows by memory kind, in table order."""
        for name in MEMORY_KINDS:
            members = np.flatnonzero(self._is_device == (name == "VRAM"))
            if len(members):
                ends = np.cumsum(counts[members])
                self._group_first[members] = ends - counts[members]
                group = table[members]
                group.flags.writeable = False
                self.groups[name] = group

    def check_indices(self, indices: object, side: str) -> Indices:
        """Return `indices` as a contiguous int32 array within the table.

        Raises:
            AgentError: `bad-indices`.
        """
        array = _array(indices)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise AgentError(
                "bad-indices", f"{side} indices have dtype {array.dtype} and shape {array.shape}, not int32 (n,)"
            )
        if array.dtype == np.int32 and array.size:
            numbers = array.view(np.uint32)  # a single pass: negative numbers become huge
            if (max(numbers.tolist()) if array.size <= _SHORT else int(numbers.max())) < self.count:
                return np.ascontiguousarray(array)
        if array.size:
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= self.count:
                raise AgentError(
                    "bad-indices",
                    f"{side} indices span {low} to {high}, the list has {self.count} descriptors",
                    low=low,
                    high=high,
                    count=self.count,
                )
        return np.ascontiguousarray(array, dtype=np.int32)

    def lengths(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return the length in bytes of each named descriptor, int64 (n,)."""
        return self._lengths[self._rows_of(indices)]

    def has_kind(self, indices: Indices, kind: MemoryKind) -> npt.NDArray[np.bool_]:
        """Return for each named descriptor whether its memory is of this kind, bool (n,)."""
        is_of_kind: npt.NDArray[np.bool_] = self._is_device[self._rows_of(indices)] == (kind == "VRAM")
        return is_of_kind

    def in_group(self, indices: Indices) -> Indices:
        """Return the number of each named descriptor within the group of its kind, int32 (n,)."""
        row = self._rows_of(indices)
        inside: npt.NDArray[np.int64] = indices - self._first[row] + self._group_first[row]
        return inside.astype(np.int32)

    def _rows_of(self, indices: Indices) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._first, indices, side="right") - 1


@final
class MemoryTable:
    """Regions registered with NIXL; refuses rows outside them before NIXL sees the rows."""

    def __init__(self, port: NixlPort) -> None:
        self._port = port
        self._registrations: list[Handle] = []
        self._regions: Sequence[MemoryRegion] = ()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register memory, once; all of it or nothing.

        Raises:
            AgentError: `bad-region`, `registration-failed`.
        """
        for region in regions:
            _check_region(region)
        _check_overlap(regions)
        for kind in MEMORY_KINDS:
            ranges = [region[:3] for region in regions if region[3] == kind]
            if not ranges:
                continue
            try:
                self._registrations.append(self._port.register(kind, np.array(ranges, dtype=np.uint64)))
            except AgentError as error:
                self.close()
                raise AgentError(
                    "registration-failed",
                    f"NIXL refused {len(ranges)} {kind} regions of {sum(r[1] for r in ranges)} bytes: {error.message}",
                    kind=kind,
                ) from error
        self._regions = regions

    def check_local(self, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> None:
        """Refuse rows outside the registered regions.

        Raises:
            AgentError: `rows-unregistered`, naming the first such row.
        """
        is_inside = np.zeros(len(rows), dtype=bool)
        ends = rows[:, 0] + rows[:, 3] * (rows[:, 4] - np.uint64(1)) + rows[:, 1]
        for address, length_bytes, device, region_kind in self._regions:
            if region_kind == kind:
                is_inside |= (rows[:, 0] >= address) & (ends <= address + length_bytes) & (rows[:, 2] == device)
        if not bool(is_inside.all()):
            row = int(np.flatnonzero(~is_inside)[0])
            raise AgentError(
                "rows-unregistered",
                f"local {kind} row {row} {rows[row].tolist()} lies in none of {len(self._regions)} registered regions",
                row=row,
            )

    def close(self) -> None:
        """Deregister everything, newest first."""
        while self._registrations:
            with contextlib.suppress(AgentError):
                self._port.deregister(self._registrations.pop())


def _check_region(region: MemoryRegion) -> None:
    address, length_bytes, device, kind = region
    if address <= 0 or length_bytes <= 0 or address + length_bytes >= 1 << 63 or device < 0:
        raise AgentError(
            "bad-region", f"region at {address:#x} of {length_bytes} bytes on device {device} is empty or out of range"
        )
    if kind not in MEMORY_KINDS:
        raise AgentError("bad-region", f"memory kind {kind!r} is not DRAM or VRAM")


def _check_overlap(regions: Sequence[MemoryRegion]) -> None:
    ordered = sorted(regions, key=lambda region: (region[3], region[2], region[0]))
    for before, after in itertools.pairwise(ordered):
        if before[2:] == after[2:] and before[0] + before[1] > after[0]:
            raise AgentError(
                "bad-region",
                f"regions at {before[0]:#x} ({before[1]} bytes) and {after[0]:#x} overlap; register shared memory once",
            )
