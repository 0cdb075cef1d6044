"""Orders that wait for the next step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from kv_scheduler_state.plan import EMPTY_PLAN, EMPTY_STREAM_PLAN, FenceOrder, StepPlan, StreamPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_scheduler_state.plan import ReadOrder, StreamOpen, StreamVoid
    from kv_scheduler_state.values import BlockIds

__all__ = ["Outbox", "Waiting"]


@final
class Waiting:
    """Waiting orders by part of a plan, then by request (heartbeats: by peer); a part without orders is absent."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[Any, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __getitem__(self, part: str) -> Mapping[Any, Any]:
        return self._parts.get(part, {})

    def put(self, part: str, key: object, order: object = None) -> None:
        """Add an order in place of one with the same key; without `order` the key itself is the order."""
        self._parts.setdefault(part, {})[key] = key if order is None else order

    def drop(self, part: str, key: object) -> bool:
        """Remove an order; return False if there is none."""
        orders = self._parts.get(part, {})
        if key not in orders:
            return False
        del orders[key]
        if not orders:
            del self._parts[part]
        return True

    def take(self) -> dict[str, tuple[Any, ...]]:
        """Return all orders by part, in the order in which they were decided, and clear them."""
        parts, self._parts = self._parts, {}
        return {part: tuple(orders.values()) for part, orders in parts.items()}


@final
class Outbox:
    """Collects a step's orders until `take` returns them; an aborted request's orders may be withdrawn before.

    Args:
        hold_steps: Plans for which a read that fills blocks is kept back, with its void.

    Attributes:
        orders: The parts of a `StepPlan`.
        streams: The parts of its `StreamPlan`.
    """

    def __init__(self, hold_steps: int = 0) -> None:
        self._hold_steps = hold_steps
        # Plans for which each waiting read is still kept back.
        self._young: dict[str, int] = {}
        self.orders = Waiting()
        self.streams = Waiting()

    def read(self, request_id: str, order: ReadOrder, *, fills_blocks: bool = False) -> None:
        """Order a read, or replace the one that waits."""
        self.orders.put("reads", request_id, order)
        self._young.pop(request_id, None)
        if fills_blocks and self._hold_steps:
            self._young[request_id] = self._hold_steps

    def announce(self, part: str, request_id: str, fence: tuple[int, int] | None) -> None:
        """Announce a producer request (`expects`) or its new start (`restarts`), with its fence if it has one."""
        self.orders.put(part, request_id)
        if fence is not None:
            self.orders.put("fences", request_id, FenceOrder(request_id, *fence))

    def save(self, request_id: str, blocks: BlockIds) -> None:
        """Order a save of one chunk."""
        saves = self.orders["saves"].get(request_id, ())
        self.orders.put("saves", request_id, (*saves, (request_id, blocks)))

    def withdraw(self, request_id: str) -> None:
        """Drop the waiting orders of a producer request; release it if the workers know of it."""
        is_unknown = request_id in self.orders["expects"]
        for part in ("expects", "fences", "restarts"):
            self.orders.drop(part, request_id)
        self.drop_saves(request_id)
        if not is_unknown:
            self.orders.put("releases", request_id)

    def drop_saves(self, request_id: str) -> None:
        """Drop the waiting saves of a request."""
        self.orders.drop("saves", request_id)
        self.orders.drop("completes", request_id)

    def void(self, order: StreamVoid) -> None:
        """Order a void in place of this step's opening and chunk: they never run, and no peer knows of their words."""
        self.streams.drop("opens", order.request_id)
        self.streams.drop("chunks", order.request_id)
        self.streams.put("voids", order.request_id, order)

    def open(self, order: StreamOpen) -> None:
        """Order an opening; it replaces a waiting void."""
        self.streams.drop("voids", order.request_id)
        self.streams.put("opens", order.request_id, order)

    def is_ending(self, request_id: str) -> bool:
        """Whether the previous request of this id still ends in the next plan, so that the id cannot be used again yet."""
        parts = ((self.orders, "reads"), (self.orders, "releases"), (self.orders, "failures"))
        streams = ((self.streams, "ends"), (self.streams, "stops"))
        return any(request_id in orders[part] for orders, part in (*parts, *streams))

    @property
    def has_orders(self) -> bool:
        """Whether any order waits."""
        return bool(self.orders or self.streams)

    def take(self) -> StepPlan:
        """Return all waiting orders that are due and clear them."""
        if not self.has_orders:
            return EMPTY_PLAN
        # Reads that are kept back stay, with their voids, which mean nothing before them.
        reads = self.orders["reads"]
        kept = {request_id: reads[request_id] for request_id in self._young if request_id in reads}
        voids = [request_id for request_id in kept if self.orders.drop("voids", request_id)]
        for request_id in kept:
            self.orders.drop("reads", request_id)
        parts = self.orders.take()
        if "saves" in parts:
            parts["saves"] = tuple([save for saves in parts["saves"] for save in saves])
        streams = StreamPlan(**self.streams.take()) if self.streams else EMPTY_STREAM_PLAN
        for request_id, order in kept.items():
            self.orders.put("reads", request_id, order)
        for request_id in voids:
            self.orders.put("voids", request_id)
        self._young = {request_id: self._young[request_id] - 1 for request_id in kept if self._young[request_id] > 1}
        return StepPlan(**parts, streams=streams)
