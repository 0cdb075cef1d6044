"""The producer's leases on one worker.

Theory of operation. The scheduler announces a request before anybody can read it (`expect`), and grants the lease
when the prompt is done. Readers may be faster than the grant, because it travels with the next step: what they report
meanwhile is counted and takes effect with the grant. From then on three things can end the lease: all readers
reported, its deadline passed, or the scheduler took it back. Each end carries the fence word to write *before* the
blocks are reported free.

Deadlines live in a heap, but a renewal does not touch it: it moves the deadline in the entry, and a heap item that
comes up too early is pushed back. So a renewal is an assignment, an idle look costs one comparison, and the order of
expiry is the order of deadlines, whatever the order of grants was.

Lease time is observed time (see `_clock`). Expiry happens in `take_ended` alone: a caller who feeds the notifications
that are waiting before he calls it never ends a lease that was renewed in time.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state._clock import ObservedClock
from kv_scheduler_state._errors import InvalidConfig, InvalidEvent, SchedulerStateError, quote
from kv_scheduler_state._fences import ended_generation
from kv_scheduler_state._lease import END_REASONS, Lease, LeaseEnd, LeaseEndReason, ReaderVerdict
from kv_scheduler_state._machine import GONE, NEW, Table, Transition, advance
from kv_scheduler_state._tables import LEASE_TABLE

if TYPE_CHECKING:
    from collections.abc import Generator

    from kv_scheduler_state._plan import StepPlan

__all__ = ["LeaseTable"]

_TRACE_LENGTH: Final = 16
_HEAP_SLACK: Final = 64


@final
class LeaseTable:
    """Keeps, renews and ends leases; performs nothing itself.

    Not thread-safe: it belongs to the thread that drains notifications.

    Args:
        renewal_fraction: A renewal lasts this part of the lease. Source: vLLM's own connector renews to two thirds.
        max_pause_s: Most lease time that passes between two looks at the clock; `math.inf` for plain clock time. Look
            at least this often, or leases last longer than they say.
        max_readers: Largest believable number of readers of one request.
        admits_all_readers: False counts only readers that were admitted with `admit_reader`.
        remembered_ends: Ended requests that are remembered to tell a late notification from an unknown one.
        table: The lease machine; another one only makes sense to a proof.

    Raises:
        InvalidConfig: `invalid-config`.
    """

    __slots__ = (
        "_admits_all",
        "_clock",
        "_ended",
        "_heap",
        "_leases",
        "_max_readers",
        "_past",
        "_readers",
        "_remembered",
        "_renewal_fraction",
        "_sequence",
        "_table",
    )

    def __init__(
        self,
        *,
        renewal_fraction: float = 2 / 3,
        max_pause_s: float = 5.0,
        max_readers: int = 4096,
        admits_all_readers: bool = True,
        remembered_ends: int = 1024,
        table: Table = LEASE_TABLE,
    ) -> None:
        if not 0 < renewal_fraction <= 1 or max_readers < 1 or remembered_ends < 0:
            raise InvalidConfig(
                f"renewal_fraction {renewal_fraction} must be above 0 and at most 1, max_readers {max_readers} at "
                f"least 1, remembered_ends {remembered_ends} at least 0"
            )
        self._renewal_fraction = renewal_fraction
        self._clock = ObservedClock(max_pause_s)
        self._max_readers = max_readers
        self._admits_all = admits_all_readers
        self._readers: set[str] = set()
        self._remembered = remembered_ends
        self._table = table
        self._leases: dict[str, Lease] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._sequence = 0
        self._ended: list[LeaseEnd] = []
        self._past: OrderedDict[str, LeaseEndReason] = OrderedDict()

    def apply(self, plan: StepPlan, *, now_s: float) -> None:
        """Apply the producer's part of a step plan, in the order that is right.

        Raises:
            IllegalTransition: `illegal-transition`.
            InvalidEvent: `invalid-event`.

            Either is raised only after everything legal has been applied.
        """
        refusals: list[SchedulerStateError] = []
        for request_id in plan.expects:
            with _collected(refusals):
                self.expect(request_id, now_s=now_s)
        for order in plan.grants:
            with _collected(refusals):
                self.grant(order.request_id, lease_s=order.lease_s, fence=order.fence, now_s=now_s)
        for request_id in (*plan.releases, *plan.revokes):
            with _collected(refusals):
                self.release(request_id, now_s=now_s)
        if refusals:
            raise refusals[0]

    def expect(self, request_id: str, *, now_s: float) -> None:
        """Announce a request whose readers may be heard before its grant.

        Raises:
            IllegalTransition: `illegal-transition`, if it is known already.
            InvalidEvent: `invalid-event`.
        """
        row = self._table.find(request_id, self._state(request_id), "expect")
        at_s = self._clock.observe(now_s)
        lease = self._leases[request_id] = Lease(at_s)
        self._past.pop(request_id, None)
        self._step(request_id, lease, row, at_s)

    def grant(self, request_id: str, *, lease_s: float, fence: tuple[int, int] | None, now_s: float) -> None:
        """Start a lease now.

        Args:
            request_id: The request.
            lease_s: Seconds without a renewal after which it ends.
            fence: (slot, generation) that was written for it, or None.
            now_s: The caller's monotonic clock.

        Raises:
            IllegalTransition: `illegal-transition`, for a second grant.
            InvalidEvent: `invalid-event`, for a lease that is not positive and finite.
        """
        if (type(lease_s) is not float and type(lease_s) is not int) or not 0 < lease_s < 1e15:
            raise InvalidEvent(f"lease_s is {quote(lease_s)}, must be a positive, finite number of seconds")
        lease = self._leases.get(request_id)
        is_complete = lease is not None and bool(lease.readers) and len(lease.readers) >= lease.readers_needed
        state = NEW if lease is None else lease.state
        row = self._table.find(request_id, state, "grant-complete" if is_complete else "grant")
        at_s = self._clock.observe(now_s)
        if lease is None:
            lease = self._leases[request_id] = Lease(at_s)
            self._past.pop(request_id, None)
        lease.fence = fence
        lease.extension_s = lease_s * self._renewal_fraction
        lease.deadline_s = at_s + lease_s
        self._step(request_id, lease, row, at_s)

    def renew(self, request_id: str, *, now_s: float) -> bool:
        """Prolong a lease after a heartbeat, never shorten it; False if there is none.

        Raises:
            InvalidEvent: `invalid-event`, for a time that is none.
        """
        at_s = self._clock.observe(now_s)
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        self._step(request_id, lease, self._table.find(request_id, lease.state, "renew"), at_s)
        return True

    def read_complete(self, request_id: str, *, reader: str, reader_count: int, now_s: float) -> ReaderVerdict:
        """Count a reader that is done, each identity once.

        Args:
            request_id: The request that was read.
            reader: Identity of the reader, as the transport knows it.
            reader_count: How many readers the notification says there are.
            now_s: The caller's monotonic clock.

        Returns:
            "counted"; "complete" for the last one; "duplicate" for a reader (or a whole request) that is done already;
            "unknown" or "expired" for a request without a lease; "bad-count" for a count that is impossible or not the
            one that the first reader gave; "bad-reader" and "unadmitted-reader" for an identity that does not count.

        Raises:
            InvalidEvent: `invalid-event`, for a time that is none. Nothing that a peer sends raises.
        """
        at_s = self._clock.observe(now_s)
        lease = self._leases.get(request_id)
        if lease is None:
            return self._verdict_without_lease(request_id)
        if type(reader) is not str or not reader:
            return "bad-reader"
        if not self._admits_all and reader not in self._readers:
            return "unadmitted-reader"
        if type(reader_count) is not int or not 1 <= reader_count <= self._max_readers:
            return "bad-count"
        if lease.readers_needed not in {0, reader_count}:
            return "bad-count"
        if reader in lease.readers:
            return "duplicate"
        if len(lease.readers) >= reader_count:
            return "bad-count"  # all that were announced are done already; the grant is still on its way
        is_last = len(lease.readers) + 1 >= reader_count
        is_granted = lease.state == "granted"
        row = self._table.find(request_id, lease.state, "last-reader" if is_last and is_granted else "reader")
        if "count" in row.effects:
            lease.readers_needed = reader_count
            lease.readers.add(reader)
        self._step(request_id, lease, row, at_s)
        return "complete" if is_last else "counted"

    def release(self, request_id: str, *, now_s: float) -> None:
        """End a request that is not handed over after all, or a lease that the scheduler takes back.

        A request that is not known here is accepted: a revocation may cross with the lease's own end.

        Raises:
            InvalidEvent: `invalid-event`, for a time that is none.
        """
        row = self._table.find(request_id, self._state(request_id), "release")
        at_s = self._clock.observe(now_s)
        lease = self._leases.get(request_id)
        if lease is None:
            lease = self._leases[request_id] = Lease(at_s)
        self._step(request_id, lease, row, at_s)

    def take_ended(self, *, now_s: float) -> tuple[LeaseEnd, ...]:
        """Return the leases that ended since the last call, oldest first, after expiring those that are due.

        Raises:
            InvalidEvent: `invalid-event`, for a time that is none.
        """
        at_s = self._clock.observe(now_s)
        heap = self._heap
        while heap and heap[0][0] <= at_s:
            _, sequence, request_id = heappop(heap)
            lease = self._leases.get(request_id)
            if lease is None or lease.state != "granted":
                continue  # it ended otherwise
            if lease.deadline_s > at_s:
                heappush(heap, (lease.deadline_s, sequence, request_id))
                continue
            self._step(request_id, lease, self._table.find(request_id, lease.state, "expire"), at_s)
        if not self._ended:
            return ()
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    @property
    def next_deadline_s(self) -> float | None:
        """The clock reading at which `take_ended` should look again at the latest, or None without leases."""
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
                return self._clock.to_reading(deadline_s)
        return None

    def live_count(self) -> int:
        """Return the number of requests that are expected or granted here."""
        return len(self._leases)

    def admit_reader(self, reader: str) -> None:
        """Count this identity from now on, if the table does not count everybody."""
        self._readers.add(reader)

    def dismiss_reader(self, reader: str) -> None:
        """Count this identity no longer; what it reported stays counted."""
        self._readers.discard(reader)

    def revocable(self, limit: int = 16) -> tuple[str, ...]:
        """Return up to `limit` granted requests that no reader has finished yet, youngest first. Costs a scan."""
        unread = [
            (lease.since_s, order, request_id)
            for order, (request_id, lease) in enumerate(self._leases.items())
            if lease.state == "granted" and not lease.readers
        ]
        unread.sort(reverse=True)
        return tuple([request_id for _, _, request_id in unread[: max(0, limit)]])

    def snapshot(self, *, now_s: float) -> tuple[dict[str, object], ...]:
        """Return every lease with its state, age, readers and the time left, oldest first."""
        at_s = self._clock.observe(now_s)
        return tuple(
            [
                {
                    "request_id": request_id,
                    "state": lease.state,
                    "in_state_s": at_s - lease.since_s,
                    "left_s": lease.deadline_s - at_s if lease.state == "granted" else None,
                    "fence": lease.fence,
                    "readers": sorted(lease.readers),
                    "readers_needed": lease.readers_needed,
                    "trace": [{"at_s": at, "event": event, "state": state} for at, event, state in lease.trace],
                }
                for request_id, lease in self._leases.items()
            ]
        )

    def check_invariants(self) -> tuple[str, ...]:
        """Return every broken internal promise in words; empty when the table is sound. Costs a scan."""
        in_heap = {request_id for _, _, request_id in self._heap}
        broken = [
            f"{request_id}: granted, but nothing will ever expire it"
            for request_id, lease in self._leases.items()
            if lease.state == "granted" and request_id not in in_heap
        ]
        broken += [
            f"{request_id}: lease state '{lease.state}' is no live state"
            for request_id, lease in self._leases.items()
            if lease.state not in {"expected", "granted"}
        ]
        broken += [f"{end.request_id}: ended, but still live" for end in self._ended if end.request_id in self._leases]
        return tuple(broken)

    def _state(self, request_id: str) -> str:
        lease = self._leases.get(request_id)
        return NEW if lease is None else lease.state

    def _verdict_without_lease(self, request_id: str) -> ReaderVerdict:
        reason = self._past.get(request_id)
        if reason is None:
            return "unknown"
        return "duplicate" if reason == "read" else "expired"

    def _step(self, request_id: str, lease: Lease, row: Transition, at_s: float) -> None:
        advance(lease, row, at_s, _TRACE_LENGTH)
        for effect in row.effects:
            if effect == "extend":
                lease.deadline_s = max(lease.deadline_s, at_s + lease.extension_s)
            elif effect == "start":
                self._sequence += 1
                heappush(self._heap, (lease.deadline_s, self._sequence, request_id))
            elif effect in END_REASONS:
                self._end(request_id, lease, effect)
        if lease.state == GONE:
            del self._leases[request_id]
            if len(self._heap) > 2 * len(self._leases) + _HEAP_SLACK:
                self._drop_stale()

    def _drop_stale(self) -> None:
        # Leases that were read leave their heap item behind until it comes up; under load that would be most of the heap.
        leases = self._leases
        self._heap = [item for item in self._heap if item[2] in leases]
        heapify(self._heap)

    def _end(self, request_id: str, lease: Lease, effect: str) -> None:
        reason = END_REASONS[effect]
        fence = lease.fence
        self._ended.append(
            LeaseEnd(
                request_id,
                reason,
                None if fence is None else (fence[0], ended_generation(fence[1])),
                reason != "released",
                effect == "end-revoked",
                len(lease.readers),
            )
        )
        if self._remembered:
            self._past[request_id] = reason
            if len(self._past) > self._remembered:
                self._past.popitem(last=False)


@contextmanager
def _collected(refusals: list[SchedulerStateError]) -> Generator[None, None, None]:
    try:
        yield
    except SchedulerStateError as error:
        refusals.append(error)
