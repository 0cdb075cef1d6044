"""Permutation of the pages that staged reads received, with torch. Imported in the host's process only.

A step takes three kinds of calls, however many layers there are: gather the pages, one strided copy per move, scatter them
back. On a device with streams everything is queued, with page numbers from pinned memory, and nothing waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import torch

from vllm_adapter.host.streams import PinnedPieces, streams_of
from vllm_adapter.host.torch_views import PageFinder, rounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_adapter.host.streams import DeviceStreams
    from vllm_adapter.host.torch_views import PageFamily
    from vllm_adapter.ports import PageNumbers
    from vllm_adapter.worker.pages import ConversionStep, Permutation

__all__ = ["TorchPages"]

_NUMBERS_BYTES = 1 << 18
"""Size of a piece of pinned memory for page numbers: 32768 of them."""
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
        streams: DeviceStreams | None = None,
    ) -> None:
        tensors = list(tensors)
        self._finder = PageFinder(tensors)
        self._streams = streams or (streams_of(tensors[0].device) if tensors else None)
        self._numbers = PinnedPieces(self._streams, _NUMBERS_BYTES) if self._streams is not None else None
        self._scratch_bytes = scratch_bytes
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.inference_mode()
    def convert(self, steps: Sequence[ConversionStep]) -> None:
        """Permute the pages of all steps, in place."""
        for step in steps:
            for family in self._finder.families(step.regions):
                self._convert(family, step.permutation.aligned(*family.places_bytes), step.pages)

    def _convert(self, family: PageFamily, how: Permutation, pages: PageNumbers) -> None:
        words = family.words(how.start_bytes, how.word_bytes, how.span)
        fitting = self._scratch_bytes // (how.span * how.word_bytes)
        for some_regions, some_pages in rounds(family.size, len(pages), fitting):
            self._convert_round(words[some_regions], torch.from_numpy(pages[some_pages]), how)

    def _convert_round(self, part: torch.Tensor, chosen: torch.Tensor, how: Permutation) -> None:
        if self._streams is None or self._numbers is None:
            self._permute_pages(part, chosen.to(part.device), how)
            return
        stream = self._streams.current()
        piece = self._numbers.take(8 * len(chosen))
        pinned = piece[: 8 * len(chosen)].view(torch.int64)
        pinned.copy_(chosen)
        self._streams.queue(stream, partial(self._permute_uploaded, part, pinned, how))
        self._numbers.give_back(piece, stream)

    def _permute_uploaded(self, part: torch.Tensor, pinned: torch.Tensor, how: Permutation) -> None:
        self._permute_pages(part, pinned.to(part.device, non_blocking=True), how)

    def _permute_pages(self, part: torch.Tensor, chosen: torch.Tensor, how: Permutation) -> None:
        received, final = self._aside(part, len(chosen))
        torch.index_select(part, 1, chosen, out=received)
        _permute(received, final, how)
        part.index_copy_(1, chosen, final)

    def _aside(self, like: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two dense (region, page, word) scratch tensors on the cache's device; their previous content is lost."""
        regions, _, span = like.shape
        needed_bytes = regions * pages * span * like.element_size()
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
