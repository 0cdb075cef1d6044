"""Registered memory of one agent: the caller's regions, the fence array, and the memory of streams."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.rows import row_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort
    from kv_nixl_agent.values import MemoryRegion
    from kv_nixl_agent.words.fences import FenceArray

__all__ = ["MemoryTable"]


@final
class MemoryTable:
    """Regions registered with NIXL; refuses rows outside them before NIXL sees the rows."""

    __slots__ = ("_port", "_regions", "_registrations", "fences")

    def __init__(
        self,
        port: NixlPort,
        fences: FenceArray,
        regions: Sequence[MemoryRegion],
        scratch: Sequence[MemoryRegion] = (),
    ) -> None:
        self._port = port
        self._registrations: list[Handle] = []
        self._regions: list[MemoryRegion] = []
        self.fences = fences
        self.register([(self.fences.address, self.fences.total_bytes, 0, "DRAM")])
        try:
            for group in (scratch, regions):
                if group:
                    self.register(group)
        except AgentError:
            self.deregister_all()
            raise

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register further memory; all of it or nothing.

        Raises:
            AgentError: `bad-region`, `registration-failed`.
        """
        for region in regions:
            _check_region(region)
        _check_overlap([*self._regions, *regions])
        done: list[Handle] = []
        kinds: tuple[MemoryKind, ...] = ("DRAM", "VRAM")
        for kind in kinds:
            ranges = [region[:3] for region in regions if region[3] == kind]
            if not ranges:
                continue
            try:
                done.append(self._port.register(kind, np.array(ranges, dtype=np.uint64)))
            except AgentError as error:
                for handle in done:
                    self._port.deregister(handle)
                raise AgentError(
                    "registration-failed",
                    f"NIXL refused {len(ranges)} {kind} regions of {sum(r[1] for r in ranges)} bytes: {error}",
                    kind=kind,
                ) from error
        self._registrations += done
        self._regions += regions

    def check_local(self, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> None:
        """Refuse rows outside the registered regions.

        Raises:
            AgentError: `rows-unregistered`, naming the first such row.
        """
        is_inside = np.zeros(len(rows), dtype=bool)
        ends = row_ends(rows)
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

    def deregister_all(self) -> list[AgentError]:
        """Deregister everything, newest first; returns the failures."""
        failures: list[AgentError] = []
        while self._registrations:
            try:
                self._port.deregister(self._registrations.pop())
            except AgentError as error:
                failures.append(error)
        self._regions.clear()
        return failures


def _check_region(region: MemoryRegion) -> None:
    address, length_bytes, device, kind = region
    if address <= 0 or length_bytes <= 0 or address + length_bytes >= 1 << 63 or device < 0:
        raise AgentError(
            "bad-region", f"region at {address:#x} of {length_bytes} bytes on device {device} is empty or out of range"
        )
    if kind not in ("DRAM", "VRAM"):
        raise AgentError("bad-region", f"memory kind {kind!r} is not DRAM or VRAM")


def _check_overlap(regions: Sequence[MemoryRegion]) -> None:
    ordered = sorted(regions, key=lambda region: (region[3], region[2], region[0]))
    for before, after in itertools.pairwise(ordered):
        if before[2:] == after[2:] and before[0] + before[1] > after[0]:
            raise AgentError(
                "bad-region",
                f"regions at {before[0]:#x} ({before[1]} bytes) and {after[0]:#x} overlap; register shared memory once",
            )
