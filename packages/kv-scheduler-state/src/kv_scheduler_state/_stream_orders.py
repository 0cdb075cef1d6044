"""Orders of streamed hand-overs that wait for the next step plan."""

from __future__ import annotations

from typing import Final, final

from kv_scheduler_state._plan import (
    EMPTY_STREAM_PLAN,
    StreamChunk,
    StreamOpen,
    StreamOrder,
    StreamPlan,
    StreamVoid,
)

__all__ = ["StreamOrders"]


@final
class StreamOrders:
    """Collects orders by request until `take` hands them out."""

    __slots__ = ("chunks", "ends", "opens", "stops", "voids", "watches")

    def __init__(self) -> None:
        self.voids: Final[dict[str, StreamVoid]] = {}
        self.opens: Final[dict[str, StreamOpen]] = {}
        self.chunks: Final[dict[str, StreamChunk]] = {}
        self.ends: Final[dict[str, None]] = {}
        self.watches: Final[dict[str, StreamOrder]] = {}
        self.stops: Final[dict[str, None]] = {}

    @property
    def has_orders(self) -> bool:
        """Whether any order waits."""
        return bool(self.voids or self.opens or self.chunks or self.ends or self.watches or self.stops)

    def void(self, order: StreamVoid) -> None:
        """Order a void in place of this step's opening and chunk: they never run, and no peer knows of their words."""
        request_id = order.request_id
        self.opens.pop(request_id, None)
        self.chunks.pop(request_id, None)
        self.voids[request_id] = order

    def open(self, order: StreamOpen) -> None:
        """Order an opening; it replaces a waiting void."""
        self.voids.pop(order.request_id, None)
        self.opens[order.request_id] = order

    def is_parting(self, request_id: str) -> bool:
        """Whether the next plan still carries the end of a request's stream."""
        return request_id in self.ends or request_id in self.stops

    def take(self) -> StreamPlan:
        """Return all waiting orders and clear them."""
        if not self.has_orders:
            return EMPTY_STREAM_PLAN
        plan = StreamPlan(
            tuple(self.voids.values()),
            tuple(self.opens.values()),
            tuple(self.chunks.values()),
            tuple(self.ends),
            tuple(self.watches.values()),
            tuple(self.stops),
        )
        for part in (self.voids, self.opens, self.chunks, self.ends, self.watches, self.stops):
            part.clear()
        return plan
