"""The cache's mirror in host memory, and copies between the two, with torch. Imported in the host's process only.

The mirror has one allocation per allocation of the engine, of the same size, so that every tensor, also of layers that share
memory, has its twin at the same place. It is allocated once and at full size, because peers prepare lists of its addresses
when they meet us and a later range would have to be registered and announced anew; but its pages are left untouched, so that
the system gives memory only to blocks that were copied or received once. For that it is not pinned: what is pinned is the
small buffer that copies from and to a CUDA device go through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

import torch

from vllm_adapter.host.torch_views import PageFinder, rounds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.base import CopyBlocksOp

    from vllm_adapter.host.torch_views import PageFamily
    from vllm_adapter.worker.conversion import PageRange
    from vllm_adapter.worker.host_mirror import PageCopy

__all__ = ["TorchMirror"]

_SCRATCH_BYTES = 16 << 20
_WIDEST_WORD_BYTES = 8


@final
class TorchMirror:
    """A `MirrorMemory` over the tensors that the engine registered, all on one device.

    Args:
        tensors: By layer.
        scratch_bytes: Bound of the pages that are on their way at once.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, scratch_bytes: int = _SCRATCH_BYTES) -> None:
        self._tensors = dict(tensors)
        self._scratch_bytes = scratch_bytes
        self._device = next(iter(self._tensors.values())).device
        self._operation: CopyBlocksOp | None = None
        self._allocations: dict[int, torch.Tensor] = {}
        self.tensors = {name: self._twin(tensor) for name, tensor in self._tensors.items()}
        """The mirror's tensors by layer."""
        self._device_of = {
            self._allocations[tensor.untyped_storage().data_ptr()].data_ptr(): tensor.untyped_storage()
            for tensor in self._tensors.values()
        }
        self._finder = PageFinder(self.tensors.values())
        # Saves run on a thread of their own, restores on the engine's: neither may find the other's bytes in its buffer.
        self._save_buffer, self._restore_buffer = _Buffer(self._device), _Buffer(self._device)
        self._stream = torch.cuda.Stream(self._device) if self.is_asynchronous else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device has streams that this class knows to use."""
        return self._device.type == "cuda"

    def use(self, operation: CopyBlocksOp) -> None:
        """Copy by the platform's own operation from now on, wherever a layer's tensor is a list of pages."""
        if self._device.type != "cpu":
            self._operation = operation

    def mark(self) -> object:
        """Return an event behind all that this thread has given the device, None where calls end when they are done."""
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @torch.inference_mode()
    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror once `after` has happened; they are there when this returns."""
        stream = self._stream
        if stream is None:
            self._save(copies)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            self._save(copies)
            stream.synchronize()

    def _save(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            rest = self._copy_by_operation(copy, "d2h")
            for family in self._finder.families(rest):
                self._copy(copy, family, self._on_device(family), family, self._save_buffer)

    @torch.inference_mode()
    def restore(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages from the mirror, in order before whatever the calling thread gives the device next."""
        for copy in copies:
            rest = self._copy_by_operation(copy, "h2d")
            for family in self._finder.families(rest):
                self._copy(copy, family, family, self._on_device(family), self._restore_buffer)

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

    def _on_device(self, family: PageFamily) -> PageFamily:
        return family.moved(self._device_of[family.storage.data_ptr()], self._device)

    def _copy_by_operation(self, copy: PageCopy, direction: Literal["d2h", "h2d"]) -> tuple[PageRange, ...]:
        """Copy what the platform's operation can, and return the ranges that are left."""
        if self._operation is None:
            return copy.ranges
        left = {pages.address: pages for pages in copy.ranges}
        names = [
            name
            for name, tensor in self.tensors.items()
            if tensor.data_ptr() in left and tensor.shape[0] == left[tensor.data_ptr()].count and len(tensor.shape) > 1
        ]
        if names:
            host, device = ({name: tensors[name] for name in names} for tensors in (self.tensors, self._tensors))
            source, target = (device, host) if direction == "d2h" else (host, device)
            pages = copy.pages.tolist()
            self._operation(source, target, pages, pages, direction)
        done = {self.tensors[name].data_ptr() for name in names}
        return tuple(pages for address, pages in left.items() if address not in done)

    def _copy(
        self, copy: PageCopy, family: PageFamily, source: PageFamily, target: PageFamily, buffer: _Buffer
    ) -> None:
        word_bytes = family.word_bytes(_WIDEST_WORD_BYTES, copy.page_bytes)
        span = copy.page_bytes // word_bytes
        here, there = source.words(0, word_bytes, span), target.words(0, word_bytes, span)
        for some_regions, some_pages in rounds(family.size, len(copy.pages), self._scratch_bytes // copy.page_bytes):
            chosen = torch.from_numpy(copy.pages[some_pages])
            part = here[some_regions]
            taken = buffer.take(part, len(chosen), near_device=source.device.type != "cpu")
            torch.index_select(part, 1, chosen.to(source.device), out=taken)
            carried = buffer.carry(taken, there)
            there[some_regions].index_copy_(1, chosen.to(target.device), carried)
            buffer.settle()


@final
class _Buffer:
    """Room for pages on their way: on the host, pinned if the device is CUDA's, and as much again on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._host: torch.Tensor | None = None
        self._near: torch.Tensor | None = None

    def take(self, like: torch.Tensor, pages: int, *, near_device: bool) -> torch.Tensor:
        """Return dense (region, page, word) room on the side of the source."""
        regions, _, span = like.shape
        needed_bytes = regions * pages * span * like.element_size()
        if self._host is None or self._host.numel() < needed_bytes:
            self._host = torch.empty(
                needed_bytes, dtype=torch.uint8, device=torch.device("cpu"), pin_memory=self._is_cuda
            )
            if self._device.type != "cpu":
                self._near = torch.empty(needed_bytes, dtype=torch.uint8, device=self._device)
        room = self._near if near_device and self._near is not None else self._host
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
        """Wait until the room may be used again."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()
