"""A rank's registered memory as an array, filled with tags: the part of the byte oracle that knows no plans.

Worked example. Blocks of 4 tokens dealt out over 2 ranks in turns of 2: rank 1 keeps tokens 2, 3, 6, 7 in its first
block. Its list begins at token 8 (place 1, own token 8 // 2 = 4), so its own tokens 4..7 are turns 2 and 3 of 2 tokens,
which are the global turns 2 * 2 + 1 = 5 and 7: tokens 10, 11, 14, 15.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast, final

import numpy as np

from kv_topology._arrays import flat_outer_sum, grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_topology._arrays import Ints
    from kv_topology._lists import BlockListLike
    from kv_topology._model import FieldLayout, Group, Member, RankGeometry, Region

    Bytes = npt.NDArray[np.uint8]

__all__ = ["MARGIN", "SENTINEL", "MemoryOfRank", "Request"]

_Byte = TypeVar("_Byte", np.uint8, np.bool_)
SENTINEL = 0xFF
"""Byte that memory is filled with before a read: in every floating-point format of a cache it makes a NaN."""
MARGIN = 4096
"""Guard bytes around a rank's registered memory, to catch reads and writes outside of it."""


@final
@dataclass(frozen=True)
class Request:
    """A request: its block lists on both sides, and the end of what is ordered.

    Attributes:
        local: Block list per consumer group.
        peer: Block list per producer group.
        tokens: End of what is ordered, in tokens of the sequence.
    """

    local: Sequence[BlockListLike]
    peer: Sequence[BlockListLike]
    tokens: int


@final
@dataclass
class MemoryOfRank:
    """A rank's registered memory as one array, with guard bytes on both ends."""

    geometry: RankGeometry
    start: int = field(init=False)
    data: Bytes = field(init=False)
    marks: npt.NDArray[np.bool_] = field(init=False)
    """True for bytes that have been given a tag."""

    def __post_init__(self) -> None:
        regions = self.geometry.regions
        self.start = min(region.base_address for region in regions) - MARGIN
        stop = max(r.base_address + (r.page_count - 1) * r.page_stride_bytes + r.page_bytes for r in regions) + MARGIN
        self.data = np.full(stop - self.start, SENTINEL, dtype=np.uint8)
        self.marks = np.zeros(stop - self.start, dtype=np.bool_)

    def view(self, region: Region, member: Member, part: FieldLayout, of: npt.NDArray[_Byte]) -> npt.NDArray[_Byte]:
        """Return the field as (pages, *axes, element bytes), a view into `data` or `marks`."""
        at = region.base_address + member.offset_bytes + part.offset_bytes - self.start
        shape = (region.page_count, *(axis.count for axis in part.axes), part.element_bytes)
        strides = (region.page_stride_bytes, *(axis.stride_bytes for axis in part.axes), 1)
        return np.lib.stride_tricks.as_strided(of[at:], shape, strides)

    def place_tags(self, lists: Sequence[BlockListLike], limits: Sequence[tuple[int, int]]) -> None:
        """Write the tags of all cells of the given blocks, and mark them.

        Args:
            lists: Block list per group; null blocks get no tags.
            limits: Per group the interval of tokens to write.
        """
        for region in self.geometry.regions:
            for member in region.members:
                pages, tokens = _pages_and_tokens(self.geometry.groups[member.group], lists[member.group])
                for part in member.layout.fields if len(pages) else ():
                    tags, keep = _tags_of(member.layer, part, pages, tokens, limits[member.group])
                    data = self.view(region, member, part, self.data)
                    marks = self.view(region, member, part, self.marks)
                    data[pages] = np.where(keep, tags, data[pages])
                    marks[pages] |= keep


def _pages_and_tokens(group: Group, blocks: BlockListLike) -> tuple[Ints, Ints]:
    """Return the pages of real blocks, and the global token numbers in them, int64 (pages, page tokens).

    Of a state group only the last block counts: the state after the ordered tokens.
    """
    ids = np.asarray(blocks.ids, dtype=np.int64)
    places = np.arange(len(ids), dtype=np.int64)
    if group.is_state:
        ids, places = ids[-1:], places[-1:]
    if blocks.null is not None:
        ids, places = ids[ids != blocks.null], places[ids != blocks.null]
    inside = np.arange(group.pages_per_block, dtype=np.int64)
    pages = flat_outer_sum(ids * group.pages_per_block, inside)
    if group.is_state:
        return pages, np.empty((len(pages), 0), dtype=np.int64)
    deal = group.deal
    own_first = blocks.first_token // deal.size
    held = flat_outer_sum(own_first + places * group.block_tokens, np.arange(group.block_tokens, dtype=np.int64))
    turn, place = held // deal.interleave_tokens, held % deal.interleave_tokens
    tokens = (turn * deal.size + deal.rank) * deal.interleave_tokens + place if deal.size > 1 else held
    return pages, grid(tokens, len(pages), group.page_tokens)


def _tags_of(
    layer: str, part: FieldLayout, pages: Ints, tokens: Ints, limit: tuple[int, int]
) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """Return the tags of some pages of a field, and which of them lie inside `limit`; (pages, *axes, element bytes)."""
    shape = (*(axis.count for axis in part.axes), part.element_bytes)
    code = np.full((len(pages), *shape), zlib.crc32(f"{layer}/{part.name}".encode()), dtype=np.uint64)
    keep = np.ones((len(pages), *shape), dtype=np.bool_)
    for number, axis in enumerate(part.axes):
        if part.token_axis is axis:
            place = _spread(tokens, len(pages), number, len(shape))
            keep &= (place >= limit[0]) & (place < limit[1])
        else:
            place = _spread(np.arange(axis.start, axis.stop, dtype=np.int64), 1, number, len(shape))
        code = _mix(code, place)
    if part.token_axis is None:
        # A page of a state is identified by its place in the state; a block in a kernel's own order, by its first token.
        place = tokens[:, :1] if tokens.shape[1] else np.arange(len(pages), dtype=np.int64)[:, None]
        place = _spread(place, len(pages), 0, len(shape))
        code = _mix(code, place)
        if tokens.shape[1]:
            keep &= (place >= limit[0]) & (place < limit[1])
    code = _mix(code, np.arange(shape[-1], dtype=np.int64))
    return (code >> np.uint64(33)).astype(np.uint8), keep


def _spread(values: Ints, pages: int, number: int, depth: int) -> Ints:
    """Return values shaped to broadcast along one axis of a field, and along pages if there are as many."""
    shape = (pages, *(1 for _ in range(number)), -1, *(1 for _ in range(depth - number - 1)))
    return cast("Ints", np.reshape(values, shape))


def _mix(code: npt.NDArray[np.uint64], place: Ints) -> npt.NDArray[np.uint64]:
    """Fold one coordinate into a hash (an odd multiplier and a shift: cheap, and enough to tell neighbours apart)."""
    mixed: npt.NDArray[np.uint64] = (code ^ place.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return cast("npt.NDArray[np.uint64]", mixed ^ (mixed >> np.uint64(29)))
