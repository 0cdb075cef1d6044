"""Orders that wait for the next step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_scheduler_state._plan import EMPTY_PLAN, FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan

if TYPE_CHECKING:
    from kv_scheduler_state._blocks import Blocks

__all__ = ["Outbox"]


@final
class Outbox:
    """Collects a step's orders; taking them is the only way to lose them."""

    __slots__ = (
        "cancels",
        "expects",
        "fences",
        "grants",
        "has_orders",
        "reads",
        "releases",
        "revokes",
        "saves",
    )

    def __init__(self) -> None:
        self.has_orders = False
        self.reads: dict[str, ReadOrder] = {}
        self.expects: dict[str, FenceOrder | None] = {}
        self.grants: list[GrantOrder] = []
        self.releases: list[str] = []
        self.revokes: list[str] = []
        self.cancels: list[str] = []
        self.saves: dict[str, list[Blocks]] = {}

    def withdraw(self, request_id: str) -> bool:
        """Drop what waits for a producer request; True if the workers have not heard of it."""
        is_unheard = request_id in self.expects
        self.expects.pop(request_id, None)
        self.drop_saves(request_id)
        return is_unheard

    def drop_saves(self, request_id: str) -> None:
        """Drop the saves that wait for a request."""
        self.saves.pop(request_id, None)
        self.has_orders = self.holds_orders()

    def is_parting(self, request_id: str) -> bool:
        """Whether the next plan still tells of the end of a request; a second one of that id would mix with it."""
        return request_id in self.reads or request_id in self.releases

    def holds_orders(self) -> bool:
        """Return what `has_orders` remembers, by looking."""
        return bool(
            self.reads or self.expects or self.grants or self.releases or self.revokes or self.cancels or self.saves
        )

    def take(self, heartbeats: tuple[HeartbeatOrder, ...]) -> StepPlan:
        """Return everything that waits, together with `heartbeats`, and start afresh."""
        if not self.has_orders:
            return StepPlan(heartbeats=heartbeats) if heartbeats else EMPTY_PLAN
        self.has_orders = False
        reads, expects, saves = self.reads, self.expects, self.saves
        plan = StepPlan(
            tuple(reads.values()) if reads else (),
            tuple([order for order in expects.values() if order is not None]) if expects else (),
            tuple(self.grants),
            tuple(self.releases),
            tuple([(request_id, blocks) for request_id, chunks in saves.items() for blocks in chunks]) if saves else (),
            heartbeats,
            tuple(expects),
            tuple(self.revokes),
            tuple(self.cancels),
        )
        for part in (reads, expects, saves, self.grants, self.releases, self.revokes, self.cancels):
            if part:
                part.clear()
        return plan
