"""Conversion of staged reads: received pages hold the producer's byte order and are permuted in place into ours.

Theory of operation. A staged plan reads whole pages as the producer stores them, because a direct plan would need a descriptor
for every run of bytes that is contiguous on both sides. For each local region, the plan lists the moves of a received page's
cells (`kv_topology.PageMove`, in bytes). This module turns them into a few *steps*: regions with the same permutation share
one step, neighbouring cells that stay together are joined, and lengths are counted in the widest word that divides them all.
The host's tensor library executes a step over all its regions and pages at once (`torch_pages.py`); nothing here touches memory.

Worked example. A page of 2 heads x 4 tokens x 8 bytes was received tokens first and is wanted heads first. The plan's move is
`shape (1, 4, 2, 8)` for (unit, token, head, byte), `source_strides (64, 16, 8, 1)`, `target_strides (64, 8, 32, 1)`,
`element_bytes 1`. The axis of one unit drops out; the bytes of a cell are contiguous on both sides and become a run of 8. The
widest word that divides 8, 16 and 32 is 8 bytes, so in words the move is `shape (4, 2, 1)`, source strides (2, 1, 1), target
strides (1, 4, 1): word (token 3, head 1) goes from 3 * 2 + 1 = 7 to 3 * 1 + 1 * 4 = 7, word (1, 1) from 3 to 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.ports import PageMove, PageNumbers, StagedRegion

__all__ = ["ConversionStep", "PageConverter", "PageRange", "Permutation", "WordMove", "conversion_steps", "page_ranges"]

_WIDEST_WORD_BYTES = 8


class _PlainMove(NamedTuple):
    """A move of the plan as a hashable value, in bytes."""

    shape: tuple[int, ...]
    element_bytes: int
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]


class _JoinedAxis(NamedTuple):
    """An axis that remains in a move: its number of steps, and bytes per step on both sides."""

    steps: int
    source: int
    target: int


class _JoinedMove(NamedTuple):
    """A move whose contiguous axes are joined, with its start on both sides, in bytes from the first permuted byte."""

    axes: tuple[_JoinedAxis, ...]
    run_bytes: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class WordMove:
    """A strided copy from a received page to the final one, in words; the last axis is contiguous on both sides."""

    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    def narrowed(self, parts: int) -> WordMove:
        """Return the same move in words of 1/`parts` of the width."""
        return WordMove(
            (*self.shape[:-1], self.shape[-1] * parts),
            self.source_offset * parts,
            (*(stride * parts for stride in self.source_strides[:-1]), 1),
            self.target_offset * parts,
            (*(stride * parts for stride in self.target_strides[:-1]), 1),
        )


@dataclass(frozen=True, slots=True)
class Permutation:
    """A rearrangement of the words of a page.

    Attributes:
        word_bytes: 1, 2, 4 or 8; all other lengths are counted in such words, from the first permuted word on.
        start_bytes: First byte of the page that is permuted.
        span: Words that are permuted.
        moves: Moves that together write every word of the span exactly once.
    """

    word_bytes: int
    start_bytes: int
    span: int
    moves: tuple[WordMove, ...]

    def aligned(self, *places_bytes: int) -> Permutation:
        """Return the same permutation in words small enough that all these memory addresses are aligned to them."""
        word_bytes = math.gcd(self.word_bytes, *places_bytes)
        parts = self.word_bytes // word_bytes
        if parts == 1:
            return self
        return Permutation(
            word_bytes, self.start_bytes, self.span * parts, tuple(move.narrowed(parts) for move in self.moves)
        )


@dataclass(frozen=True, slots=True)
class PageRange:
    """The pages of a region: page n begins at `address + n * stride_bytes`."""

    address: int
    stride_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """A permutation of the same pages of several regions.

    Attributes:
        permutation: Permutation to apply to each page.
        regions: Page ranges of the regions; each one once, ascending.
        pages: Numbers of the pages, each once.
    """

    permutation: Permutation
    regions: tuple[PageRange, ...]
    pages: PageNumbers


class PageConverter(Protocol):
    """Executes steps on the cache memory."""

    def convert(self, steps: Sequence[ConversionStep]) -> None:
        """Permute pages in place, before any work that the calling thread gives the device next.

        If this raises, the content of the pages is invalid.
        """
        ...


def page_ranges(document: GeometryDocument) -> tuple[PageRange, ...]:
    """Return the page ranges of a geometry document, by region number."""
    return tuple(
        PageRange(region["base_address"], region["page_stride_bytes"], region["page_count"])
        for region in document.get("regions", ())
    )


def conversion_steps(
    staged: Sequence[tuple[StagedRegion, PageNumbers]], ranges: Sequence[PageRange]
) -> tuple[ConversionStep, ...]:
    """Return the steps that complete a staged read, one per distinct permutation and group.

    Args:
        staged: Regions whose pages the plan leaves unpermuted, with the numbers of their pages.
        ranges: Page ranges, by region number.
    """
    alike: dict[tuple[int, int, int, tuple[_PlainMove, ...]], tuple[set[PageRange], PageNumbers]] = {}
    for region, pages in staged:
        if len(pages):
            key = (region.group, region.start, region.stop, tuple(_plain(move) for move in region.moves))
            # A set, because pages that two layers share are read once and permuted once.
            alike.setdefault(key, (set(), pages))[0].add(ranges[region.region])
    return tuple(
        ConversionStep(_permutation(start, stop, moves), tuple(sorted(places, key=lambda p: p.address)), pages)
        for (_, start, stop, moves), (places, pages) in alike.items()
    )


def _plain(move: PageMove) -> _PlainMove:
    return _PlainMove(
        tuple(move.shape),
        move.element_bytes,
        move.source_offset,
        tuple(move.source_strides),
        move.target_offset,
        tuple(move.target_strides),
    )


@lru_cache(maxsize=256)
def _permutation(start: int, stop: int, moves: tuple[_PlainMove, ...]) -> Permutation:
    """Return a page's moves in the widest word that divides all their lengths, places and strides."""
    joined = [_join(move, start) for move in moves]
    word_bytes = math.gcd(_WIDEST_WORD_BYTES, start, stop - start)
    for move in joined:
        strides = [stride for axis in move.axes for stride in (axis.source, axis.target)]
        word_bytes = math.gcd(word_bytes, move.run_bytes, move.source, move.target, *strides)
    return Permutation(
        word_bytes, start, (stop - start) // word_bytes, tuple(_in_words(move, word_bytes) for move in joined)
    )


