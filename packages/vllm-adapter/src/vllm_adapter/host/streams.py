"""Work that is queued for a device: streams, events, and pinned memory that outlives the copies from it.

The engine thread only ever queues: nothing that it calls here waits for the device, because a wait for one copy is a wait for
the forward pass in front of it. Pageable memory would make it wait (the copy is synchronous then), and so would a pinned buffer
that is to be filled again. So copies start from pieces of pinned memory, each with an event behind its copy; a piece is taken
again once its event has happened, and where none is free there is one piece more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CudaStreams", "DeviceStreams", "PinnedPieces", "TorchMarks", "device_marks", "streams_of"]


class DeviceStreams(Protocol):
    """The streams of one device. Streams and events are opaque."""

    def current(self) -> Any:  # noqa: ANN401
        """Return the calling thread's stream."""
        ...

    def make(self) -> Any:  # noqa: ANN401
        """Return a new stream."""
        ...

    def queue(self, stream: Any, work: Callable[[], None]) -> None:  # noqa: ANN401
        """Give the device what `work` does, on this stream; returns before it is done."""
        ...

    def mark(self, stream: Any) -> Any:  # noqa: ANN401
        """Return an event behind all that this stream has been given."""
        ...

    def wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Let what this stream is given from now on happen after an event; the calling thread does not wait."""
        ...

    def is_over(self, event: Any) -> bool:  # noqa: ANN401
        """Tell whether an event has happened."""
        ...

    def synchronize(self, stream: Any) -> None:  # noqa: ANN401
        """Wait until the stream has done all that it was given. Never called on the engine thread."""
        ...

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return new pinned host memory, as bytes."""
        ...


@final
class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:  # noqa: ANN401
        """Return the calling thread's stream."""
        return torch.cuda.current_stream(self._device)

    def make(self) -> Any:  # noqa: ANN401
        """Return a new stream."""
        return torch.cuda.Stream(self._device)

    def queue(self, stream: Any, work: Callable[[], None]) -> None:  # noqa: ANN401
        """Call `work` with this stream as the current one."""
        with torch.cuda.stream(stream):
            work()

    def mark(self, stream: Any) -> Any:  # noqa: ANN401
        """Return an event behind all that this stream has been given."""
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:  # noqa: ANN401
        """Let what this stream is given from now on happen after an event."""
        stream.wait_event(event)

    def is_over(self, event: Any) -> bool:  # noqa: ANN401
        """Tell whether an event has happened."""
        return bool(event.query())

    def synchronize(self, stream: Any) -> None:  # noqa: ANN401
        """Wait until the stream has done all that it was given."""
        stream.synchronize()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return new pinned host memory, as bytes."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cpu"), pin_memory=True)


def streams_of(device: torch.device) -> DeviceStreams | None:
    """Return a device's streams, None where calls end when they are done or the streams are not known here."""
    return CudaStreams(device) if device.type == "cuda" else None


@final
class TorchMarks:
    """Marks behind all that the calling thread's stream has been given.

    Args:
        streams: The device's streams.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def mark(self) -> object:
        """Return an event behind all that the calling thread's stream has been given."""
        return self._streams.mark(self._streams.current())

    def is_over(self, mark: object) -> bool:
        """Tell whether everything before the event is done."""
        return self._streams.is_over(mark)


def device_marks(tensors: Iterable[torch.Tensor]) -> TorchMarks | None:
    """Return the marks of the device that holds the tensors, None where calls end when they are done."""
    for tensor in tensors:
        streams = streams_of(tensor.device)
        return TorchMarks(streams) if streams is not None else None
    return None


@final
class PinnedPieces:
    """Pinned memory for copies to a device. Engine thread only; never waits.

    Example: three rounds of a copy with pieces of 16 MiB take a first piece, a second one because the first is still on its way,
    and the first again if its copy is over by then, else a third.

    Args:
        streams: The device's streams.
        piece_bytes: Size of a piece, unless more is asked for.
    """

    def __init__(self, streams: DeviceStreams, piece_bytes: int) -> None:
        self._streams = streams
        self._piece_bytes = piece_bytes
        self._pieces: list[tuple[torch.Tensor, Any]] = []

    def __len__(self) -> int:
        return len(self._pieces)

    def take(self, needed_bytes: int) -> torch.Tensor:
        """Return memory of at least so many bytes from which no copy is on its way; `give_back` it once one is queued."""
        for number, (memory, event) in enumerate(self._pieces):
            if memory.numel() >= needed_bytes and self._streams.is_over(event):
                del self._pieces[number]
                return memory
        return self._streams.pinned(max(self._piece_bytes, needed_bytes))

    def give_back(self, memory: torch.Tensor, stream: Any) -> None:  # noqa: ANN401
        """Let a piece be taken again once all that `stream` has been given is over."""
        self._pieces.append((memory, self._streams.mark(stream)))
