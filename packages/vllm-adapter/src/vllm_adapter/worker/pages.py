"""Completion of good reads on the engine thread: conversion of staged pages, and the host mirror of the cache.

Conversion of staged reads: received pages hold the producer's byte order and are permuted in place into ours.

Theory of operation. A staged plan reads whole pages as the producer stores them, because a direct plan would need a descriptor
for every run of bytes that is contiguous on both sides. For each local region, the plan lists the moves of a received page's
cells (`kv_topology.PageMove`, in bytes). This module turns them into a few *steps*: regions with the same permutation share
one step, cells that stay together are joined, and lengths are counted in the widest word that divides them all and the places
in memory. The host's tensor library executes a step over all its regions and pages at once (`torch_pages.py`); nothing here
touches memory. Elements of another type than ours are cast in the same step.

Worked example. A page of 2 heads x 4 tokens x 8 bytes was received tokens first and is wanted heads first. The plan's move is
`shape (1, 4, 2, 8)` for (unit, token, head, byte), `source_strides (64, 16, 8, 1)`, `target_strides (64, 8, 32, 1)`,
`element_bytes 1`. The axis of one unit drops out; the bytes of a cell are contiguous on both sides and become a run of 8. The
widest word that divides 8, 16 and 32 is 8 bytes, so in words the move is `shape (4, 2, 1)`, source strides (2, 1, 1), target
strides (1, 4, 1): word (token 3, head 1) goes from 3 * 2 + 1 = 7 to 3 * 1 + 1 * 4 = 7, word (1, 1) from 3 to 5.

Host-buffer mode: peers read and write a mirror of the cache in host memory, because NIXL cannot register the device's.

Theory of operation. The mirror has the same layout as the cache at other addresses, so geometry, plans and registration are the
same. The difference is when blocks are copied between the two.

- Producer: after the forward pass of a step, the blocks that the step computed for prompts that will be handed over are copied to
  the mirror. A separate thread makes the copies, in order; on a device with streams, behind an event. The ticket of a prompt that
  is complete with this step may be out before the next one, so the step waits for the copies of that prompt.
- Consumer: copies of received blocks to the device are queued on the engine thread before the read is reported.

A block may get a new owner while an old copy of it is still queued. Another prompt's copy comes later in the same order, but a
read into the mirror would not, so all copies are waited for before reads are given to the transfer thread.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import BlockIds, Cast, PageMove, PageNumbers, StagedRegion
    from vllm_adapter.steps import ReadEnd

__all__ = [
    "ConversionStep",
    "HostMirror",
    "MirrorMemory",
    "PageConverter",
    "PageCopy",
    "PageRange",
    "Permutation",
    "ReadCompletion",
    "conversion_steps",
    "page_ranges",
]

_WIDEST_WORD_BYTES = 8


class Permutation(NamedTuple):
    """A rearrangement of the words of a page.

    Attributes:
        word_bytes: 1, 2, 4 or 8; all other lengths are counted in such words, from the first permuted word on.
        start_bytes: First byte of the page that is permuted.
        span: Words that are permuted.
        moves: Moves, counted in words, that together write every word of the span exactly once; the last axis of each is
            contiguous on both sides. With a cast they are counted in elements, of the received and of the final page.
        cast: Types of the elements that change theirs; None if words move unchanged.
    """

    word_bytes: int
    start_bytes: int
    span: int
    moves: tuple[PageMove, ...]
    cast: Cast | None = None


@dataclass(frozen=True, slots=True, order=True)
class PageRange:
    """The pages of a region: page n begins at `address + n * stride_bytes`."""

    address: int
    stride_bytes: int
    count: int


class ConversionStep(NamedTuple):
    """A permutation of the same pages of several regions.

    Attributes:
        start: First byte of a page that is permuted.
        stop: Byte after the last that is permuted.
        moves: Copies within a page that together fill [start, stop).
        regions: Page ranges of the regions; each one once, ascending.
        pages: Numbers of the pages, each once.
        cast: Types of the elements where they change; else None.
    """

    start: int
    stop: int
    moves: tuple[PageMove, ...]
    regions: tuple[PageRange, ...]
    pages: PageNumbers
    cast: Cast | None = None

    def permutation(self, *places_bytes: int) -> Permutation:
        """Return the permutation in the widest words to which all these places in memory are aligned."""
        if self.cast is not None:
            return _casting(self.start, self.stop, self.moves, places_bytes, self.cast)
        return _permutation(self.start, self.stop, self.moves, places_bytes)


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
        for region in document["regions"]
    )


def conversion_steps(
    staged: Sequence[tuple[StagedRegion, PageNumbers]], ranges: Sequence[PageRange]
) -> tuple[ConversionStep, ...]:
    """Return the steps that complete a staged read, one per distinct permutation and group.

    Args:
        staged: Regions whose pages the plan leaves unpermuted, with the numbers of their pages.
        ranges: Page ranges, by region number.
    """
    alike: dict[tuple[int, int, int, tuple[PageMove, ...], Cast | None], tuple[set[PageRange], PageNumbers]] = {}
    for region, pages in staged:
        if len(pages):
            key = (region.group, region.start, region.stop, region.moves, region.cast)
            # A set, because pages that two layers share are read once and permuted once.
            alike.setdefault(key, (set(), pages))[0].add(ranges[region.region])
    return tuple(
        ConversionStep(start, stop, moves, tuple(sorted(places)), pages, cast)
        for (_, start, stop, moves, cast), (places, pages) in alike.items()
    )


@lru_cache(maxsize=256)
def _permutation(start: int, stop: int, moves: tuple[PageMove, ...], places_bytes: tuple[int, ...]) -> Permutation:
    joined = [(move, *_joined(move)) for move in moves]
    word_bytes = math.gcd(_WIDEST_WORD_BYTES, start, stop, *places_bytes)
    for move, run_bytes, axes in joined:
        strides = [stride for _, source, target in axes for stride in (source, target)]
        word_bytes = math.gcd(word_bytes, run_bytes, move.source_offset, move.target_offset, *strides)
    word_moves = tuple(
        replace(
            move,
            shape=(*(steps for steps, _, _ in axes), run_bytes // word_bytes),
            element_bytes=word_bytes,
            source_offset=(move.source_offset - start) // word_bytes,
            source_strides=(*(source // word_bytes for _, source, _ in axes), 1),
            target_offset=(move.target_offset - start) // word_bytes,
            target_strides=(*(target // word_bytes for _, _, target in axes), 1),
        )
        for move, run_bytes, axes in joined
    )
    return Permutation(word_bytes, start, (stop - start) // word_bytes, word_moves)


@lru_cache(maxsize=256)
def _casting(
    start: int, stop: int, moves: tuple[PageMove, ...], places_bytes: tuple[int, ...], cast: Cast
) -> Permutation:
    """Return moves of single elements; pages are gathered and scattered in words all the same."""
    word_bytes = math.gcd(_WIDEST_WORD_BYTES, start, stop, *places_bytes)
    counted = tuple(
        replace(
            move,
            source_offset=(move.source_offset - start) // cast.source_bytes,
            source_strides=tuple(stride // cast.source_bytes for stride in move.source_strides),
            target_offset=(move.target_offset - start) // cast.target_bytes,
            target_strides=tuple(stride // cast.target_bytes for stride in move.target_strides),
        )
        for move in moves
    )
    return Permutation(word_bytes, start, (stop - start) // word_bytes, counted, cast)


def _joined(move: PageMove) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the bytes of a run that stays together on both sides, and the remaining axes (steps, source, target stride).

    Example: cells of 8 bytes, axes (4, 8, 8), (2, 64, 32): the first axis is contiguous on both sides (its stride is the cell),
    so the run grows to 32 bytes; the second one is not contiguous at the source and stays.
    """
    run_bytes = move.element_bytes
    axes = [axis for axis in zip(move.shape, move.source_strides, move.target_strides, strict=True) if axis[0] > 1]
    while (touching := next((axis for axis in axes if axis[1] == axis[2] == run_bytes), None)) is not None:
        axes.remove(touching)
        run_bytes *= touching[0]
    return run_bytes, axes


