"""The pages of this rank's layers as torch sees them: permutes what staged reads brought. Imported in the host's process only.

The tensors that the engine registered are held and looked at as words: (region, page, word), strided, without a copy. Layers
that the engine cut out of one allocation at equal distances are one such view, so that a step is three kinds of call however
many layers there are: gather the pages, one strided copy per move, scatter them back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm_adapter.conversion import ConversionStep, PageRange, Permutation
    from vllm_adapter.ports import PageNumbers

__all__ = ["TorchPages"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCRATCH_BYTES = 16 << 20
"""Pages that are permuted at once. Twice this stays taken once something was permuted: fresh memory costs more than copies."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Regions at equal distances in one allocation, whose pages have the same stride.

    Attributes:
        storage: The allocation.
        device: Where it is.
        start_bytes: Page 0 of the first region in it.
        stride_bytes: From page to page.
        count: Pages per region.
        distance_bytes: From region to region.
        size: Number of regions.
    """

    storage: torch.UntypedStorage
    device: torch.device
    start_bytes: int
    stride_bytes: int
    count: int
    distance_bytes: int = 0
    size: int = 1

    def grown(self, other: _Family) -> _Family | None:
        """Return the family with one more region, None if that does not lie where the next one would."""
        is_alike = (self.stride_bytes, self.count) == (other.stride_bytes, other.count)
        gap_bytes = other.start_bytes - self.start_bytes
        if not is_alike or self.storage.data_ptr() != other.storage.data_ptr():
            return None
        if self.size > 1 and gap_bytes != self.size * self.distance_bytes:
            return None
        return replace(self, distance_bytes=gap_bytes // self.size, size=self.size + 1)


@final
class TorchPages:
    """Permutes pages in place on whatever device they are; queued on the calling thread's stream where there are streams.

    Args:
        tensors: What the engine registered; steps may name pages in these tensors' allocations only.
        scratch_bytes: Bound of the pages that are copied aside at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, scratch_bytes: int = _SCRATCH_BYTES) -> None:
        self._tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._scratch_bytes = scratch_bytes
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None
        self._families: dict[tuple[PageRange, ...], tuple[_Family, ...]] = {}

    @torch.inference_mode()
    def convert(self, steps: Sequence[ConversionStep]) -> None:
        """Permute the pages of all steps, in place."""
        for step in steps:
            families = self._families.get(step.regions)
            if families is None:
                families = self._families[step.regions] = self._find(step.regions)
            for family in families:
                self._convert(family, step.permutation, step.pages)

    def _convert(self, family: _Family, how: Permutation, pages: PageNumbers) -> None:
        how = how.aligned(family.start_bytes, family.stride_bytes, family.distance_bytes)
        words = _view(family, how)
        fitting = max(1, self._scratch_bytes // (how.span * how.word_bytes))
        for first, last in _parts(family.size, max(1, fitting // len(pages))):
            part = words[first:last]
            for start, stop in _parts(len(pages), max(1, fitting // (last - first))):
                chosen = torch.from_numpy(pages[start:stop]).to(words.device)
                received, final = self._aside(words, last - first, stop - start, how.span)
                torch.index_select(part, 1, chosen, out=received)
                _permute(received, final, how)
                part.index_copy_(1, chosen, final)

    def _find(self, ranges: Sequence[PageRange]) -> tuple[_Family, ...]:
        """Return as few families as hold all the regions."""
        found: list[_Family] = []
        for pages in ranges:
            base = max((base for base in self._tensors if base <= pages.address), default=None)
            stop = pages.address + (pages.count - 1) * pages.stride_bytes
            if base is None or stop >= base + self._tensors[base].untyped_storage().nbytes():
                raise LookupError(f"pages from {pages.address:#x} to {stop:#x} are in none of the engine's tensors")
            tensor = self._tensors[base]
            one = _Family(
                tensor.untyped_storage(), tensor.device, pages.address - base, pages.stride_bytes, pages.count
            )
            grown = found[-1].grown(one) if found else None
            found[-1:] = [grown] if grown is not None else [*found[-1:], one]
        return tuple(found)

    def _aside(self, like: torch.Tensor, regions: int, pages: int, span: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two dense (region, page, word) tensors beside the cache; what they held before is gone."""
        count = regions * pages * span
        needed_bytes = count * like.element_size()
        if self._scratch is None or self._scratch[0].numel() < needed_bytes:
            size = max(self._scratch_bytes, needed_bytes)
            made = (torch.empty(size, dtype=torch.uint8, device=like.device) for _ in range(2))
            self._scratch = (next(made), next(made))
        one, two = (place[:needed_bytes].view(like.dtype).view(regions, pages, span) for place in self._scratch)
        return one, two


def _permute(received: torch.Tensor, final: torch.Tensor, how: Permutation) -> None:
    """Write received pages (region, page, word; dense) in their final order."""
    regions, pages, span = received.shape
    for move in how.moves:
        shape = (regions, pages, *move.shape)
        source = received.as_strided(
            shape, (pages * span, span, *move.source_strides), received.storage_offset() + move.source_offset
        )
        target = final.as_strided(
            shape, (pages * span, span, *move.target_strides), final.storage_offset() + move.target_offset
        )
        target.copy_(source)


def _view(family: _Family, how: Permutation) -> torch.Tensor:
    """Return the permuted words of all pages of a family, (region, page, word), in the engine's own memory."""
    width = how.word_bytes
    words = torch.empty(0, dtype=_WORDS[width], device=family.device)
    return words.set_(
        family.storage,
        (family.start_bytes + how.start_bytes) // width,
        (family.size, family.count, how.span),
        (max(family.distance_bytes // width, 1), family.stride_bytes // width, 1),
    )


def _parts(length: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, most):
        yield start, min(start + most, length)
