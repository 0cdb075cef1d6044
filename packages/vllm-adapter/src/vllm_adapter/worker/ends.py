"""Ends of reads and leases on their way from the transfer thread to the engine thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, final

from vllm_adapter.steps import ReadEnd, ReadTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from vllm_adapter.ports import ReadOrder

__all__ = ["Ends"]

_LOOK_S = 5e-5
"""Sleep between two looks; with the timer's slack and the look itself there is one each 0.15 ms: a third of a core."""


@final
class Ends:
    """Keeps each end until the engine thread takes it. That thread waits here; any thread may add an end.

    Attributes:
        reads: Ends of reads, plain and streamed.
        sent: Requests whose blocks are free.
        has_more: Is set with each end that comes from a turn of the transfer thread.
    """

    def __init__(self) -> None:
        self.reads: deque[ReadEnd] = deque()
        self.sent: deque[str] = deque()
        self.has_more = threading.Event()

    def read_ended(self, end: ReadEnd) -> None:
        """Keep the end of a read."""
        self.reads.append(end)
        self.has_more.set()

    def lease_ended(self, request_id: str) -> None:
        """Keep the end of a lease."""
        self.sent.append(request_id)
        self.has_more.set()

    def are_there(self, ordered: AbstractSet[str]) -> bool:
        """Return whether all these reads have ended; without any, whether any end is there."""
        if ordered:
            return ordered <= {end.order.request_id for end in self.reads.copy()}
        return bool(self.reads or self.sent)

    def wait(self, ordered: AbstractSet[str], within_s: float, look: Callable[[], object] | None) -> None:
        """Wait until all these reads have ended, or without any until an end is there; `look`, if given, may bring it."""
        until_s = time.monotonic() + within_s
        while within_s > 0 and not self.are_there(ordered):
            if look is not None:
                look()
            if self.has_more.wait(within_s if look is None else min(within_s, _LOOK_S)):
                self.has_more.clear()  # it may be that of an end which was reported long ago
            elif look is None:
                return
            within_s = until_s - time.monotonic()

    def take_reads(self, ahead: AbstractSet[str], *, is_ahead: bool) -> list[ReadEnd]:
        """Take the ends of reads that were ordered between steps, or of all others.

        Args:
            ahead: The requests of those that were ordered between steps.
            is_ahead: Whether to take these.
        """
        ends: list[ReadEnd] = []
        for _ in range(len(self.reads)):  # the transfer thread may append more meanwhile
            end = self.reads.popleft()
            is_wanted = (end.order.is_reported and end.order.request_id in ahead) is is_ahead
            (ends if is_wanted else self.reads).append(end)
        return ends

    def take_sent(self) -> frozenset[str]:
        """Take the requests whose blocks are free."""
        return frozenset([self.sent.popleft() for _ in range(len(self.sent))])

    def fail(self, orders: Iterable[ReadOrder], code: str, message: str, *, is_streamed: bool = False) -> None:
        """End reads that no thread carries out any more, but for those whose end is there."""
        # A dying thread may append more meanwhile.
        ended = {end.order.request_id for end in self.reads.copy() if end.order.is_reported}
        now_s = time.monotonic()
        for order in orders:
            if not (order.is_reported and order.request_id in ended):
                self.reads.append(ReadEnd(order, code, message, ReadTimes(now_s), now_s, is_streamed=is_streamed))

    def fail_all(self, code: str, message: str) -> None:
        """Let the reads that have ended well fail."""
        for _ in range(len(self.reads)):
            self.reads.append(self.reads.popleft().failed(code, message))
