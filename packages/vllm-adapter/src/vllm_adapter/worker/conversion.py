"""Conversion of staged reads: their pages hold the producer's order of bytes and are put in ours, in place.

Theory of operation. A staged plan reads whole pages as the producer keeps them, because a direct one would need a descriptor
for every run of bytes that is contiguous on both sides. The plan says, per local region, which cells of a received page go
where (`kv_topology.PageMove`, in bytes). Here these become a few *steps*: regions whose pages are permuted alike share one,
neighbouring cells that stay together are joined, and lengths are counted in the widest word that divides them all. A step is
executed by the host's tensor library over all its regions and pages at once (`torch_pages.py`); nothing here touches memory.

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

    from vllm_adapter.ports import GeometryDocument, PageMove, PageNumbers, StagedRegion

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
    """An axis that is left of a move: its steps, and bytes per step on both sides."""

    steps: int
    source: int
    target: int


class _JoinedMove(NamedTuple):
    """A move whose contiguous axes are joined: where it begins on both sides, in bytes from the first permuted byte."""

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
        """Return the same move in words of a `parts`th of the width."""
        return WordMove(
            (*self.shape[:-1], self.shape[-1] * parts),
            self.source_offset * parts,
            (*(stride * parts for stride in self.source_strides[:-1]), 1),
            self.target_offset * parts,
            (*(stride * parts for stride in self.target_strides[:-1]), 1),
        )


@dataclass(frozen=True, slots=True)
class Permutation:
    """How the words of a page change places.

    Attributes:
        word_bytes: 1, 2, 4 or 8; all else is counted in such words, from the first one that is permuted.
        start_bytes: First byte of the page that is permuted.
        span: Words that are permuted.
        moves: Together they write every word of the span once.
    """

    word_bytes: int
    start_bytes: int
    span: int
    moves: tuple[WordMove, ...]

    def aligned(self, *places_bytes: int) -> Permutation:
        """Return the same permutation in words on whose borders all these places of memory lie."""
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
        permutation: Reordering that is done to each page.
        regions: Where the pages are; each place once, ascending.
        pages: Numbers of the pages, each once.
    """

    permutation: Permutation
    regions: tuple[PageRange, ...]
    pages: PageNumbers


class PageConverter(Protocol):
    """Executes steps on the memory that the engine gave to its layers."""

    def convert(self, steps: Sequence[ConversionStep]) -> None:
        """Permute in place, in order before whatever the calling thread gives the device next.

        Whatever it raises, the pages then hold nothing of use.
        """
        ...


def page_ranges(document: GeometryDocument) -> tuple[PageRange, ...]:
    """Return where the pages of a geometry document's regions are, by region number."""
    return tuple(
        PageRange(region["base_address"], region["page_stride_bytes"], region["page_count"])
        for region in document.get("regions", ())
    )


def conversion_steps(
    staged: Sequence[tuple[StagedRegion, PageNumbers]], ranges: Sequence[PageRange]
) -> tuple[ConversionStep, ...]:
    """Return the steps that complete a staged read, one per distinct permutation and group.

    Args:
        staged: Regions that the plan leaves to be put in order, with the numbers of their pages.
        ranges: Where the pages are, by region number.
    """
    alike: dict[tuple[int, int, int, tuple[_PlainMove, ...]], tuple[set[PageRange], PageNumbers]] = {}
    for region, pages in staged:
        if len(pages):
            key = (region.group, region.start, region.stop, tuple(_plain(move) for move in region.moves))
            # A set: what two layers share is read once, and permuted once.
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
    """Return the axes that are left of a move after joining what is contiguous on both sides.

    Example: cells of 8 bytes, axes (count, source, target) = (4, 8, 8), (2, 64, 32): the first axis touches (its steps
    are the cell), so the run grows to 32 bytes; the second one does not touch at the source (64) and stays.
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
            # The outer axis goes on where the inner one ends, on both sides: together they are one.
            merged = axis._replace(steps=axis.steps * joined.pop().steps)
        joined.append(merged)
    return _JoinedMove(tuple(joined), run_bytes, move.source_offset - start, move.target_offset - start)
