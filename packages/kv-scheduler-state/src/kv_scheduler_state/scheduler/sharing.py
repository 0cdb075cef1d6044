"""Tickets that several local requests hold (the children of a request with n > 1), and the renewal of leases at peers.

One hand-over serves one read. Its first holder to be allocated reads; the others wait (`external_tokens` answers None) and
find the prompt in the local prefix cache afterwards. A read that has ended, well or badly, has used the ticket up. A reader
that is aborted passes the hand-over on: its read is cancelled without notifying the peer, and the next holder reads.
The peer is notified that a hand-over is not needed only when its last holder gives it up.

Example: d1, d2 and d3 hold one ticket. d1 reads, d2 and d3 wait. d1 is aborted: once its cancelled read is quiet, d2 reads. When
that read has ended, d3 finds the prompt in the prefix cache, and reads nothing.

Children arrive one by one, and a read takes a millisecond: d2 may come after the good end of d1's read. So the latest tickets
that were read to the end are remembered, and a request that brings one of them reads nothing. Without that it would read blocks
that the peer has freed: the fence refuses them, and `kv_load_failure_policy` would end the request; where there is no fence, as
at peers of vLLM's own kind, it would take another prompt's KV for its own. So a ticket without a fence is remembered after every
end of which the peer may have been notified: a failed or aborted read, also one that never reached the peer, or a request that
needed none. With a fence it may be tried again.

Heartbeats are ordered per peer engine: one carries all requests there. A peer is due once per period, whatever comes and goes
meanwhile; a new peer is due at once, which also makes the workers' handshake with it early.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.plan import HeartbeatOrder
from kv_scheduler_state.records import HandOver, TicketKey

if TYPE_CHECKING:
    from kv_scheduler_state.clock import ObservedClock
    from kv_scheduler_state.records import ConsumerRecord
    from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress

__all__ = ["HandOvers", "Heartbeats", "key_of"]

_REMEMBERED: Final = 1024
"""Tickets that are used up and remembered."""


def key_of(ticket: HandoffTicket) -> TicketKey:
    """Return the key that requests with the same ticket have in common."""
    return ticket.peer.engine_id, ticket.peer_request_id, ticket.nonce, ticket.fence


@final
class HandOvers:
    """The hand-overs that local requests hold."""

    def __init__(self) -> None:
        self._live: dict[TicketKey, HandOver] = {}
        # The latest tickets that are used up, oldest first.
        self._used: OrderedDict[TicketKey, None] = OrderedDict()

    def join(self, record: ConsumerRecord) -> None:
        """Note one more waiting holder of the record's ticket."""
        key = key_of(record.ticket)
        hand_over = self._live.get(key)
        if hand_over is None:
            hand_over = HandOver(key, is_spent=key in self._used)
            if not hand_over.is_spent:
                self._live[key] = hand_over
        hand_over.waiting += 1
        record.hand_over = hand_over

    def leave(self, hand_over: HandOver) -> None:
        """Note that a waiting holder gave up."""
        hand_over.waiting -= 1
        self._forget(hand_over)

    def read_ended(self, hand_over: HandOver, *, is_passed: bool, is_good: bool) -> None:
        """Note the end of a read, which uses the ticket up unless passed on.

        A good end uses it up for later requests, too, and without a fence any end of which the peer was notified.
        """
        hand_over.reading -= 1
        if not is_passed:
            hand_over.is_spent = True
            self.note_used(hand_over.key, is_good=is_good)
        self._forget(hand_over)

    def note_used(self, key: TicketKey, *, is_good: bool) -> None:
        """Note that a ticket was read to the end, or that its peer may free the blocks.

        Without a fence, new content in freed blocks would go unnoticed.
        """
        *_, fence = key
        if is_good or fence is None:
            self._used[key] = None
            if len(self._used) > _REMEMBERED:
                self._used.popitem(last=False)

    def was_read(self, ticket: HandoffTicket) -> bool:
        """Whether a ticket was noted as used up, as far as that is remembered."""
        return key_of(ticket) in self._used

    def _forget(self, hand_over: HandOver) -> None:
        if not hand_over.waiting and not hand_over.reading and self._live.get(hand_over.key) is hand_over:
            del self._live[hand_over.key]


@final
@dataclass(slots=True)
class _Peer:
    """Leases at one peer engine, oldest first; two may hold the same ticket, renewed until the last of them is done."""

    due_s: float
    holders: dict[ConsumerRecord, None] = field(default_factory=dict["ConsumerRecord", None])


@final
class Heartbeats:
    """Collects leases by peer engine and orders their renewal.

    Args:
        period_s: Time between two heartbeats to one peer.
        clock: The scheduler's clock.

    Attributes:
        due_s: Time at which the first peer is due; infinite without peers.
        last_delay_s: Delay of the last orders: that of the most overdue peer.
    """

    def __init__(self, period_s: float, clock: ObservedClock) -> None:
        self._period_s = period_s
        self._clock = clock
        self._peers: dict[PeerAddress, _Peer] = {}
        self.due_s = math.inf
        self.last_delay_s = 0.0

    def start(self, record: ConsumerRecord) -> None:
        """Renew the lease of a record's ticket from now on."""
        address = record.renewed_at = record.ticket.peer
        peer = self._peers.setdefault(address, _Peer(self._clock.observed_s))
        if not peer.holders:  # nothing was due there while it had none, however long ago its period ended
            peer.due_s = max(peer.due_s, self._clock.observed_s)
            self.due_s = min(self.due_s, peer.due_s)
        peer.holders[record] = None

    def stop(self, record: ConsumerRecord) -> None:
        """Stop renewing the lease for one of its holders, if it is renewed."""
        if record.renewed_at is not None:
            del self._peers[record.renewed_at].holders[record]
            record.renewed_at = None

    def take_due(self, now_s: float) -> list[HeartbeatOrder]:
        """Return one order per peer that is due, the most overdue first, and forget peers without holders."""
        orders: list[HeartbeatOrder] = []
        delays_s: list[float] = []
        for address, peer in sorted(self._peers.items(), key=lambda item: item[1].due_s):
            if peer.due_s > now_s:
                break
            if not peer.holders:
                # Kept until now, so that a request that comes and goes cannot make heartbeats denser than the period.
                del self._peers[address]
                continue
            readers = dict.fromkeys((record.ticket.peer_request_id, record.ticket.nonce) for record in peer.holders)
            orders.append(HeartbeatOrder(address, tuple(readers)))
            delays_s.append(now_s - peer.due_s)
            peer.due_s = now_s + self._period_s
        self.due_s = min([peer.due_s for peer in self._peers.values()], default=math.inf)
        self.last_delay_s = max(delays_s, default=self.last_delay_s)
        return orders
