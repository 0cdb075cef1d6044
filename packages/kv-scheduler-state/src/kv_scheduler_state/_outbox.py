"""Orders that wait for the next step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, final

from kv_scheduler_state._blocks import new_tuple
from kv_scheduler_state._plan import EMPTY_STREAM_PLAN, FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan
from kv_scheduler_state._stream_orders import StreamOrders

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_scheduler_state._blocks import BlockIds

__all__ = ["Outbox"]


_COMMON: Final = 4
"""Parts of a plan that every hand-over fills, the first ones: reads, expects, fences, grants."""
_NONE_RARE: Final[tuple[tuple[object, ...], ...]] = (
    *((),) * (len(StepPlan._fields) - _COMMON - 1),
    EMPTY_STREAM_PLAN,
)


class _Part(Protocol):
    def clear(self) -> None: ...
    def __iter__(self) -> Iterator[object]: ...
    def __len__(self) -> int: ...


@final
class Outbox:
    """Collects a step's orders until `take` hands them out; an aborted request's orders may be withdrawn before.

    Args:
        hold_steps: Plans for which a read that fills blocks is kept back, with its void.
    """

    __slots__ = (
        "_has_rare",
        "_hold_steps",
        "_parts",
        "_rare",
        "_young",
        "cancels",
        "completes",
        "expects",
        "failures",
        "fences",
        "grants",
        "has_orders",
        "heartbeats",
        "passes",
        "reads",
        "releases",
        "restarts",
        "revokes",
        "saves",
        "streams",
        "voids",
    )

    def __init__(self, hold_steps: int = 0) -> None:
        self._hold_steps = hold_steps
        # Plans for which each waiting read is still kept back.
        self._young: dict[str, int] = {}
        self.has_orders = False
        # Whether one of the parts that few plans have may hold an order; if not, none of those parts is looked at.
        self._has_rare = False
        self.reads: Final[dict[str, ReadOrder]] = {}
        self.expects: Final[dict[str, None]] = {}
        self.fences: Final[dict[str, FenceOrder]] = {}
        self.grants: Final[list[GrantOrder]] = []
        self.releases: Final[list[str]] = []
        self.revokes: Final[list[str]] = []
        self.restarts: Final[dict[str, None]] = {}
        self.saves: Final[list[tuple[str, BlockIds]]] = []
        self.completes: Final[dict[str, None]] = {}
        self.heartbeats: Final[list[HeartbeatOrder]] = []
        self.cancels: Final[list[str]] = []
        self.passes: Final[list[str]] = []
        self.voids: Final[list[str]] = []
        self.failures: Final[dict[str, None]] = {}
        self.streams: Final = StreamOrders()
        # The parts of a plan in its order, without streams. Reads and fences are keyed by request here and leave as values.
        self._parts: Final[tuple[_Part, ...]] = (
            self.reads,
            self.expects,
            self.fences,
            self.grants,
            self.releases,
            self.revokes,
            self.restarts,
            self.saves,
            self.completes,
            self.heartbeats,
            self.cancels,
            self.passes,
            self.voids,
            self.failures,
        )
        self._rare: Final = self._parts[_COMMON:]

    def read(self, request_id: str, order: ReadOrder, *, fills_blocks: bool = False) -> None:
        """Order a read, or replace the one that waits."""
        self.reads[request_id] = order
        if fills_blocks and self._hold_steps:
            self._young[request_id] = self._hold_steps
        else:
            self._young.pop(request_id, None)
        self.has_orders = True

    def expect(self, request_id: str, fence: tuple[int, int] | None) -> None:
        """Announce a producer request, with its fence if it has one."""
        self.expects[request_id] = None
        if fence is not None:
            self.fences[request_id] = new_tuple(FenceOrder, (request_id, *fence))
        self.has_orders = True

    def restart(self, request_id: str, fence: tuple[int, int] | None) -> None:
        """Note that a producer request is computed from the beginning again, under a new fence."""
        self.restarts[request_id] = None
        if fence is not None:
            self.fences[request_id] = new_tuple(FenceOrder, (request_id, *fence))
        self.has_orders = self._has_rare = True

    def save(self, request_id: str, blocks: BlockIds) -> None:
        """Order the host-buffer save of a chunk."""
        self.saves.append((request_id, blocks))
        self.has_orders = self._has_rare = True

    def complete(self, request_id: str) -> None:
        """Note that a prompt is complete with the saves of this step."""
        self.completes[request_id] = None
        self.has_orders = self._has_rare = True

    def withdraw(self, request_id: str) -> bool:
        """Drop the waiting orders of a producer request; return True if the workers do not know of the request."""
        is_unheard = request_id in self.expects
        for part in (self.expects, self.fences, self.restarts):
            part.pop(request_id, None)
        self.drop_saves(request_id)
        return is_unheard

    def drop_saves(self, request_id: str) -> None:
        """Drop the waiting saves of a request."""
        if self.saves:
            self.saves[:] = [save for save in self.saves if save[0] != request_id]
        self.completes.pop(request_id, None)
        self.has_orders = self.holds_orders()

    def add(self, part: list[str], request_id: str) -> None:
        """Add a request to one of the parts that are lists of ids."""
        part.append(request_id)
        self.has_orders = self._has_rare = True

    def renew(self, orders: list[HeartbeatOrder]) -> None:
        """Order heartbeats."""
        if orders:
            self.heartbeats.extend(orders)
            self.has_orders = self._has_rare = True

    def stream(self) -> StreamOrders:
        """Return the orders of streams, for a caller that is about to add one."""
        self.has_orders = self._has_rare = True
        return self.streams

    def fail(self, request_id: str) -> None:
        """Order the failure report of a parked request for which no worker reads."""
        self.failures[request_id] = None
        self.has_orders = self._has_rare = True

    def is_parting(self, request_id: str) -> bool:
        """Whether the next plan still carries the end of a request; a second request of that id would mix with it."""
        is_known = request_id in self.reads or request_id in self.releases or request_id in self.failures
        return is_known or self.streams.is_parting(request_id)

    def holds_orders(self) -> bool:
        """Return whether any part has an order; `has_orders` remembers the same."""
        return any(self._parts) or self.streams.has_orders

    def take(self) -> StepPlan:
        """Return all waiting orders that are due and clear them; call it only when there are some."""
        if self._young:
            return self._take_due()
        self.has_orders = False
        if self._has_rare:
            return self._take_all()
        # Most plans have one or two of the common parts; the empty ones are neither copied nor cleared.
        reads: tuple[ReadOrder, ...] = ()
        expects: tuple[str, ...] = ()
        fences: tuple[FenceOrder, ...] = ()
        grants: tuple[GrantOrder, ...] = ()
        if self.reads:
            reads = tuple(self.reads.values())
            self.reads.clear()
        if self.expects:
            expects = tuple(self.expects)
            self.expects.clear()
            fences = tuple(self.fences.values())  # without a restart, only the expected requests have fences
            self.fences.clear()
        if self.grants:
            grants = tuple(self.grants)
            self.grants.clear()
        common = reads, expects, fences, grants
        return new_tuple(StepPlan, common + _NONE_RARE)

    def _take_due(self) -> StepPlan:
        """Return a plan without the reads that are kept back, and without their voids, which mean nothing before them."""
        kept = {request_id: self.reads.pop(request_id) for request_id in self._young if request_id in self.reads}
        voids = [request_id for request_id in self.voids if request_id in kept]
        self.voids[:] = [request_id for request_id in self.voids if request_id not in kept]
        left = {request_id: self._young[request_id] - 1 for request_id in kept}
        self._young = {}
        plan = self.take()
        self._young = {request_id: plans for request_id, plans in left.items() if plans}
        self.reads.update(kept)
        self.voids.extend(voids)
        self.has_orders, self._has_rare = bool(kept), self._has_rare or bool(voids)
        return plan

    def _take_all(self) -> StepPlan:
        common = tuple(self.reads.values()), tuple(self.expects), tuple(self.fences.values()), tuple(self.grants)
        plan = new_tuple(StepPlan, (*common, *map(tuple, self._rare), self.streams.take()))
        for part in self._parts:
            part.clear()
        self._has_rare = False
        return plan
