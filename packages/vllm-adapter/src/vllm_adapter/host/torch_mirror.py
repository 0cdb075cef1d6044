"""The cache's mirror in host memory, and copies between the two, with torch. Imported in the host's process only.

The mirror has one allocation per allocation of the engine, of the same size, so that every tensor, including those of layers
that share memory, has its twin at the same offset. It is allocated once and at full size, because peers prepare lists of its
addresses when they connect, and a later range would have to be registered and announced again. Its pages are left untouched, so
that the system provides memory only for blocks that were copied or received at least once. For that reason the mirror is not
pinned; only the small buffers for copies from and to a CUDA device are.

The engine thread queues restores and never waits for the device: it gathers pages into pinned memory, and a separate stream
copies and scatters them. That stream waits for the work that the engine had queued when the reads were ordered, since the
blocks had another owner until then, but not for the current forward pass. The engine's stream waits for the last restore.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, final

import torch

from vllm_adapter.host.device_streams import streams_of
from vllm_adapter.host.torch_pages import PageFinder, rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_adapter.host.device_streams import CudaStreams
    from vllm_adapter.worker.pages import PageCopy

__all__ = ["TorchMirror"]

_SCRATCH_BYTES = 16 << 20
_WIDEST_WORD_BYTES = 8


@final
class TorchMirror:
    """A `MirrorMemory` over the tensors that the engine registered, all on one device.

    Args:
        tensors: The engine's tensors by layer.
        scratch_bytes: Most bytes of pages that are in flight at once.
        streams: The device's streams; None to use torch's.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        scratch_bytes: int = _SCRATCH_BYTES,
        streams: CudaStreams | None = None,
    ) -> None:
        self._scratch_bytes = scratch_bytes
        self._device = next(iter(tensors.values())).device
        # The mirror's allocations by the device's, and the device's by the mirror's.
        self._allocations: dict[int, torch.Tensor] = {}
        self._device_of: dict[int, torch.UntypedStorage] = {}
        self.tensors = {name: self._twin(tensor) for name, tensor in tensors.items()}
        """The mirror's tensors by layer."""
        self._finder = PageFinder(self.tensors.values())
        self._streams = streams or streams_of(self._device)
        if self._streams is not None:
            self._save_stream, self._restore_stream = self._streams.make(), self._streams.make()

    def mark(self) -> object:
        """Return an event behind all the work of this thread; None where calls return only when done."""
        return None if self._streams is None else self._streams.mark()

    @torch.inference_mode()
    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror once `after` has been reached; the copies are complete when this returns."""
        if self._streams is None:
            self._copy(copies, to_device=False)
            return
        self._streams.wait(self._save_stream, after)
        self._streams.queue(self._save_stream, lambda: self._copy(copies, to_device=False))
        self._streams.synchronize(self._save_stream)

    @torch.inference_mode()
    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the device once `after` has been reached, before any later work of the calling thread."""
        streams = self._streams
        if streams is None:
            self._copy(copies, to_device=True)
            return
        streams.wait(self._restore_stream, after)
        try:
            for here, there, chosen in self._rounds(copies):
                numbers = streams.pinned(chosen.shape, chosen.dtype).copy_(chosen)
                taken = streams.pinned((len(here), len(chosen), here.shape[2]), here.dtype)
                torch.index_select(here, 1, chosen, out=taken)
                streams.queue(self._restore_stream, partial(self._scatter, taken, numbers, there))
        finally:
            # Needed even after a failure: these blocks get a new owner, and the queued copies must come before its work.
            streams.wait(streams.current(), streams.mark(self._restore_stream))

    def _scatter(self, taken: torch.Tensor, numbers: torch.Tensor, there: torch.Tensor) -> None:
        near = taken.to(self._device, non_blocking=True)  # in memory of this stream, the only one that uses it
        there.index_copy_(1, numbers.to(self._device, non_blocking=True), near)

    def _copy(self, copies: Sequence[PageCopy], *, to_device: bool) -> None:
        for host, device, chosen in self._rounds(copies):
            here, there = (host, device) if to_device else (device, host)
            taken = torch.index_select(here, 1, chosen.to(here.device))
            there.index_copy_(1, chosen.to(there.device), self._carried(taken, there.device))

    def _carried(self, pages: torch.Tensor, target: torch.device) -> torch.Tensor:
        """Return pages on another device; those of a CUDA device through pinned memory, and only once they have arrived."""
        if pages.device.type != "cuda" or self._streams is None:
            return pages.to(target)
        arrived = self._streams.pinned(pages.shape, pages.dtype)
        arrived.copy_(pages, non_blocking=True)
        self._streams.synchronize(self._streams.current())
        return arrived

    def _rounds(self, copies: Sequence[PageCopy]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield pages (region, page, word) of the mirror and of the device, and the numbers of those to copy at once."""
        for copy in copies:
            for family in self._finder.families(copy.ranges):
                word_bytes = math.gcd(*family.places_bytes, _WIDEST_WORD_BYTES, copy.page_bytes)
                span = copy.page_bytes // word_bytes
                twin = replace(family, storage=self._device_of[family.storage.data_ptr()], device=self._device)
                host, device = family.words(0, word_bytes, span), twin.words(0, word_bytes, span)
                for regions, some in rounds(len(host), len(copy.pages), self._scratch_bytes // copy.page_bytes):
                    yield host[regions], device[regions], torch.from_numpy(copy.pages[some])

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._allocations:
            made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=torch.device("cpu"))
            self._allocations[storage.data_ptr()], self._device_of[made.data_ptr()] = made, storage
        twin = torch.empty(0, dtype=tensor.dtype, device=torch.device("cpu"))
        return twin.set_(
            self._allocations[storage.data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
