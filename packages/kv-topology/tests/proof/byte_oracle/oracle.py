"""A byte oracle for geometries and plans, free of any test framework.

Theory of operation. One global tensor is imagined in which every byte is a tag of its layer, field, token and position.
Each producer rank's memory is filled with the tags of what it should hold; all other memory is filled with NaN. Then
every plan is *executed*: its rows and indices are turned into plain copies, which may take only tagged bytes of the
request's own blocks. At the end each ordered byte must be its tag. Every byte that a layer keeps in a block with an
ordered token must have been written exactly once, and no other byte at all: the host does not zero these blocks, so a byte
that is left keeps another request's value. The oracle shares no code with the planner beyond the description of the
geometry: it places tags by strided views, never by slices.

Worked example of placing tags. Blocks of 4 tokens dealt out over 2 ranks in turns of 2: rank 1 keeps tokens 2, 3, 6, 7 in
its first block. Its list begins at token 8 (place 1, own token 8 // 2 = 4), so its own tokens 4..7 are turns 2 and 3 of 2
tokens, which are the global turns 2 * 2 + 1 = 5 and 7: tokens 10, 11, 14, 15.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from kv_topology import BlockList, Cast, FieldLayout, Group, Member, RankGeometry, Region, TransferPlan
from kv_topology.arithmetic import Ints, Rows, flat_outer_sum
from kv_topology.plan.blocks import AnyBlockList

Rank = tuple[int, int]
Bytes = npt.NDArray[np.uint8]

_Byte = TypeVar("_Byte", np.uint8, np.bool_)
_SENTINEL = 0xFF
"""Byte that memory is filled with before a read: in every floating-point format of a cache it makes a NaN."""
_MARGIN = 4096
"""Guard bytes around a rank's registered memory, to catch reads and writes outside of it."""


@dataclass(frozen=True)
class Request:
    """A request: its block lists on both sides, and the end of what is ordered.

    Attributes:
        local: Block list per consumer group.
        peer: Block list per producer group.
        tokens: End of what is ordered, in tokens of the sequence.
    """

    local: Sequence[AnyBlockList]
    peer: Sequence[AnyBlockList]
    tokens: int


@dataclass
class MemoryOfRank:
    """A rank's registered memory as one array, with guard bytes on both ends."""

    geometry: RankGeometry
    casts: Mapping[int, Cast] = field(default_factory=dict[int, Cast])
    """Groups whose tags are those of narrower elements, cast by `_wider`."""
    start: int = field(init=False)
    data: Bytes = field(init=False)
    marks: npt.NDArray[np.bool_] = field(init=False)
    """True for bytes that have been given a tag."""

    def __post_init__(self) -> None:
        regions = self.geometry.regions
        self.start = min(region.base_address for region in regions) - _MARGIN
        stop = max(r.base_address + (r.page_count - 1) * r.page_stride_bytes + r.page_bytes for r in regions) + _MARGIN
        self.data = np.full(stop - self.start, _SENTINEL, dtype=np.uint8)
        self.marks = np.zeros(stop - self.start, dtype=np.bool_)

    def view(self, region: Region, member: Member, part: FieldLayout, of: npt.NDArray[_Byte]) -> npt.NDArray[_Byte]:
        """Return the field as (pages, *axes, element bytes), a view into `data` or `marks`."""
        at = region.base_address + member.offset_bytes + part.offset_bytes - self.start
        shape = (region.page_count, *(axis.count for axis in part.axes), part.element_bytes)
        strides = (region.page_stride_bytes, *(axis.stride_bytes for axis in part.axes), 1)
        return np.lib.stride_tricks.as_strided(of[at:], shape, strides)

    def place_tags(self, lists: Sequence[AnyBlockList], limits: Sequence[tuple[int, int]]) -> None:
        """Write the tags of all cells of the given blocks, and mark them.

        Args:
            lists: Block list per group; null blocks get no tags.
            limits: Per group the interval of tokens to write.
        """
        for region in self.geometry.regions:
            for member in region.members:
                pages, tokens = _pages_and_tokens(self.geometry.groups[member.group], lists[member.group])
                for part in member.layout.fields if len(pages) else ():
                    kind = self.casts.get(member.group)
                    tagged = part if kind is None else replace(part, element_bytes=kind.source_bytes)
                    tags, keep = _tags_of(member.layer, tagged, pages, tokens, limits[member.group])
                    if kind is not None:
                        tags, keep = _wider(tags, kind), keep[..., :1]
                    data = self.view(region, member, part, self.data)
                    marks = self.view(region, member, part, self.marks)
                    data[pages] = np.where(keep, tags, data[pages])
                    marks[pages] |= keep


class OracleFailure(AssertionError):  # noqa: N818 - the name says what happened
    """A plan moved wrong bytes, left some out, or touched memory that it must not touch."""


