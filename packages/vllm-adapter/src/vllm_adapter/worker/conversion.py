"""What a staged read leaves to be done: its pages hold the producer's order and are put in ours, in place.

Theory of operation. A staged plan reads whole pages as the producer keeps them, because a direct one would need a descriptor
for every run of bytes that is contiguous on both sides. The plan says, per local region, which cells of a received page go
where (`kv_topology.PageMove`, in bytes). Here these become a few *steps*: regions whose pages are permuted alike share one,
neighbouring cells that stay together are joined, and lengths are counted in the widest word that divides them all. A step is
executed by the host's tensor library over all its regions and pages at once (`_torch_pages.py`); nothing here touches memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports import PageMove, PageNumbers, StagedRegion

__all__ = ["ConversionStep", "PageConverter", "PageRange", "Permutation", "WordMove", "conversion_steps", "page_ranges"]

_WIDEST_WORD_BYTES = 8
_PlainMove = tuple[tuple[int, ...], int, int, tuple[int, ...], int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WordMove:
    """One strided copy from a received page to the final one, in words; the last axis is contiguous on both sides."""

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
    """One permutation of the same pages of several regions.

    Attributes:
        permutation: What is done to each page.
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


def page_ranges(document: Mapping[str, object]) -> tuple[PageRange, ...]:
    """Return where the pages of a geometry document's regions are, by region number."""
    regions = cast("Sequence[Mapping[str, Any]]", document.get("regions", ()))
    return tuple(PageRange(r["base_address"], r["page_stride_bytes"], r["page_count"]) for r in regions)


def conversion_steps(
    staged: Sequence[tuple[StagedRegion, PageNumbers]], ranges: Sequence[PageRange]
) -> tuple[ConversionStep, ...]:
    """Return the steps that complete a staged read, one per distinct permutation and group.

    Args:
        staged: What the plan says is left to be done.
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
    return (
        tuple(move.shape),
        move.element_bytes,
        move.source_offset,
        tuple(move.source_strides),
        move.target_offset,
        tuple(move.target_strides),
    )


@lru_cache(maxsize=256)
def _permutation(start: int, stop: int, moves: tuple[_PlainMove, ...]) -> Permutation:
    joined = [(*_join(move), move[2] - start, move[4] - start) for move in moves]
    word_bytes = math.gcd(_WIDEST_WORD_BYTES, start, stop - start)
    for axes, run_bytes, source, target in joined:
        steps = [step for _, *both in axes for step in both]
        word_bytes = math.gcd(word_bytes, run_bytes, source, target, *steps)
    return Permutation(
        word_bytes,
        start,
        (stop - start) // word_bytes,
        tuple(
            WordMove(
                (*(count for count, _, _ in axes), run_bytes // word_bytes),
                source // word_bytes,
                (*(here // word_bytes for _, here, _ in axes), 1),
                target // word_bytes,
                (*(there // word_bytes for _, _, there in axes), 1),
            )
            for axes, run_bytes, source, target in joined
        ),
    )


def _join(move: _PlainMove) -> tuple[list[tuple[int, int, int]], int]:
    """Return the axes (count, source stride, target stride) that are left of a move, and its contiguous run in bytes."""
    shape, run_bytes, _, source_strides, _, target_strides = move
    axes = [axis for axis in zip(shape, source_strides, target_strides, strict=True) if axis[0] > 1]
    while (touching := next((axis for axis in axes if axis[1] == axis[2] == run_bytes), None)) is not None:
        axes.remove(touching)
        run_bytes *= touching[0]
    joined: list[tuple[int, int, int]] = []
    for count, source, target in sorted(axes, key=lambda axis: axis[1], reverse=True):
        if joined and joined[-1][1:] == (source * count, target * count):
            count *= joined.pop()[0]  # noqa: PLW2901  (the outer axis goes on where the inner one ends, on both sides)
        joined.append((count, source, target))
    return joined, run_bytes
