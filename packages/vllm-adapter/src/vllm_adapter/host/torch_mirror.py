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

from functools import partial
from typing import TYPE_CHECKING, final

import torch

from vllm_adapter.host.device_streams import PinnedPieces, streams_of
from vllm_adapter.host.torch_pages import PageFinder, rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm_adapter.host.device_streams import CudaStreams
    from vllm_adapter.worker.pages import PageCopy

__all__ = ["TorchMirror"]

_SCRATCH_BYTES = 16 << 20
_WIDEST_WORD_BYTES = 8
_NUMBER_BYTES = 8
"""Size of a page's number, which travels with the page."""


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
        self._tensors = dict(tensors)
        self._scratch_bytes = scratch_bytes
        self._device = next(iter(self._tensors.values())).device
        self._allocations: dict[int, torch.Tensor] = {}
        self.tensors = {name: self._twin(tensor) for name, tensor in self._tensors.items()}
        """The mirror's tensors by layer."""
        self._device_of = {
            self._allocations[tensor.untyped_storage().data_ptr()].data_ptr(): tensor.untyped_storage()
            for tensor in self._tensors.values()
        }
        self._finder = PageFinder(self.tensors.values())
        self._buffer = _Buffer(self._device)  # not for queued restores, which run beside saves
        self._streams = streams or streams_of(self._device)
        self._save_stream = self._streams.make() if self._streams is not None else None
        self._queue = _RestoreQueue(self._streams, self._device, scratch_bytes) if self._streams is not None else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device has streams that this class can use."""
        return self._streams is not None

    def mark(self) -> object:
        """Return an event behind all the work of this thread; None where calls return only when done."""
        return None if self._streams is None else self._streams.mark()

    @torch.inference_mode()
    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror once `after` has been reached; the copies are complete when this returns."""
        streams, stream = self._streams, self._save_stream
        if streams is None:
            self._copy(copies, to_device=False)
            return
        streams.wait(stream, after)
        streams.queue(stream, lambda: self._copy(copies, to_device=False))
        streams.synchronize(stream)

    @torch.inference_mode()
    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the device once `after` has been reached, before any later work of the calling thread."""
        if self._queue is None:
            self._copy(copies, to_device=True)
            return
        self._queue.begin(after)
        try:
            for copy in copies:
                # Each page carries its number, so that a full round fills one piece exactly.
                fitting = max(1, self._scratch_bytes // (copy.page_bytes + _NUMBER_BYTES))
                for here, there in self._families(copy):
                    for some_regions, some_pages in rounds(len(here), len(copy.pages), fitting):
                        chosen = torch.from_numpy(copy.pages[some_pages])
                        self._queue.copy(here[some_regions], there[some_regions], chosen)
        finally:
            # Needed even after a failure: these blocks get a new owner, and the queued copies must come before its work.
            self._queue.end()

    def _copy(self, copies: Sequence[PageCopy], *, to_device: bool) -> None:
        for copy in copies:
            for host, device in self._families(copy):
                here, there = (host, device) if to_device else (device, host)
                for regions, some_pages in rounds(len(here), len(copy.pages), self._scratch_bytes // copy.page_bytes):
                    chosen = torch.from_numpy(copy.pages[some_pages])
                    taken = self._buffer.take(here[regions], len(chosen))
                    torch.index_select(here[regions], 1, chosen.to(here.device), out=taken)
                    carried = self._buffer.carry(taken, there)
                    there[regions].index_copy_(1, chosen.to(there.device), carried)
                    self._buffer.settle()

    def _families(self, copy: PageCopy) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the pages (region, page, word) of each family, in the mirror and on the device."""
        for family in self._finder.families(copy.ranges):
            word_bytes = family.word_bytes(_WIDEST_WORD_BYTES, copy.page_bytes)
            twin = family.moved(self._device_of[family.storage.data_ptr()], self._device)
            span = copy.page_bytes // word_bytes
            yield family.words(0, word_bytes, span), twin.words(0, word_bytes, span)

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._allocations:
            made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=torch.device("cpu"))
            self._allocations[storage.data_ptr()] = made
        twin = torch.empty(0, dtype=tensor.dtype, device=torch.device("cpu"))
        return twin.set_(
            self._allocations[storage.data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )


@final
class _RestoreQueue:
    """A stream for copies from the mirror to the device. Engine thread only; never waits."""

    def __init__(self, streams: CudaStreams, device: torch.device, piece_bytes: int) -> None:
        self._streams = streams
        self._device = device
        self._stream = streams.make()
        self._pieces = PinnedPieces(streams, piece_bytes)
        self._near: torch.Tensor | None = None

    def begin(self, after: object) -> None:
        """Let the copies that follow wait for an event."""
        self._streams.wait(self._stream, after)

    def copy(self, here: torch.Tensor, there: torch.Tensor, chosen: torch.Tensor) -> None:
        """Gather pages (region, page, word) now, and queue their copies to the same pages of the device."""
        regions, _, span = here.shape
        page_bytes = len(chosen) * regions * span * here.element_size()
        number_bytes = _NUMBER_BYTES * len(chosen)
        piece = self._pieces.take(number_bytes + page_bytes)
        numbers = piece[:number_bytes].view(torch.int64)
        numbers.copy_(chosen)
        taken = piece[number_bytes : number_bytes + page_bytes].view(here.dtype).view(regions, len(chosen), span)
        torch.index_select(here, 1, chosen, out=taken)
        self._streams.queue(self._stream, partial(self._scatter, taken, numbers, there))
        self._pieces.give_back(piece, self._stream)

    def end(self) -> None:
        """Let later work of the calling thread wait for the copies."""
        self._streams.wait(self._streams.current(), self._streams.mark(self._stream))

    def _scatter(self, taken: torch.Tensor, numbers: torch.Tensor, there: torch.Tensor) -> None:
        needed_bytes = taken.numel() * taken.element_size()
        if self._near is None or self._near.numel() < needed_bytes:
            # Created on this stream, because only this stream may still read from the buffer that it replaces.
            self._near = torch.empty(needed_bytes, dtype=torch.uint8, device=self._device)
        near = self._near[:needed_bytes].view(taken.dtype).view(*taken.shape)
        near.copy_(taken, non_blocking=True)
        there.index_copy_(1, numbers.to(self._device, non_blocking=True), near)


@final
class _Buffer:
    """Staging memory for pages: on the host, pinned for a CUDA device, and as much again on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._host: torch.Tensor | None = None
        self._near: torch.Tensor | None = None

    def take(self, like: torch.Tensor, pages: int) -> torch.Tensor:
        """Return dense (region, page, word) staging memory on the side of `like`."""
        regions, _, span = like.shape
        needed_bytes = regions * pages * span * like.element_size()
        if self._host is None or self._host.numel() < needed_bytes:
            self._host = torch.empty(
                needed_bytes, dtype=torch.uint8, device=torch.device("cpu"), pin_memory=self._is_cuda
            )
            if self._device.type != "cpu":
                self._near = torch.empty(needed_bytes, dtype=torch.uint8, device=self._device)
        room = self._near if like.device.type != "cpu" and self._near is not None else self._host
        return room[:needed_bytes].view(like.dtype).view(regions, pages, span)

    def carry(self, taken: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the same pages on the side of the target."""
        if taken.device.type == target.device.type:
            return taken
        assert self._host is not None and self._near is not None  # noqa: S101, PT018  (made by `take`)
        other = self._host if target.device.type == "cpu" else self._near
        arrived = other[: taken.numel() * taken.element_size()].view(taken.dtype).view(*taken.shape)
        arrived.copy_(taken, non_blocking=self._is_cuda)
        if target.device.type == "cpu":
            self.settle()
        return arrived

    def settle(self) -> None:
        """Wait until the staging memory may be used again."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