def expand_rows(rows: Rows) -> Rows:
    """Return the uint64 (n, 3) descriptors (address, length, device) that strided rows stand for, in index order."""
    counts = rows[:, 4].astype(np.int64)
    owner = np.repeat(np.arange(len(rows)), counts)
    place = np.arange(len(owner), dtype=np.uint64) - np.repeat(np.cumsum(counts) - counts, counts).astype(np.uint64)
    out: Rows = np.ascontiguousarray(rows[owner, :3])
    out[:, 0] += place * rows[owner, 3]
    return out


def execute(
    plan: TransferPlan, request: Request, memory: MemoryOfRank, producers: Mapping[Rank, MemoryOfRank], writes: Bytes
) -> None:
    """Carry out a plan as plain copies and count the writes per byte.

    Raises:
        OracleFailure: A descriptor leaves the registered memory or reads bytes without a tag, or pairs have different
            lengths.
    """
    route = plan.route(request.local, request.peer, tokens=request.tokens)
    for rank, (local, peer) in route.indices.items():
        here = expand_rows(plan.local_rows(rank))[local]
        there = expand_rows(plan.peer_rows(rank))[peer]
        if not np.array_equal(here[:, 1], there[:, 1]):
            raise OracleFailure(f"rank {rank}: paired descriptors have different lengths")
        source = producers[rank]
        for length in np.unique(here[:, 1]):
            chosen = here[:, 1] == length
            steps = np.arange(int(length), dtype=np.int64)
            target = np.add.outer(here[chosen, 0].astype(np.int64) - memory.start, steps)
            origin = np.add.outer(there[chosen, 0].astype(np.int64) - source.start, steps)
            _check_inside(target, memory, rank)
            _check_inside(origin, source, rank)
            if not source.marks[origin].all():
                raise OracleFailure(f"a descriptor of producer rank {rank} reads bytes that are not of this request")
            memory.data[target] = source.data[origin]
            writes += np.bincount(target.ravel(), minlength=len(writes)).astype(np.uint8)


def permute(plan: TransferPlan, request: Request, memory: MemoryOfRank) -> None:
    """Put the received pages of a staged plan in order, with numpy; a model of what an engine does on its device."""
    if not plan.is_staged:
        return
    for spec, pages in plan.route(request.local, request.peer, tokens=request.tokens).staged:
        region = memory.geometry.regions[spec.region]
        for page in pages.tolist():
            at = region.base_address + page * region.page_stride_bytes - memory.start
            target = memory.data[at : at + region.page_bytes]
            received = np.array(target, dtype=np.uint8)
            for move in spec.moves:
                shape = (*move.shape, move.element_bytes)
                source = np.lib.stride_tricks.as_strided(
                    received[move.source_offset :], shape, (*move.source_strides, 1)
                )
                cells = source if spec.cast is None else _wider(source, spec.cast)
                into = np.lib.stride_tricks.as_strided(
                    target[move.target_offset :], cells.shape, (*move.target_strides, 1)
                )
                into[...] = cells


def _wider(elements: Bytes, kind: Cast) -> Bytes:
    """Return elements (..., bytes) in the bytes of the target type: the model of a cast, by which every source byte is seen."""
    ratio = kind.target_bytes // kind.source_bytes
    return np.concatenate([elements ^ np.uint8(place) for place in range(ratio)], axis=-1)


def _check_inside(places: Ints, memory: MemoryOfRank, rank: Rank) -> None:
    if places.size and (places.min() < _MARGIN or places.max() >= len(memory.data) - _MARGIN):
        raise OracleFailure(f"a descriptor of producer rank {rank} leaves registered memory")


