"""A plan executed on plain byte arrays: rows and indices become copies, without the library's testing code."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["RankMemory", "copy_plan"]


class RankMemory:
    """One rank's registered memory as a byte array that begins at `base`."""

    def __init__(self, base: int, size: int, fill: int = 0) -> None:
        self.base = base
        self.data = np.full(size, fill, np.uint8)

    def at(self, address: int, length: int) -> np.ndarray[Any, Any]:
        start = address - self.base
        assert 0 <= start <= len(self.data) - length, "a descriptor leaves the registered memory"
        return self.data[start : start + length]


def _descriptors(rows: Any) -> list[tuple[int, int]]:
    return [
        (int(address) + n * int(stride), int(length))
        for address, length, _, stride, count in rows.tolist()
        for n in range(count)
    ]


def copy_plan(
    plan: Any, local: Any, peer: Any, tokens: int, mine: RankMemory, theirs: dict[tuple[int, int], RankMemory]
) -> int:
    """Carry out a direct plan; returns the bytes copied."""
    copied = 0
    for rank in plan.producer_ranks:
        here, there = _descriptors(plan.local_rows(rank)), _descriptors(plan.peer_rows(rank))
        for left, right in zip(*plan.indices(rank, local, peer, tokens=tokens), strict=True):
            (to, length), (source, peer_length) = here[left], there[right]
            assert length == peer_length
            mine.at(to, length)[:] = theirs[rank].at(source, length)
            copied += length
    return copied
