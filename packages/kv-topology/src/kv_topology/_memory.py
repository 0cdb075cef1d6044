"""A rank's registered memory as an array, filled with tags: the part of the byte oracle that knows no plans."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, final

import numpy as np

from kv_topology._arrays import flat_outer_sum, grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_topology._arrays import Ints
    from kv_topology._model import FieldLayout, Group, Member, RankGeometry, Region

    Bytes = npt.NDArray[np.uint8]

__all__ = ["MARGIN", "MemoryOfRank", "Request"]

SENTINEL = 0xEE
MARGIN = 4096
"""Guard bytes around a rank's registered memory, to catch reads and writes outside of it."""


@final
@dataclass(frozen=True)
class Request:
    """One request: its block lists on both sides, and where they begin.

    Attributes:
        local_blocks: Scheduler block ids per consumer group.
        peer_blocks: Scheduler block ids per producer group.
        local_first: Place in the sequence of each local list's first block.
        peer_first: The same at the producer.
        tokens: Passed on to the plan.
        is_told: Whether the plan is told the two firsts; otherwise the counts and `tokens` must do.
    """

    local_blocks: Sequence[Sequence[int]]
    peer_blocks: Sequence[Sequence[int]]
    local_first: Sequence[int] = ()
    peer_first: Sequence[int] = ()
    tokens: int | None = None
    is_told: bool = False

    def first(self, group: int, *, is_local: bool) -> int:
        """Return the place of a list's first block."""
        firsts = self.local_first if is_local else self.peer_first
        return firsts[group] if group < len(firsts) else 0


@final
@dataclass
class MemoryOfRank:
    """A rank's registered memory as one array, with guard bytes on both ends."""

    geometry: RankGeometry
    start: int = field(init=False)
    data: Bytes = field(init=False)

    def __post_init__(self) -> None:
        regions = self.geometry.regions
        self.start = min(region.base_address for region in regions) - MARGIN
        stop = max(r.base_address + (r.page_count - 1) * r.page_stride_bytes + r.page_bytes for r in regions) + MARGIN
        self.data = np.full(stop - self.start, SENTINEL, dtype=np.uint8)

    def view(self, region: Region, member: Member, part: FieldLayout) -> npt.NDArray[np.uint8]:
        """Return the field as uint8 (pages, *axes, element bytes), a view into the memory."""
        at = region.base_address + member.offset_bytes + part.offset_bytes - self.start
        shape = (region.page_count, *(axis.count for axis in part.axes), part.element_bytes)
        strides = (region.page_stride_bytes, *(axis.stride_bytes for axis in part.axes), 1)
        return np.lib.stride_tricks.as_strided(self.data[at:], shape, strides)

    def place_tags(
        self,
        blocks: Sequence[Sequence[int]],
        request: Request,
        limits: Sequence[tuple[int, int] | None],
        *,
        is_local: bool,
    ) -> int:
        """Write the tags of all cells of the given blocks; returns the number of bytes written.

        Args:
            blocks: Scheduler block ids per group.
            request: Where the lists begin.
            limits: Per group the interval of tokens to write, or None for all.
            is_local: Which side of the request this rank is on.
        """
        written = 0
        for region in self.geometry.regions:
            for member in region.members:
                group = self.geometry.groups[member.group]
                ids = np.asarray(blocks[member.group], dtype=np.int64)
                first = request.first(member.group, is_local=is_local)
                pages, tokens = _pages_and_tokens(group, ids, first)
                for part in member.layout.fields:
                    if len(pages):
                        limit = limits[member.group]
                        written += _write_tags(
                            self.view(region, member, part), member.layer, part, pages, tokens, limit
                        )
        return written


def _pages_and_tokens(group: Group, ids: Ints, first: int) -> tuple[Ints, Ints]:
    """Return the pages of blocks, and the global token numbers in them, int64 (pages, page tokens)."""
    inside = np.arange(group.pages_per_block, dtype=np.int64)
    pages = flat_outer_sum(ids * group.pages_per_block, inside)
    if group.is_state:
        return pages, np.empty((len(pages), 0), dtype=np.int64)
    count = len(ids) * group.block_tokens
    held = first * group.block_tokens + np.arange(count, dtype=np.int64)
    deal = group.deal
    turn, place = held // deal.interleave_tokens, held % deal.interleave_tokens
    tokens = (turn * deal.size + deal.rank) * deal.interleave_tokens + place if deal.size > 1 else held
    return pages, grid(tokens, len(pages), group.page_tokens)


def _write_tags(
    view: Bytes, layer: str, part: FieldLayout, pages: Ints, tokens: Ints, limit: tuple[int, int] | None
) -> int:
    """Write the tags of some pages of a field, only for tokens inside `limit`; returns the bytes written."""
    shape = view.shape[1:]
    code = np.full((len(pages), *shape), zlib.crc32(f"{layer}/{part.name}".encode()), dtype=np.uint64)
    keep = np.ones((len(pages), *shape), dtype=np.bool_)
    for number, axis in enumerate(part.axes):
        if part.token_axis is axis:
            place = _spread(tokens, len(pages), number, len(shape))
            if limit is not None:
                keep &= (place >= limit[0]) & (place < limit[1])
        else:
            place = _spread(np.arange(axis.start, axis.stop, dtype=np.int64), 1, number, len(shape))
        code = _mix(code, place)
    if part.token_axis is None and tokens.shape[1]:
        # A block in a kernel's own order: its first token stands for it.
        place = _spread(tokens[:, :1], len(pages), 0, len(shape))
        code = _mix(code, place)
        if limit is not None:
            keep &= (place >= limit[0]) & (place < limit[1])
    code = _mix(code, np.arange(shape[-1], dtype=np.int64))
    tags = (code >> np.uint64(33)).astype(np.uint8)
    chosen = view[pages]
    view[pages] = np.where(keep, tags, chosen)
    return int(keep.sum())


def _spread(values: Ints, pages: int, number: int, depth: int) -> Ints:
    """Return values shaped to broadcast along one axis of a field, and along pages if there are as many."""
    shape = (pages, *(1 for _ in range(number)), -1, *(1 for _ in range(depth - number - 1)))
    return cast("Ints", np.reshape(values, shape))


def _mix(code: npt.NDArray[np.uint64], place: Ints) -> npt.NDArray[np.uint64]:
    """Fold one coordinate into a hash (an odd multiplier and a shift: cheap, and enough to tell neighbours apart)."""
    mixed: npt.NDArray[np.uint64] = (code ^ place.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return cast("npt.NDArray[np.uint64]", mixed ^ (mixed >> np.uint64(29)))