class PageCopy(NamedTuple):
    """The same pages of several regions.

    Attributes:
        ranges: Page ranges in the mirror, ascending.
        page_bytes: Bytes of a page.
        pages: Page numbers, ascending, each once.
    """

    ranges: tuple[PageRange, ...]
    page_bytes: int
    pages: PageNumbers


class MirrorMemory(Protocol):
    """The device's cache and its mirror in host memory."""

    def mark(self) -> object:
        """Return a mark behind all the work that this thread has given the device so far."""
        ...

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror once `after` has been reached; the copies are complete when this returns. Any thread."""
        ...

    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the device once `after` has been reached, before any work that the calling thread gives the device next.

        On a device that works asynchronously the calling thread does not wait.
        """
        ...


@final
class HostMirror:
    """Copies blocks between the device and its mirror. Engine thread only.

    Args:
        memory: The device's cache and its mirror.
        document: This rank's geometry document, whose addresses are the mirror's.
    """

    def __init__(self, memory: MirrorMemory, document: GeometryDocument) -> None:
        self._memory = memory
        self._null_block = document["null_block"]
        self._pages_per_block = [group["pages_per_block"] for group in document["groups"]]
        self._regions = _regions_by_group(document)
        self._thread = ThreadPoolExecutor(1, "kv-host-saves")
        self._waiting: dict[str, list[Future[None]]] = {}
        self._reads_after: object = None

    def save(self, saves: Iterable[tuple[str, BlockIds]]) -> None:
        """Start copying (request, blocks per group) to the mirror, in this order."""
        after = self._memory.mark()
        for request_id, blocks in saves:
            copy = self._thread.submit(self._memory.save, self._copies(blocks), after)
            self._waiting.setdefault(request_id, []).append(copy)

    def settle(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Wait until all copies of these requests have ended; return the error of each request of which one failed."""
        failed: dict[str, str] = {}
        for request_id in request_ids:
            for future in self._waiting.pop(request_id, ()):
                error = future.exception()
                if error is not None:
                    failed[request_id] = f"{type(error).__name__}: {error}"
        return failed

    def then(self, request_id: str, action: Callable[[], None]) -> None:
        """Run an action after all copies of a request that were started so far; never if one of them failed."""
        copies = tuple(self._waiting.get(request_id, ()))

        def run() -> None:
            if all(copy.exception() is None for copy in copies):
                action()

        self._thread.submit(run)  # after these copies: the thread works in order

    def settle_device(self) -> None:
        """Wait until all copies have ended and the device has done all work of this thread, restores included; for shutdown."""
        self._thread.submit(self._memory.save, (), self._memory.mark()).result()

    def begin_reads(self) -> None:
        """Prepare for reads into blocks that had other owners until now: wait for all copies, and mark the device.

        This includes copies of forgotten requests; failures are kept for `settle`.
        """
        self._thread.submit(lambda: None).result()  # behind all copies: the thread works in order
        self._reads_after = self._memory.mark()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that will not be handed over."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def restore(self, blocks: BlockIds) -> None:
        """Copy received blocks to the device; raises any exception of the device.

        The blocks had their former owners until their read was ordered; work given to the device later does not touch them.
        """
        self._memory.restore(self._copies(blocks), self._reads_after)

    def close(self) -> None:
        """Stop the thread after its copies; idempotent."""
        self._thread.shutdown()

    def _copies(self, blocks: BlockIds) -> list[PageCopy]:
        copies: list[PageCopy] = []
        for ids, per_block, regions in zip(blocks, self._pages_per_block, self._regions, strict=True):
            held = sorted({block for block in ids if block != self._null_block})
            pages = np.array([n for block in held for n in range(block * per_block, (block + 1) * per_block)], np.int64)
            if held:
                copies += [PageCopy(ranges, page_bytes, pages) for page_bytes, ranges in regions.items()]
        return copies


def _regions_by_group(document: GeometryDocument) -> list[dict[int, tuple[PageRange, ...]]]:
    """Return the page ranges of each group's regions by page size; ranges that layers share are listed once."""
    found: list[dict[int, set[PageRange]]] = [{} for _ in document["groups"]]
    for region, pages in zip(document["regions"], page_ranges(document), strict=True):
        for group in {number for _, _, number, _ in region["members"]}:
            found[group].setdefault(region["page_bytes"], set()).add(pages)
    return [{page_bytes: tuple(sorted(ranges)) for page_bytes, ranges in by_size.items()} for by_size in found]


@final
@dataclass(frozen=True, slots=True)
class ReadCompletion:
    """Completes good reads. Engine thread only.

    Attributes:
        converter: Permutes the bytes of received pages; None if no plan needs that.
        mirror: Copies received blocks to the device; None without host-buffer mode.
        recorder: Records observations.
        ranges: Page ranges of this rank, by region number.
    """

    converter: PageConverter | None
    mirror: HostMirror | None
    recorder: Recorder
    ranges: tuple[PageRange, ...]

    def complete(self, end: ReadEnd) -> ReadEnd:
        """Complete a good read and return its end, which is a failed one if a step failed."""
        if end.staged:
            convert = partial(self._convert, end)
            end = self._attempt(end, "conversion", convert, "conversion-failed", "num_failed_conversions")
        if end.is_ok and self.mirror is not None and end.order.is_reported:
            restore = partial(self.mirror.restore, [blocks.ids for blocks in end.order.local_blocks])
            end = self._attempt(end, "mirror_restore", restore, "mirror-copy-failed", "num_failed_mirror_copies")
        return end

    def _convert(self, end: ReadEnd) -> None:
        if self.converter is None:
            raise RuntimeError("a staged plan was made without a converter")
        self.converter.convert(conversion_steps(end.staged, self.ranges))

    def _attempt(self, end: ReadEnd, step: str, action: Callable[[], None], code: str, counter: str) -> ReadEnd:
        """Run a completion step, record its duration, and turn an exception into a failed end."""
        began_s = time.perf_counter()
        try:
            action()
        except Exception as error:  # noqa: BLE001  (the request fails, the engine goes on)
            self.recorder.trouble(f"completion of a read ({step})", error, f"request {end.order.request_id}")
            self.recorder.count(counter)
            return end.failed(code, f"{type(error).__name__}: {error}")
        self.recorder.observe(f"{step}_duration", time.perf_counter() - began_s)
        return end
