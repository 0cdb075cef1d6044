"""Streams that wait for their engine, from an order to `StreamCoordinator.begin` or to an end. Transfer thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from vllm_adapter.errors import code_of
from vllm_adapter.steps import STREAM_STOPPED, ReadEnd, ReadTimes
from vllm_adapter.worker.transfer.records import FinishedRead, Read
from vllm_adapter.worker.transfer.tickets import refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_adapter.ports import StreamOrder
    from vllm_adapter.worker.transfer.parts import TransferParts
    from vllm_adapter.worker.transfer.peers import PeerDirectory
    from vllm_adapter.worker.transfer.records import PeerEngine
    from vllm_adapter.worker.transfer.streams import StreamCoordinator

__all__ = ["StreamAdmission"]


@final
class StreamAdmission:
    """Waits until the engines of streams are set up, and begins each stream once its engine is ready.

    Args:
        parts: The registration's threads, codec, recorder and clock.
        peers: Sets up engines.
        streams: Follows the streams of engines that are ready.
        ended: Called once with the end of a stream that never began.
    """

    def __init__(
        self,
        parts: TransferParts,
        peers: PeerDirectory,
        streams: StreamCoordinator,
        ended: Callable[[FinishedRead], None],
    ) -> None:
        self._parts = parts
        self._peers = peers
        self._streams = streams
        self._ended = ended
        self._waiting: dict[Read, StreamOrder] = {}

    def follow(self, order: StreamOrder) -> None:
        """Follow a stream, at once or when its engine is ready."""
        read = Read(order.read, ReadTimes(self._parts.now_s()))
        self._waiting[read] = order
        try:
            self._peers.submit(read)
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self._parts.recorder.trouble("order of a stream", error)
            self.not_met(read, code_of(error), str(error))

    def takes(self, read: Read) -> bool:
        """Return whether a waiting read belongs to a stream."""
        return read in self._waiting

    def ready(self, read: Read, engine: PeerEngine) -> None:
        """Begin a stream whose engine is ready; if it cannot begin, end it."""
        order = self._waiting.pop(read)
        try:
            reason = refusal(order.read, engine)
            if reason is None:
                self._streams.begin(read, order, engine)
                return
        except Exception as error:  # noqa: BLE001  (one order can only fail itself)
            self._parts.recorder.trouble("start of a stream", error)
            reason = code_of(error), str(error)
        self._end(read, *reason)

    def not_met(self, read: Read, code: str, message: str) -> None:
        """End a stream whose engine cannot be read from."""
        if self._waiting.pop(read, None) is not None:
            read.was_met = False
            self._end(read, code, message)

    def stop(self, request_id: str) -> None:
        """Stop a stream; its end is reported once all its transfers are quiet."""
        for read in [each for each in self._waiting if each.order.request_id == request_id]:
            # The read keeps waiting as one that has ended, to tell its producer that the blocks are not needed.
            del self._waiting[read]
            self._end(read, STREAM_STOPPED, "the stream was given up before it began")
        self._streams.stop(request_id)

    def end_all(self, code: str, message: str) -> None:
        """Stop all streams; each ends once its pages are quiet."""
        for read in list(self._waiting):
            self.not_met(read, code, message)
        self._streams.break_all(code, message)

    def _end(self, read: Read, code: str, message: str) -> None:
        read.is_ended = True
        self._ended(FinishedRead(ReadEnd(read.order, code, message, read.times, self._parts.now_s(), read.was_met)))
