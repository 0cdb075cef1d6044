"""Orders that wait for the next step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state.plan import EMPTY_STREAM_PLAN, FenceOrder, StepPlan, StreamPlan

if TYPE_CHECKING:
    from kv_scheduler_state.plan import (
        GrantOrder,
        HeartbeatOrder,
        ReadOrder,
        StreamChunk,
        StreamOpen,
        StreamOrder,
        StreamVoid,
    )
    from kv_scheduler_state.values import BlockIds

__all__ = ["Outbox", "StreamOrders"]


@final
class StreamOrders:
    """Orders of streamed hand-overs, by request."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.voids: dict[str, StreamVoid] = {}
        self.opens: dict[str, StreamOpen] = {}
        self.chunks: dict[str, StreamChunk] = {}
        self.ends: dict[str, None] = {}
        self.watches: dict[str, StreamOrder] = {}
        self.stops: dict[str, None] = {}

    def void(self, order: StreamVoid) -> None:
        """Order a void in place of this step's opening and chunk: they never run, and no peer knows of their words."""
        self.opens.pop(order.request_id, None)
        self.chunks.pop(order.request_id, None)
        self.voids[order.request_id] = order

    def open(self, order: StreamOpen) -> None:
        """Order an opening; it replaces a waiting void."""
        self.voids.pop(order.request_id, None)
        self.opens[order.request_id] = order

    @property
    def has_orders(self) -> bool:
        """Whether any order waits."""
        return bool(self.voids or self.opens or self.chunks or self.ends or self.watches or self.stops)

    def take(self) -> StreamPlan:
        """Return all waiting orders and clear them."""
        if not self.has_orders:
            return EMPTY_STREAM_PLAN
        plan = StreamPlan(
            voids=tuple(self.voids.values()),
            opens=tuple(self.opens.values()),
            chunks=tuple(self.chunks.values()),
            ends=tuple(self.ends),
            watches=tuple(self.watches.values()),
            stops=tuple(self.stops),
        )
        self._clear()
        return plan


@final
class Outbox:
    """Collects a step's orders until `take` returns them; an aborted request's orders may be withdrawn before.

    Args:
        hold_steps: Plans for which a read that fills blocks is kept back, with its void.
    """

    def __init__(self, hold_steps: int = 0) -> None:
        self._hold_steps = hold_steps
        # Plans for which each waiting read is still kept back.
        self._young: dict[str, int] = {}
        self.streams = StreamOrders()
        self._clear()

    def _clear(self) -> None:
        self.reads: dict[str, ReadOrder] = {}
        self.expects: dict[str, None] = {}
        self.fences: dict[str, FenceOrder] = {}
        self.grants: list[GrantOrder] = []
        self.releases: list[str] = []
        self.revokes: list[str] = []
        self.restarts: dict[str, None] = {}
        self.saves: list[tuple[str, BlockIds]] = []
        self.completes: dict[str, None] = {}
        self.heartbeats: list[HeartbeatOrder] = []
        self.cancels: list[str] = []
        self.passes: list[str] = []
        self.voids: list[str] = []
        self.failures: dict[str, None] = {}

    def read(self, request_id: str, order: ReadOrder, *, fills_blocks: bool = False) -> None:
        """Order a read, or replace the one that waits."""
        self.reads[request_id] = order
        self._young.pop(request_id, None)
        if fills_blocks and self._hold_steps:
            self._young[request_id] = self._hold_steps

    def expect(self, request_id: str, fence: tuple[int, int] | None) -> None:
        """Announce a producer request, with its fence if it has one."""
        self.expects[request_id] = None
        if fence is not None:
            self.fences[request_id] = FenceOrder(request_id, *fence)

    def restart(self, request_id: str, fence: tuple[int, int] | None) -> None:
        """Note that a producer request is computed from the beginning again, under a new fence."""
        self.restarts[request_id] = None
        if fence is not None:
            self.fences[request_id] = FenceOrder(request_id, *fence)

    def withdraw(self, request_id: str) -> bool:
        """Drop the waiting orders of a producer request; return True if the workers do not know of the request."""
        is_unknown = request_id in self.expects
        for part in (self.expects, self.fences, self.restarts):
            part.pop(request_id, None)
        self.drop_saves(request_id)
        return is_unknown

    def drop_saves(self, request_id: str) -> None:
        """Drop the waiting saves of a request."""
        self.saves = [save for save in self.saves if save[0] != request_id]
        self.completes.pop(request_id, None)

    def is_ending(self, request_id: str) -> bool:
        """Whether the previous request of this id still ends in the next plan, so that the id cannot be used again yet."""
        is_ending = request_id in self.reads or request_id in self.releases or request_id in self.failures
        return is_ending or request_id in self.streams.ends or request_id in self.streams.stops

    @property
    def has_orders(self) -> bool:
        """Whether any order waits."""
        return bool(
            self.reads
            or self.expects
            or self.fences
            or self.grants
            or self.releases
            or self.revokes
            or self.restarts
            or self.saves
            or self.completes
            or self.heartbeats
            or self.cancels
            or self.passes
            or self.voids
            or self.failures
            or self.streams.has_orders
        )

    def take(self) -> StepPlan:
        """Return all waiting orders that are due and clear them."""
        # Reads that are kept back stay, with their voids, which mean nothing before them.
        kept = {request_id: self.reads.pop(request_id) for request_id in self._young if request_id in self.reads}
        kept_voids = [request_id for request_id in self.voids if request_id in kept]
        plan = StepPlan(
            reads=tuple(self.reads.values()),
            expects=tuple(self.expects),
            fences=tuple(self.fences.values()),
            grants=tuple(self.grants),
            releases=tuple(self.releases),
            revokes=tuple(self.revokes),
            restarts=tuple(self.restarts),
            saves=tuple(self.saves),
            completes=tuple(self.completes),
            heartbeats=tuple(self.heartbeats),
            cancels=tuple(self.cancels),
            passes=tuple(self.passes),
            voids=tuple([request_id for request_id in self.voids if request_id not in kept]),
            failures=tuple(self.failures),
            streams=self.streams.take(),
        )
        self._clear()
        self.reads, self.voids = kept, kept_voids
        self._young = {request_id: self._young[request_id] - 1 for request_id in kept if self._young[request_id] > 1}
        return plan
