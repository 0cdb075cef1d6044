"""One worker's part of all hand-overs, on its engine thread. It outlives the registrations of the worker's memory.

**Fences.** A request's fence word is written on the engine thread as soon as its plan arrives: it must be there before the
step's end can make a ticket known. When a worker loses its memory (sleep), the words and the KV of announced requests are lost.
Such a request becomes whole again when the engine computes it from the beginning: its new word is among the plan's fences. A
lost request that is granted a lease all the same must end at once; without its word no reader accepts its pages.

**Streams.** The *engine* counts one report of each worker as received, and lets a request run once it has all of them.
So a worker whose fence held tells the engine at once, and never again for this request. A worker whose stream broke tells the
*scheduler half* alone, which may order another stream, or the plain read of the final ticket, into the same blocks. A worker
that is already done takes part in neither, because its data counts.

Worked example. Worker 0 is done and worker 1 breaks: the engine has one report of two. The final ticket comes: worker 1 reads
alone, its report is the second. Or nothing comes, and the stream is to be stopped: worker 1 reports the request as received
and failed, worker 0 reports nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from kv_scheduler_state.plan import StepPlan, StreamOrder

__all__ = ["EndReport", "WorkerState"]


class EndReport(NamedTuple):
    """Reports of a step: for the engine, and for the scheduler half (request, whether the fence held)."""

    received: tuple[str, ...]
    failed: tuple[str, ...]
    ends: tuple[tuple[str, bool], ...]


@final
class WorkerState:
    """Takes in every step plan, and returns the part of it that this worker must carry out. Not thread-safe."""

    def __init__(self) -> None:
        # Fence words of announced requests, and those of them whose memory is gone.
        self._announced: dict[str, tuple[int, int] | None] = {}
        self._lost: set[str] = set()
        # State of each stream that is read here: reading, torn, done, or stopping. A stopping one is reported however it ends.
        self._states: dict[str, str] = {}
        self._received: list[str] = []
        self._failed: list[str] = []
        self._ends: list[tuple[str, bool]] = []

    def apply(self, plan: StepPlan) -> StepPlan:
        """Take in a plan once; return the part that this worker must carry out.

        Leases of requests whose KV is lost are revoked with their grant. Orders about a stream that this worker has read to its
        end are left out, since it has reported the request already.
        """
        self._announced.update(dict.fromkeys(plan.expects))
        self._lost.difference_update(plan.restarts)
        self._announced.update((order.request_id, (order.slot, order.generation)) for order in plan.fences)
        granted = [order.request_id for order in plan.grants]
        lost = [request_id for request_id in granted if request_id in self._lost]
        for request_id in (*plan.releases, *granted):
            self._announced.pop(request_id, None)
            self._lost.discard(request_id)
        if lost:
            plan = plan._replace(revokes=(*plan.revokes, *lost))
        has_streams = self._states or plan.streams.watches or plan.streams.stops
        return self._without_done(plan) if has_streams else plan

    @property
    def announced(self) -> tuple[str, ...]:
        """Requests that are announced and neither granted nor released, oldest first."""
        return tuple(self._announced)

    def fence_slot(self, request_id: str) -> int | None:
        """Return the fence slot of an announced request, None if it has none."""
        word = self._announced.get(request_id)
        return word[0] if word is not None else None

    def lose(self) -> None:
        """Note that memory and fence words of all announced requests are gone."""
        self._lost.update(self._announced)

    @property
    def is_reading(self) -> bool:
        """Whether a stream has not ended here, or the next order about a torn one is still to come."""
        return any(state != "done" for state in self._states.values())

    def ended(self, request_id: str, *, is_done: bool) -> None:
        """Record the end of a request's stream on this worker, whose memory is quiet; `is_done` if its fence held."""
        was_stopped = self._states.get(request_id) == "stopping"
        if is_done or was_stopped:
            self._received.append(request_id)
        if was_stopped:
            self._failed.append(request_id)
            del self._states[request_id]
            return
        self._states[request_id] = "done" if is_done else "torn"
        self._ends.append((request_id, is_done))

    def take_report(self) -> EndReport:
        """Return the ends of streams since the last call."""
        report = EndReport(tuple(self._received), tuple(self._failed), tuple(self._ends))
        self._received, self._failed, self._ends = [], [], []
        return report

    def _without_done(self, plan: StepPlan) -> StepPlan:
        orders = plan.streams
        # A read or a failure is the last order about a stream.
        reads = [order for order in plan.reads if not order.is_reported or self._takes(order.request_id)]
        failures = [request_id for request_id in plan.failures if self._takes(request_id)]
        for request_id in orders.ends:
            self._states.pop(request_id, None)
        watches = [order for order in orders.watches if self._watches(order)]
        stops = [request_id for request_id in orders.stops if self._stops(request_id)]
        streams = orders._replace(watches=tuple(watches), stops=tuple(stops))
        return plan._replace(reads=tuple(reads), failures=tuple(failures), streams=streams)

    def _takes(self, request_id: str) -> bool:
        return self._states.pop(request_id, "") != "done"

    def _watches(self, order: StreamOrder) -> bool:
        request_id = order.read.request_id
        if self._states.get(request_id) == "done":
            self._ends.append((request_id, True))
            return False
        self._states[request_id] = "reading"
        return True

    def _stops(self, request_id: str) -> bool:
        """Note that a stream is given up; return whether its reading must be cancelled."""
        state = self._states.get(request_id)
        if state == "reading":
            self._states[request_id] = "stopping"
            return True
        if state == "torn":
            self._received.append(request_id)
            self._failed.append(request_id)
        self._states.pop(request_id, None)
        return False