def check_plan(
    plan: TransferPlan,
    local: RankGeometry,
    producers: Mapping[Rank, MemoryOfRank],
    request: Request,
    limits: Sequence[tuple[int, int]],
) -> int:
    """Prove one consumer rank's plan for one request; return how many bytes were compared with their tag.

    Args:
        plan: The plan under test.
        local: The consumer rank's geometry.
        producers: Filled memory of the producer's ranks.
        request: Block lists.
        limits: Per local group the interval of tokens that must arrive.

    Raises:
        OracleFailure: With the first wrong byte.
    """
    casts = {region.group: region.cast for region in plan.staged_regions if region.cast is not None}
    memory, must, ordered = (MemoryOfRank(local, casts) for _ in range(3))
    writes = np.zeros(len(memory.data), dtype=np.uint8)
    execute(plan, request, memory, producers, writes)
    permute(plan, request, memory)
    must.place_tags(request.local, limits)
    _place_whole_blocks(ordered, request.local, request.tokens)
    rank = (local.pp_rank, local.tp_rank)
    wrong = np.flatnonzero((memory.data != must.data) & (must.marks | ~ordered.marks))
    if len(wrong):
        at = int(wrong[0])
        raise OracleFailure(
            f"byte {at - _MARGIN} of rank {rank} is {memory.data[at]:#x}, must be {must.data[at]:#x}; "
            f"{len(wrong)} bytes are wrong"
        )
    # Writes are counted before the permutation, which moves bytes within whole pages only. Narrower elements fill a part of them.
    if casts:
        ratio = {kind.target_bytes // kind.source_bytes for kind in casts.values()}.pop()
        states = sum(g.is_state for g in local.groups)
        if (writes > ordered.marks).any() or (not states and int(writes.sum()) * ratio != int(ordered.marks.sum())):
            raise OracleFailure(f"of {int(ordered.marks.sum())} bytes, {int(writes.sum())} narrower ones were written")
    amiss = np.flatnonzero(writes != ordered.marks) if not casts else np.empty(0, np.int64)
    if len(amiss):
        at = int(amiss[0])
        raise OracleFailure(
            f"byte {at - _MARGIN} of rank {rank} was written {writes[at]} times, must be {int(ordered.marks[at])}; "
            f"{int((ordered.marks & (writes == 0)).sum())} bytes of ordered blocks keep their old value, "
            f"{len(amiss)} bytes are amiss"
        )
    return int(must.marks.sum())


def prove(
    consumers: Mapping[Rank, RankGeometry],
    producers: Mapping[Rank, RankGeometry],
    request: Request,
    make_plan: Callable[[RankGeometry, Mapping[Rank, RankGeometry]], TransferPlan],
) -> int:
    """Prove all consumer ranks of an engine against all producer ranks for one request; return the bytes proved.

    Args:
        consumers: Geometry of the consumer's ranks by (pp, tp).
        producers: Geometry of the producer's ranks by (pp, tp).
        request: Block lists; the same for all ranks of an engine.
        make_plan: `plan_transfer`, or any function from (local, peers) to a plan.

    Raises:
        OracleFailure: A byte is wrong, left, written twice, or outside.
    """
    memories = {rank: MemoryOfRank(geometry) for rank, geometry in producers.items()}
    for memory in memories.values():
        _place_whole_blocks(memory, request.peer, request.tokens)
    proved = 0
    plans = {rank: make_plan(local, producers) for rank, local in consumers.items()}
    for rank, plan in plans.items():
        limits = _covered(consumers[rank], producers, request)
        proved += check_plan(plan, consumers[rank], memories, request, limits)
    check_readers(list(plans.values()), list(producers))
    if not proved:
        raise OracleFailure("no byte was compared")
    return proved


def _place_whole_blocks(memory: MemoryOfRank, lists: Sequence[AnyBlockList], tokens: int) -> None:
    """Place the tags of all cells of the blocks that hold an ordered token; of a state list, its last block."""
    groups = memory.geometry.groups
    ordered: list[AnyBlockList] = []
    for group, blocks in zip(groups, lists, strict=True):
        ids, first, null = blocks
        count = len(ids) if group.is_state else max(0, -(-(tokens - first) // group.span_tokens))
        ordered.append(BlockList(ids[:count], first, null))
    memory.place_tags(ordered, [(0, sys.maxsize)] * len(groups))


def check_readers(plans: Sequence[TransferPlan], producers: Sequence[Rank]) -> None:
    """Raise `OracleFailure` unless every producer rank gets as many reports as every plan says it will.

    Args:
        plans: The plans of all consumer ranks.
        producers: All producer ranks.
    """
    for rank in producers:
        reports = sum(rank in plan.producer_ranks or rank in plan.notify_only_ranks for plan in plans)
        counts = {plan.reader_count(rank) for plan in plans}
        if counts != {reports}:
            raise OracleFailure(f"producer rank {rank} gets {reports} reports, plans say {sorted(counts)}")


def _covered(local: RankGeometry, producers: Mapping[Rank, RankGeometry], request: Request) -> list[tuple[int, int]]:
    """Return per local group the tokens that must arrive: all that are ordered, but none that only a window hides."""
    limits = [(0, request.tokens)] * len(local.groups)
    for producer in producers.values():
        for layer, placed in producer.placements.items():
            if layer in local.placements:
                number = local.placements[layer][0][1].group
                window = local.groups[number].window_tokens
                _, begins, _ = request.peer[placed[0][1].group]
                if window and begins <= request.tokens - window + 1:
                    limits[number] = (begins, request.tokens)
    return limits


def _pages_and_tokens(group: Group, blocks: AnyBlockList) -> tuple[Ints, Ints]:
    """Return the pages of real blocks, and the global token numbers in them, int64 (pages, page tokens).

    Of a state group only the last block counts: the state after the ordered tokens.
    """
    block_ids, first, null = blocks
    ids = np.asarray(block_ids, dtype=np.int64)
    places = np.arange(len(ids), dtype=np.int64)
    if group.is_state:
        ids, places = ids[-1:], places[-1:]
    if null is not None:
        ids, places = ids[ids != null], places[ids != null]
    inside = np.arange(group.pages_per_block, dtype=np.int64)
    pages = flat_outer_sum(ids * group.pages_per_block, inside)
    if group.is_state:
        return pages, np.empty((len(pages), 0), dtype=np.int64)
    deal = group.deal
    own_first = first // deal.size
    held = flat_outer_sum(own_first + places * group.block_tokens, np.arange(group.block_tokens, dtype=np.int64))
    turn, place = held // deal.interleave_tokens, held % deal.interleave_tokens
    tokens = (turn * deal.size + deal.rank) * deal.interleave_tokens + place if deal.size > 1 else held
    return pages, tokens.reshape(len(pages), group.page_tokens)


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
