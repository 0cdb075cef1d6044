"""Deadlines of leases: a heap that renewals do not touch.

A renewal moves the deadline in the lease itself. An item that comes up too early is pushed back with the later deadline. So a
renewal is an assignment, an idle look costs one comparison, and the order of expiry is the order of deadlines, whatever
the order of grants was. Leases that end for another reason leave their item behind until it comes up, or until stale items are
most of the heap.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kv_scheduler_state._lease import Lease

__all__ = ["Deadlines"]

_SLACK: Final = 64


@final
class Deadlines:
    """Deadlines of the granted leases of one table.

    Args:
        leases: The table's leases by request; only read here.
    """

    __slots__ = ("_heap", "_leases", "_sequence", "look_s")

    def __init__(self, leases: Mapping[str, Lease]) -> None:
        self._leases = leases
        self._heap: list[tuple[float, int, str]] = []
        self._sequence = 0
        # No lease is due before this time, which may be too early after leases have ended, but never too late.
        self.look_s = math.inf

    def push(self, request_id: str, deadline_s: float) -> None:
        """Watch a lease that has been granted."""
        self._sequence += 1
        heappush(self._heap, (deadline_s, self._sequence, request_id))
        self.look_s = min(self.look_s, deadline_s)

    def due(self, at_s: float) -> Iterator[tuple[str, Lease]]:
        """Yield the leases whose deadline has passed, in order; the caller ends each of them."""
        heap = self._heap
        while heap and heap[0][0] <= at_s:
            _, sequence, request_id = heappop(heap)
            lease = self._leases.get(request_id)
            if lease is None or lease.state != "granted":
                continue  # the lease ended for another reason
            if lease.deadline_s > at_s:
                heappush(heap, (lease.deadline_s, sequence, request_id))
                continue
            yield request_id, lease
        self.look_s = heap[0][0] if heap else math.inf

    def next_s(self) -> float | None:
        """Return the earliest deadline, None without leases."""
        heap = self._heap
        while heap:
            deadline_s, sequence, request_id = heap[0]
            lease = self._leases.get(request_id)
            if lease is None or lease.state != "granted":
                heappop(heap)
            elif lease.deadline_s > deadline_s:
                heappop(heap)
                heappush(heap, (lease.deadline_s, sequence, request_id))
            else:
                return deadline_s
        return None

    def drop_stale(self) -> None:
        """Drop the items of leases that have ended, once they are most of the heap."""
        if len(self._heap) > 2 * len(self._leases) + _SLACK:
            self._heap = [item for item in self._heap if item[2] in self._leases]
            heapify(self._heap)

    def clear(self) -> None:
        """Forget all deadlines."""
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, request_id: object) -> bool:
        return any(item[2] == request_id for item in self._heap)
