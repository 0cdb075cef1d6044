"""Registered memory of one agent: the caller's regions and the fence array."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, final

import numpy as np

from ._errors import AgentError
from ._rows import row_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ._port import Handle, MemoryKind, NixlPort
    from ._values import MemoryRegion

__all__ = ["CLOSED_GENERATION", "FenceArray", "MemoryTable"]

CLOSED_GENERATION: Final = (1 << 64) - 1
"""Generation in every fence word of a closed agent; never granted."""

_SCRATCH_WORDS = 512


@final
class FenceArray:
    """64-bit words that a producer bumps and consumers read one-sidedly, with scratch words for our own such reads.

    A word is written with one aligned 8-byte store, so a reader sees the old or the new generation, nothing between.
    """

    __slots__ = ("_free", "_memory", "_words", "word_count")

    def __init__(self, word_count: int) -> None:
        self.word_count = word_count
        """Words that are exposed to peers."""
        words = word_count + _SCRATCH_WORDS + 1
        raw: npt.NDArray[np.uint64] = np.zeros(words + 8, dtype=np.uint64)
        shift = (-raw.ctypes.data % 64) // 8
        self._memory: npt.NDArray[np.uint64] = raw[shift : shift + words]
        self._words = self._memory.data  # reads one word with less of NumPy's code, which is cold by then
        self._free = list(range(word_count + _SCRATCH_WORDS - 1, word_count - 1, -1))

    @property
    def location(self) -> tuple[int, int, int]:
        """(address, device, word count) for peers."""
        return (self.address, 0, self.word_count)

    @property
    def address(self) -> int:
        """Address of the first word."""
        return int(self._memory.ctypes.data)

    @property
    def warm_up_address(self) -> int:
        """Address of a word whose content means nothing."""
        return self.address + 8 * (self.word_count + _SCRATCH_WORDS)

    @property
    def total_bytes(self) -> int:
        """Bytes to register, scratch included."""
        return int(self._memory.nbytes)

    def write(self, slot: int, generation: int) -> None:
        """Store `generation` in `slot`.

        Raises:
            AgentError: `bad-fence` if either is out of range.
        """
        if not 0 <= slot < self.word_count or not 0 <= generation < CLOSED_GENERATION:
            raise AgentError(
                "bad-fence",
                f"fence slot {slot} with generation {generation}: slots are 0 to {self.word_count - 1}, "
                "generations 0 to 2**64-2",
                slot=slot,
            )
        self._memory[slot] = generation

    def read(self, slot: int) -> int:
        """Return the generation in `slot`."""
        word: int = self._words[slot]
        return word

    def void_all(self) -> None:
        """Make every word differ from whatever was granted."""
        self._memory[: self.word_count] = CLOSED_GENERATION

    def take_scratch(self, expected: int, *, is_early: bool = False) -> int | None:
        """Return a free scratch word, filled with anything but `expected`; None if all are in use.

        Who takes one early, before it is needed, gets one of the first half only: reads of a stopped peer hold theirs
        until their deadline, and must leave some to others.
        """
        if len(self._free) <= (_SCRATCH_WORDS // 2 if is_early else 0):
            return None
        word = self._free.pop()
        self._memory[word] = expected ^ CLOSED_GENERATION
        return word

    def give_back(self, word: int) -> None:
        """Free a scratch word."""
        self._free.append(word)

    def rows(self) -> npt.NDArray[np.uint64]:
        """Return the whole array as one strided row of 8-byte descriptors."""
        return np.array([[self.address, 8, 0, 8, len(self._memory)]], dtype=np.uint64)


@final
class MemoryTable:
    """What is registered with NIXL; refuses rows that reach outside before NIXL sees them."""

    __slots__ = ("_port", "_regions", "_registrations", "fences")

    def __init__(self, port: NixlPort, regions: Sequence[MemoryRegion], *, fence_words: int) -> None:
        self._port = port
        self._registrations: list[Handle] = []
        self._regions: list[MemoryRegion] = []
        self.fences = FenceArray(fence_words)
        self.register([(self.fences.address, self.fences.total_bytes, 0, "DRAM")])
        try:
            if regions:
                self.register(regions)
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
