"""Work of a rank on its device: selection, AMX, streams, events, and pinned memory.

The engine thread only queues: no call here waits for the device, because a wait for one copy is a wait for the forward pass
queued before it. Pageable memory would make it wait (the copy is then synchronous), and so would a pinned buffer that must be
refilled. So every copy starts from pinned memory of its own. Torch's allocator hands that memory out again once it is released
and all `non_blocking` copies from it are done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "CudaStreams",
    "device_selector",
    "request_amx",
    "streams_of",
]


@final
class CudaStreams:
    """The streams of a CUDA device. Streams and events are opaque."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:  # noqa: ANN401
        """Return the calling thread's stream."""
        return torch.cuda.current_stream(self._device)

    def make(self) -> Any:  # noqa: ANN401
        """Return a new stream."""
        return torch.cuda.Stream(self._device)

    def queue(self, stream: Any, work: Callable[[], None]) -> None:  # noqa: ANN401
        """Queue the device work of `work` on this stream; returns before the work is done."""
        with torch.cuda.stream(stream):
            work()

    def mark(self, stream: Any = None) -> Any:  # noqa: ANN401
        """Return an event behind all the work queued on this stream, by default the calling thread's."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Let later work of this stream wait for an event; the calling thread does not wait."""
        stream.wait_event(event)

    def is_over(self, mark: Any) -> bool:  # noqa: ANN401
        """Return whether an event has been reached."""
        return bool(mark.query())

    def synchronize(self, stream: Any) -> None:  # noqa: ANN401
        """Wait until the stream has done all its work. Never called on the engine thread."""
        stream.synchronize()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in pinned host memory that no copy uses."""
        return torch.empty(*shape, dtype=dtype, device=torch.device("cpu"), pin_memory=True)


def streams_of(device: torch.device) -> CudaStreams | None:
    """Return a device's streams; None where calls return only when done, or for an unsupported device."""
    return CudaStreams(device) if device.type == "cuda" else None


def device_selector(tensors: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that makes the tensors' device current on the calling thread; None on a CPU.

    The current device belongs to a thread, and a new thread starts with device 0. Without this, UCX would treat rank 3's
    transfers as device 0's, in a separate context and without NVLink. Source: vLLM issue 36475.
    """
    device = next(iter(tensors)).device
    if device.type == "cpu":
        return None
    return partial(torch.get_device_module(device).set_device, device)


def request_amx(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the operating system for AMX where the cache is in a CPU's memory; do nothing on CPUs without it.

    Linux ends a process with SIGILL that uses AMX without having asked. vLLM's bfloat16 attention kernel does not ask; oneDNN
    does, when the engine computes a longer prompt. So an engine whose first work was a read would end at its first token.
    """
    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None and next(iter(tensors)).device.type == "cpu":
        ask()