def _in_words(move: _JoinedMove, word_bytes: int) -> WordMove:
    return WordMove(
        (*(axis.steps for axis in move.axes), move.run_bytes // word_bytes),
        move.source // word_bytes,
        (*(axis.source // word_bytes for axis in move.axes), 1),
        move.target // word_bytes,
        (*(axis.target // word_bytes for axis in move.axes), 1),
    )


def _join(move: _PlainMove, start: int) -> _JoinedMove:
    """Return the axes that remain of a move after joining those that are contiguous on both sides.

    Example: cells of 8 bytes, axes (count, source, target) = (4, 8, 8), (2, 64, 32): the first axis is contiguous (its stride
    is the cell), so the run grows to 32 bytes; the second one is not contiguous at the source (64) and stays.
    """
    run_bytes = move.element_bytes
    axes = [
        _JoinedAxis(*axis)
        for axis in zip(move.shape, move.source_strides, move.target_strides, strict=True)
        if axis[0] > 1
    ]
    while (touching := next((axis for axis in axes if axis.source == axis.target == run_bytes), None)) is not None:
        axes.remove(touching)
        run_bytes *= touching.steps
    joined: list[_JoinedAxis] = []
    for axis in sorted(axes, key=lambda axis: axis.source, reverse=True):
        merged = axis
        if joined and joined[-1][1:] == (axis.source * axis.steps, axis.target * axis.steps):
            # The outer axis continues where the inner one ends, on both sides, so the two become one axis.
            merged = axis._replace(steps=axis.steps * joined.pop().steps)
        joined.append(merged)
    return _JoinedMove(tuple(joined), run_bytes, move.source_offset - start, move.target_offset - start)
