"""The producer's leases on one worker.

Theory of operation. The scheduler announces a request before any peer can read it (`expect`), and grants the lease
when the prompt is done. Readers may be faster than the grant, because it travels with the next step: their reports are
counted meanwhile and take effect with the grant. From then on the lease ends when all readers of one consumer have reported,
when its deadline passes, or when the scheduler revokes it. Each end carries the fence word to write *before* the blocks are
reported free.

A notification that carries a nonce counts only for the grant with that nonce, so a late one cannot touch the next lease of a
recycled request id. Notifications without one (vLLM's own readers, version 0.1) count for the request id alone.

Lease time is observed time (see `ObservedClock`): between two readings of the clock it advances by at most a sixth of the
shortest live lease, and by no more than `max_pause_s`. Example: a lease of 6 s is renewed to 4 s every second, so at least 3 s
are left; a process that stood still for a minute takes off 1 s, and the renewals in its queue come in time. Leases expire in
`take_ended` alone: call it after processing the waiting notifications.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

from kv_scheduler_state.clock import ObservedClock
from kv_scheduler_state.errors import InvalidEvent, SchedulerStateError, quote
from kv_scheduler_state.fences import ended_generation
from kv_scheduler_state.tables import GONE, LEASE_TABLE, NEW, Transition
from kv_scheduler_state.ticket.ticket import wire_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_scheduler_state.plan import StepPlan

__all__ = ["Lease", "LeaseEnd", "LeaseTable", "Refusal"]

_EndReason = Literal["read", "expired", "released"]
_Verdict = Literal[
    "counted",
    "complete",
    "duplicate",
    "unknown",
    "expired",
    "stale",
    "bad-count",
    "bad-reader",
    "too-many-consumers",
]
_Order = Literal["expect", "grant", "release", "revoke"]
_END_REASONS: Final[dict[str, _EndReason]] = {
    "end-read": "read",
    "end-expired": "expired",
    "end-released": "released",
    "end-revoked": "expired",
}


@final
class LeaseEnd(NamedTuple):
    """A producer request whose blocks may be given back, once its fence word is written.

    Attributes:
        request_id: The request.
        reason: "read": all readers of a consumer are done. "expired": its deadline passed, or the scheduler revoked it.
            "released": it was never handed over.
        fence: (slot, generation) to write before the blocks are reported free, or None.
        is_reported: Whether the engine waits for its report as sent. False for "released": the engine has forgotten it.
        is_revoked: Whether the scheduler ended it early.
        readers_done: Readers that had reported, over all consumers.
    """

    request_id: str
    reason: _EndReason
    fence: tuple[int, int] | None
    is_reported: bool
    is_revoked: bool
    readers_done: int


@final
class Refusal(NamedTuple):
    """An order of a plan that the lease table refused; all others were applied.

    Attributes:
        request_id: The request.
        order: The kind of order.
        code: Code of the error.
        message: The same as a sentence.
    """

    request_id: str
    order: _Order
    code: str
    message: str


@final
@dataclass(slots=True, eq=False)
class _Readers:
    """The ranks of one consumer engine that are done with a request.

    Attributes:
        needed: Ranks that the consumer says there are.
        done: Identities of those that have reported.
    """

    needed: int
    done: set[str] = field(default_factory=set[str])

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have reported."""
        return len(self.done) >= self.needed


@final
@dataclass(slots=True, eq=False)
class Lease:
    """The record of one lease.

    Readers are kept by (nonce, consumer): before the grant its nonce is not known here, and the ranks of two consumers that
    hold the same ticket never add up to a complete read.
    """

    state: str = NEW
    deadline_s: float = 0.0
    lease_s: float = 0.0
    fence: tuple[int, int] | None = None
    nonce: str = ""
    readers: dict[tuple[str, str], _Readers] = field(default_factory=dict[tuple[str, str], _Readers])

    @property
    def readers_done(self) -> tuple[str, ...]:
        """Identities of all readers that have reported."""
        return tuple(sorted({reader for readers in self.readers.values() for reader in readers.done}))


