"""Orders that wait for the next step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, final

from kv_scheduler_state._plan import EMPTY_PLAN, FenceOrder, GrantOrder, HeartbeatOrder, ReadOrder, StepPlan
from kv_scheduler_state._records import new_tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_scheduler_state._blocks import Blocks

__all__ = ["Outbox"]


class _Part(Protocol):
    def clear(self) -> None: ...
    def __iter__(self) -> Iterator[object]: ...


@final
class Outbox:
    """Collects a step's orders; taking them is the only way to lose them."""

    __slots__ = (
        "_lists",
        "_parts",
        "cancels",
        "expects",
        "fences",
        "grants",
        "has_orders",
        "heartbeats",
        "reads",
        "releases",
        "revokes",
        "saves",
    )

    def __init__(self) -> None:
        self.has_orders = False
        self.reads: Final[dict[str, ReadOrder]] = {}
        self.fences: Final[dict[str, FenceOrder]] = {}
        self.expects: Final[dict[str, None]] = {}
        self.grants: Final[list[GrantOrder]] = []
        self.releases: Final[list[str]] = []
        self.saves: Final[list[tuple[str, Blocks]]] = []
        self.heartbeats: Final[list[HeartbeatOrder]] = []
        self.revokes: Final[list[str]] = []
        self.cancels: Final[list[str]] = []
        # The parts of a plan after its reads and fences, in its order; and all of them.
        self._lists: Final[tuple[_Part, ...]] = (
            self.grants,
            self.releases,
            self.saves,
            self.heartbeats,
            self.expects,
            self.revokes,
            self.cancels,
        )
        self._parts: Final[tuple[_Part, ...]] = (self.reads, self.fences, *self._lists)

    def expect(self, request_id: str, fence: tuple[int, int] | None) -> None:
        """Announce a producer request, with its fence if it has one."""
        self.expects[request_id] = None
        if fence is not None:
            self.fences[request_id] = new_tuple(FenceOrder, (request_id, *fence))
        self.has_orders = True

    def withdraw(self, request_id: str) -> bool:
        """Drop what waits for a producer request; True if the workers have not heard of it."""
        is_unheard = request_id in self.expects
        self.expects.pop(request_id, None)
        self.fences.pop(request_id, None)
        self.drop_saves(request_id)
        return is_unheard

    def drop_saves(self, request_id: str) -> None:
        """Drop the saves that wait for a request."""
        if self.saves:
            self.saves[:] = [save for save in self.saves if save[0] != request_id]
        self.has_orders = self.holds_orders()

    def is_parting(self, request_id: str) -> bool:
        """Whether the next plan still tells of the end of a request; a second one of that id would mix with it."""
        return request_id in self.reads or request_id in self.releases

    def holds_orders(self) -> bool:
        """Return what `has_orders` remembers, by looking."""
        return any(self._parts)

    def take(self) -> StepPlan:
        """Return everything that waits and start afresh."""
        if not (self.has_orders or self.heartbeats):
            return EMPTY_PLAN
        self.has_orders = False
        reads = tuple(self.reads.values()) if self.reads else ()
        fences = tuple(self.fences.values()) if self.fences else ()
        plan = new_tuple(StepPlan, (reads, fences, *map(tuple, self._lists)))
        for part in filter(None, self._parts):
            part.clear()
        return plan
