"""Pages of the engine's tensors as torch sees them: (region, page, word), strided, without a copy.

Regions cut out of one allocation at equal distances form one such view, a *family*, so that one call processes the pages of
many layers. Memory is reached only through the allocations of registered tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_adapter.worker.pages import PageRange

__all__ = ["PageFamily", "PageFinder", "rounds"]

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

    def moved(self, storage: torch.UntypedStorage, device: torch.device) -> PageFamily:
        """Return the same family in another allocation."""
        return replace(self, storage=storage, device=device)

    def word_bytes(self, *lengths_bytes: int) -> int:
        """Return the widest word that divides all offsets of the family and these lengths."""
        return math.gcd(*self.places_bytes, *lengths_bytes)

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
