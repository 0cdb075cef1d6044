"""Pages of the cache as torch views, and conversion of received pages.

A view has the axes (region, page, word), strided, without a copy. Regions cut out of one allocation at equal distances form one
such view, a *family*, so that one call processes the pages of many layers. Memory is reached only through the allocations of
registered tensors.

Received pages of staged reads are permuted in steps. A step takes three kinds of calls, however many layers there are: gather
the pages, one strided copy per move, scatter them back. On a device with streams everything is queued, with page numbers from
pinned memory, and nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from vllm_adapter.host.device_streams import streams_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_adapter.host.device_streams import CudaStreams
    from vllm_adapter.ports import PageNumbers
    from vllm_adapter.worker.pages import ConversionStep, PageRange, Permutation

__all__ = ["PageFamily", "PageFinder", "TorchPages", "rounds"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@final
@dataclass(frozen=True, slots=True)
class PageFamily:
    """Regions at equal distances in one allocation, whose pages have the same stride.

    Attributes:
        storage: The allocation.
        device: Device of the allocation.
        start_bytes: Offset of page 0 of the first region in the allocation.
        stride_bytes: Distance from page to page.
        count: Pages per region.
        distance_bytes: Distance from region to region.
        size: Number of regions.
    """

    storage: torch.UntypedStorage
    device: torch.device
    start_bytes: int
    stride_bytes: int
    count: int
    distance_bytes: int = 0
    size: int = 1

    @property
    def places_bytes(self) -> tuple[int, int, int]:
        """Numbers that the word size must divide."""
        return self.start_bytes, self.stride_bytes, self.distance_bytes

    def grown(self, other: PageFamily) -> PageFamily | None:
        """Return the family with one more region; None if that region does not lie where the next one would."""
        is_alike = (self.stride_bytes, self.count) == (other.stride_bytes, other.count)
        gap_bytes = other.start_bytes - self.start_bytes
        if not is_alike or self.storage.data_ptr() != other.storage.data_ptr():
            return None
        if self.size > 1 and gap_bytes != self.size * self.distance_bytes:
            return None
        return replace(self, distance_bytes=gap_bytes // self.size, size=self.size + 1)

    def words(self, start_bytes: int, word_bytes: int, span: int) -> torch.Tensor:
        """Return `span` words of every page from `start_bytes` on, (region, page, word), in the engine's own memory."""
        words = torch.empty(0, dtype=_WORDS[word_bytes], device=self.device)
        return words.set_(
            self.storage,
            (self.start_bytes + start_bytes) // word_bytes,
            (self.size, self.count, span),
            (max(self.distance_bytes // word_bytes, 1), self.stride_bytes // word_bytes, 1),
        )


@final
class PageFinder:
    """Finds the families of page ranges, and caches them.

    Args:
        tensors: Tensors that the engine registered; ranges lie in these tensors' allocations.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._known: dict[tuple[PageRange, ...], tuple[PageFamily, ...]] = {}

    def families(self, ranges: tuple[PageRange, ...]) -> tuple[PageFamily, ...]:
        """Return the fewest families that hold all the ranges, which ascend.

        Raises:
            LookupError: A range is not in the engine's tensors.
        """
        if ranges not in self._known:
            self._known[ranges] = tuple(self._find(ranges))
        return self._known[ranges]

    def _find(self, ranges: Sequence[PageRange]) -> list[PageFamily]:
        found: list[PageFamily] = []
        for pages in ranges:
            base = max((base for base in self._tensors if base <= pages.address), default=None)
            stop = pages.address + (pages.count - 1) * pages.stride_bytes
            if base is None or stop >= base + self._tensors[base].untyped_storage().nbytes():
                raise LookupError(f"pages from {pages.address:#x} to {stop:#x} are in none of the engine's tensors")
            tensor = self._tensors[base]
            one = PageFamily(
                tensor.untyped_storage(), tensor.device, pages.address - base, pages.stride_bytes, pages.count
            )
            grown = found[-1].grown(one) if found else None
            found[-1:] = [grown] if grown is not None else [*found[-1:], one]
        return found


def rounds(regions: int, pages: int, fitting: int) -> Iterator[tuple[slice, slice]]:
    """Split (region, page) into pieces of at most `fitting` pages in total (at least one), as slices of both."""
    region_step = max(1, min(regions, fitting // pages))
    page_step = max(1, min(pages, fitting // region_step))
    for first in range(0, regions, region_step):
        for start in range(0, pages, page_step):
            yield slice(first, min(first + region_step, regions)), slice(start, min(start + page_step, pages))


_SCRATCH_BYTES = 16 << 20
"""Most bytes permuted at once. Twice this stays allocated after the first permutation: fresh memory costs more than copies."""


@final
class TorchPages:
    """Permutes pages in place on any device; queued on the calling thread's stream where there are streams.

    Args:
        tensors: The engine's registered tensors; steps may only name pages in their allocations.
        scratch_bytes: Most bytes of pages that are copied aside at once.
        streams: The device's streams; None to use torch's.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        *,
        scratch_bytes: int = _SCRATCH_BYTES,
        streams: CudaStreams | None = None,
    ) -> None:
        tensors = list(tensors)
        self._finder = PageFinder(tensors)
        self._streams = streams or (streams_of(tensors[0].device) if tensors else None)
        self._scratch_bytes = scratch_bytes
        self._scratch: torch.Tensor | None = None

    @torch.inference_mode()
    def convert(self, steps: Sequence[ConversionStep]) -> None:
        """Permute the pages of all steps, in place."""
        for step in steps:
            for family in self._finder.families(step.regions):
                self._convert(family, step.permutation(*family.places_bytes), step.pages)

    def _convert(self, family: PageFamily, how: Permutation, pages: PageNumbers) -> None:
        words = family.words(how.start_bytes, how.word_bytes, how.span)
        fitting = self._scratch_bytes // (how.span * how.word_bytes)
        for some_regions, some_pages in rounds(family.size, len(pages), fitting):
            part, chosen = words[some_regions], torch.from_numpy(pages[some_pages])
            if self._streams is None:
                self._permute_pages(part, chosen, how)
            else:
                pinned = self._streams.pinned(chosen.shape, chosen.dtype).copy_(chosen)
                self._streams.queue(self._streams.current(), partial(self._permute_pages, part, pinned, how))

    def _permute_pages(self, part: torch.Tensor, chosen: torch.Tensor, how: Permutation) -> None:
        chosen = chosen.to(part.device, non_blocking=True)
        received, final = self._aside(part, len(chosen))
        torch.index_select(part, 1, chosen, out=received)
        _permute(received, final, how)
        part.index_copy_(1, chosen, final)

    def _aside(self, like: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two dense (region, page, word) scratch tensors on the cache's device; their previous content is lost."""
        regions, _, span = like.shape
        needed_bytes = regions * pages * span * like.element_size()
        if self._scratch is None or self._scratch.numel() < 2 * needed_bytes:
            size = 2 * max(self._scratch_bytes, needed_bytes)
            self._scratch = torch.empty(size, dtype=torch.uint8, device=like.device)
        both = self._scratch[: 2 * needed_bytes].view(like.dtype).view(2, regions, pages, span)
        return both[0], both[1]


def _permute(received: torch.Tensor, final: torch.Tensor, how: Permutation) -> None:
    """Write received pages (region, page, word; dense) in their final order, and with our type of elements."""
    if how.cast is not None:
        received = received.view(getattr(torch, how.cast.source_type.removeprefix("torch.")))
        final = final.view(getattr(torch, how.cast.target_type.removeprefix("torch.")))
    for move in how.moves:
        source = _cells(received, move.shape, move.source_offset, move.source_strides)
        _cells(final, move.shape, move.target_offset, move.target_strides).copy_(source)


def _cells(pages: torch.Tensor, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a move's cells of dense pages, (region, page, *shape)."""
    regions, count, span = pages.shape
    every = (regions, count, *shape), (count * span, span, *strides)
    return pages.as_strided(*every, pages.storage_offset() + offset)