_MAX_CONSUMERS: Final = 64
"""Consumers that are counted per request; a ticket is for one, and a retry may bring another."""
_MAX_READERS: Final = 4096
"""Largest believable number of readers of one consumer."""
_REMEMBERED_ENDS: Final = 1024
_SPARE_DUE: Final = 64
"""Ended requests that are remembered to tell a late notification from an unknown one."""
_RENEWED_PART: Final = 2 / 3
"""Part of its length that a lease lasts after a renewal. Source: vLLM's own connector."""
_PAUSE_PART: Final = 1 / 6
"""Part of a lease that one pause may take off; leases are renewed six times per length and then last two thirds of it."""


@final
class LeaseTable:
    """Keeps, renews and ends leases; performs nothing itself.

    Not thread-safe: it belongs to the thread that drains notifications.

    Args:
        max_pause_s: Most lease time that passes between two readings of the clock, a sixth of the shortest live lease if that is
            less; `math.inf` for plain clock time. Call at least this often, or leases last longer than announced.
        requires_nonces: True ignores notifications without a nonce for a grant that has one: they cannot come from a holder of
            the ticket. Readers of vLLM's own kind send none.
    """

    def __init__(self, *, max_pause_s: float = 5.0, requires_nonces: bool = False) -> None:
        self._requires_nonces = requires_nonces
        self._clock = ObservedClock(max_pause_s)
        self._max_pause_s = max_pause_s
        # Number of live leases of each length.
        self._lengths: Counter[float] = Counter()
        self._table = LEASE_TABLE
        self._leases: dict[str, Lease] = {}
        # Heap of (time, request): no running lease is due before its entry. Renewals and ends leave entries as they are.
        self._due: list[tuple[float, str]] = []
        self._ended: list[LeaseEnd] = []
        self._past: OrderedDict[str, _EndReason] = OrderedDict()
        # Requests that peers know by another id than the engine's, by that id; as long as they are live or in `_past`.
        self._named: dict[str, str] = {}

    def apply(self, plan: StepPlan, *, now_s: float) -> tuple[Refusal, ...]:
        """Apply the producer's part of a step plan, in the order that makes each order safe; return the refused orders.

        Raises:
            InvalidEvent: `invalid-event`, for an invalid time; nothing is applied then.
        """
        self._clock.observe(now_s)
        refusals: list[Refusal] = []

        def apply(order: _Order, request_id: str, change: Callable[..., None], **values: object) -> None:
            try:
                change(request_id, **values, now_s=now_s)
            except SchedulerStateError as error:
                refusals.append(Refusal(request_id, order, error.code, error.message))

        for request_id in plan.expects:
            apply("expect", request_id, self.expect)
        for request_id, lease_s, fence, nonce in plan.grants:
            apply("grant", request_id, self.grant, lease_s=lease_s, fence=fence, nonce=nonce)
        for request_id in plan.releases:
            apply("release", request_id, self.release)
        for request_id in plan.revokes:
            apply("revoke", request_id, self.release)
        return tuple(refusals)

    def expect(self, request_id: str, *, now_s: float) -> None:
        """Announce a request whose readers may report before its grant.

        Raises:
            IllegalTransition: `illegal-transition`, if it is known already.
            InvalidEvent: `invalid-event`.
        """
        lease = self._leases.get(request_id) or Lease()
        row = self._table.find(request_id, lease.state, "expect")
        at_s = self._clock.observe(now_s)
        self._begin(request_id, lease)
        self._step(request_id, lease, row, at_s)

    def request_of(self, named_id: str) -> str:
        """Return the engine's id of a request that a peer's notification names."""
        return self._named.get(named_id, named_id)

    def grant(
        self, request_id: str, *, lease_s: float, fence: tuple[int, int] | None, nonce: str = "", now_s: float
    ) -> None:
        """Start a lease now.

        Args:
            request_id: The request.
            lease_s: Seconds without a renewal after which it ends.
            fence: (slot, generation) that was written for it, or None.
            nonce: Nonce in its ticket, which readers send back; empty for none.
            now_s: The caller's monotonic clock.

        Raises:
            IllegalTransition: `illegal-transition`, for a second grant.
            InvalidEvent: `invalid-event`, for a lease that is not positive and finite.
        """
        if (type(lease_s) is not float and type(lease_s) is not int) or not 0 < lease_s < 1e15:
            raise InvalidEvent(f"lease_s is {quote(lease_s)}, must be a positive, finite number of seconds")
        lease = self._leases.get(request_id) or Lease()
        if lease.state == "expected":
            # Of the readers that were faster than the grant, those count that answer with its nonce, or need none.
            nonces = {nonce} if self._requires_nonces else {"", nonce}
            lease.readers = {key: readers for key, readers in lease.readers.items() if key[0] in nonces}
        is_complete = any(readers.is_complete for readers in lease.readers.values())
        row = self._table.find(request_id, lease.state, "grant-complete" if is_complete else "grant")
        at_s = self._clock.observe(now_s)
        self._begin(request_id, lease)
        lease.fence = fence
        lease.nonce = nonce
        lease.lease_s = lease_s
        lease.deadline_s = at_s + lease_s
        self._step(request_id, lease, row, at_s)

    def renew(self, request_id: str, *, nonce: str = "", now_s: float) -> bool:
        """Extend a lease after a heartbeat, never shorten it; return whether a running lease accepts this heartbeat.

        Returns False without a lease, for the nonce of another grant, and before the grant: no lease runs yet, and its nonce is
        not known here, so a stranger's heartbeat looks like a holder's.

        Raises:
            InvalidEvent: `invalid-event`, for an invalid time.
        """
        at_s = self._clock.observe(now_s)
        lease = self._leases.get(request_id)
        if lease is None or _is_stale(lease, nonce, self._requires_nonces):
            return False
        row = self._table.find(request_id, lease.state, "renew")
        self._step(request_id, lease, row, at_s)
        return "extend" in row.effects

    def read_complete(
        self, request_id: str, *, reader: str, consumer: str = "", reader_count: int, nonce: str = "", now_s: float
    ) -> _Verdict:
        """Count a reader that is done, each identity once per consumer.

        Args:
            request_id: The request that was read.
            reader: Identity of the reader, as the transport knows it.
            consumer: The engine that the reader belongs to; empty if the notification does not say.
            reader_count: Readers of that engine, as the notification says.
            nonce: Nonce of the grant that the notification answers; empty if it has none.
            now_s: The caller's monotonic clock.

        Returns:
            "counted"; "complete" for the last one; "duplicate" for a reader (or a whole request) that is done already;
            "unknown" or "expired" for a request without a lease; "stale" for the nonce of another grant; "bad-count" for a
            count that is impossible or not the one that the consumer's first reader gave; "bad-reader"
            for an identity that does not count; "too-many-consumers".

        Raises:
            InvalidEvent: `invalid-event`, for an invalid time. Nothing that a peer sends raises.
        """
        at_s = self._clock.observe(now_s)
        lease = self._leases.get(request_id)
        if lease is None:
            reason = self._past.get(request_id)
            return "unknown" if reason is None else "duplicate" if reason == "read" else "expired"
        if _is_stale(lease, nonce, self._requires_nonces):
            return "stale"
        if type(reader) is not str or not reader:
            return "bad-reader"
        if type(reader_count) is not int or not 1 <= reader_count <= _MAX_READERS:
            return "bad-count"
        readers = lease.readers.get((nonce, consumer))
        if readers is None:
            if len(lease.readers) >= _MAX_CONSUMERS:
                return "too-many-consumers"
            readers = _Readers(reader_count)
        if reader in readers.done and readers.needed == reader_count:
            return "duplicate"
        if readers.needed != reader_count or readers.is_complete:
            return "bad-count"  # complete: all that were announced are done already; the grant is still on its way
        is_last = len(readers.done) + 1 >= reader_count
        event = "last-reader" if is_last and lease.state == "granted" else "reader"
        row = self._table.find(request_id, lease.state, event)
        readers.done.add(reader)
        lease.readers[nonce, consumer] = readers
        self._step(request_id, lease, row, at_s)
        return "complete" if is_last else "counted"

    def release(self, request_id: str, *, now_s: float) -> None:
        """End a request that is not handed over after all, or a lease that the scheduler takes back.

        A request that is not known here is accepted: a revocation may cross with the lease's own end.

        Raises:
            InvalidEvent: `invalid-event`, for an invalid time.
        """
        lease = self._leases.get(request_id) or Lease()
        row = self._table.find(request_id, lease.state, "release")
        at_s = self._clock.observe(now_s)
        self._leases[request_id] = lease
        self._step(request_id, lease, row, at_s)

    def take_ended(self, *, now_s: float) -> tuple[LeaseEnd, ...]:
        """Return the leases that ended since the last call, oldest first, after expiring those that are due.

        Raises:
            InvalidEvent: `invalid-event`, for an invalid time.
        """
        at_s = self._clock.observe(now_s)
        while self._due and self._due[0][0] <= at_s:
            due_s, request_id = heapq.heappop(self._due)
            lease = self._leases.get(request_id)
            if lease is None or lease.state != "granted":
                continue
            if lease.deadline_s > due_s:  # a renewal only moves a deadline to later
                heapq.heappush(self._due, (lease.deadline_s, request_id))
            else:
                self._step(request_id, lease, self._table.find(request_id, lease.state, "expire"), at_s)
        ended, self._ended = tuple(self._ended), []
        return ended

    def live_count(self) -> int:
        """Return the number of requests that are expected or granted here."""
        return len(self._leases)

    def live_ids(self) -> tuple[str, ...]:
        """Return the requests that are expected or granted here, oldest first."""
        return tuple(self._leases)

    def granted_count(self) -> int:
        """Return the number of running leases: only their readers may be on the way, or have reported already."""
        return sum(self._lengths.values())

    def snapshot(self, *, now_s: float, most: int | None = None) -> tuple[dict[str, object], ...]:
        """Return leases with state, age, readers and the time left, oldest first; at most `most` of them."""
        at_s = self._clock.observe(now_s)
        return tuple(
            [
                {
                    "request_id": request_id,
                    "state": lease.state,
                    "left_s": lease.deadline_s - at_s if lease.state == "granted" else None,
                    "readers": list(lease.readers_done),
                    "readers_needed": max([readers.needed for readers in lease.readers.values()], default=0),
                }
                for request_id, lease in islice(self._leases.items(), most)
            ]
        )

    def _begin(self, request_id: str, lease: Lease) -> None:
        self._leases[request_id] = lease
        self._past.pop(request_id, None)
        named_id = wire_id(request_id)
        if named_id != request_id:
            self._named[named_id] = request_id

    def _step(self, request_id: str, lease: Lease, row: Transition, at_s: float) -> None:
        was_granted = lease.state == "granted"
        lease.state = row.target
        for effect in row.effects:
            if effect == "extend":
                lease.deadline_s = max(lease.deadline_s, at_s + lease.lease_s * _RENEWED_PART)
            elif effect == "start":
                self._note_length(lease.lease_s, 1)
                heapq.heappush(self._due, (lease.deadline_s, request_id))
                if len(self._due) > 2 * len(self._leases) + _SPARE_DUE:  # most of them ended before their deadline
                    granted = [
                        (each.deadline_s, name) for name, each in self._leases.items() if each.state == "granted"
                    ]
                    heapq.heapify(granted)
                    self._due = granted
            elif effect in _END_REASONS:
                self._end(request_id, lease, effect)
        if lease.state == GONE:
            del self._leases[request_id]
            if was_granted:
                self._note_length(lease.lease_s, -1)

    def _note_length(self, lease_s: float, change: int) -> None:
        """Count a lease, and bound pauses by the shortest length among live leases."""
        self._lengths[lease_s] += change
        if not self._lengths[lease_s]:
            del self._lengths[lease_s]
        if self._max_pause_s < math.inf:
            shortest_s = min(self._lengths, default=math.inf)
            self._clock.max_step_s = min(self._max_pause_s, _PAUSE_PART * shortest_s)

    def _end(self, request_id: str, lease: Lease, effect: str) -> None:
        reason = _END_REASONS[effect]
        fence = lease.fence
        self._ended.append(
            LeaseEnd(
                request_id,
                reason,
                None if fence is None else (fence[0], ended_generation(fence[1])),
                reason != "released",
                effect == "end-revoked",
                len(lease.readers_done),
            )
        )
        self._past[request_id] = reason
        if len(self._past) > _REMEMBERED_ENDS:
            forgotten, _ = self._past.popitem(last=False)
            if self._named:
                self._named.pop(wire_id(forgotten), None)


def _is_stale(lease: Lease, nonce: str, is_required: bool) -> bool:
    return (bool(nonce) or is_required) and lease.state == "granted" and nonce != lease.nonce
