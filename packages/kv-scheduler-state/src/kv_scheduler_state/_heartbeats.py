"""Renewal of leases at peer engines: heartbeats, ordered per peer and period.

One heartbeat carries all requests of one peer engine. A peer is due once per period, whatever comes and goes
meanwhile; a peer that is new is due at once, which also makes the workers' handshake with it early. Peers wait in a
heap by due time, so that a step in which no peer is due costs one comparison, however many requests wait.
"""

from __future__ import annotations

import math
from collections import Counter
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol, final

from kv_scheduler_state._handovers import key_of
from kv_scheduler_state._plan import HeartbeatOrder

if TYPE_CHECKING:
    from kv_scheduler_state._handovers import TicketKey
    from kv_scheduler_state._ticket import HandoffTicket, PeerAddress

__all__ = ["Heartbeats", "PeerLeases"]


class Holder(Protocol):
    """The part of a consumer record that this module reads."""

    ticket: HandoffTicket


@final
class PeerLeases:
    """The leases held at one peer engine."""

    __slots__ = ("address", "holders", "order")

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        # Oldest first. Two may hold the same ticket: its lease is renewed until the last of them is done.
        self.holders: dict[Holder, None] = {}
        self.order: HeartbeatOrder | None = None


@final
class Heartbeats:
    """Collects leases by peer engine and orders their renewal.

    Args:
        period_s: Time between two heartbeats to one peer.
    """

    __slots__ = ("_due", "_peers", "_period_s", "_sequence", "last_delay_s", "next_due_s")

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        # Time from which `take_due` has a peer to look at.
        self.next_due_s = math.inf
        self._peers: dict[PeerAddress, PeerLeases] = {}
        self._due: list[tuple[float, int, PeerLeases]] = []
        self._sequence = 0
        # Delay of the last orders: that of the most overdue peer.
        self.last_delay_s = 0.0

    def start(self, address: PeerAddress, holder: Holder, now_s: float) -> PeerLeases:
        """Renew the lease of a holder's ticket from now on, and return the peer to pass to `stop`."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = PeerLeases(address)
            self._push(now_s, peer)
        peer.holders[holder] = None
        peer.order = None
        return peer

    def stop(self, peer: PeerLeases, holder: Holder) -> None:
        """Stop renewing the lease for one of its holders."""
        del peer.holders[holder]
        peer.order = None

    def take_due(self, now_s: float) -> list[HeartbeatOrder]:
        """Return one order per peer that is due, and forget peers without holders."""
        orders: list[HeartbeatOrder] = []
        due = self._due
        delay_s = 0.0
        while due and due[0][0] <= now_s:
            due_s, _, peer = heappop(due)
            if not peer.holders:
                # Kept until now, so that a request that comes and goes cannot make heartbeats denser than the period.
                del self._peers[peer.address]
                continue
            if peer.order is None:
                tickets = [holder.ticket for holder in peer.holders]
                readers = dict.fromkeys((ticket.peer_request_id, ticket.nonce) for ticket in tickets)
                peer.order = HeartbeatOrder(peer.address, tuple(readers))
            orders.append(peer.order)
            delay_s = max(delay_s, now_s - due_s)
            self._push(now_s + self._period_s, peer)
        self.next_due_s = due[0][0] if due else math.inf
        if orders:
            self.last_delay_s = delay_s
        return orders

    def holders(self) -> dict[TicketKey, int]:
        """Return how many local requests hold each ticket."""
        return Counter(key_of(holder.ticket) for peer in self._peers.values() for holder in peer.holders)

    @property
    def peer_count(self) -> int:
        """Peer engines that are known at the moment."""
        return len(self._peers)

    def _push(self, due_s: float, peer: PeerLeases) -> None:
        self._sequence += 1
        heappush(self._due, (due_s, self._sequence, peer))
        self.next_due_s = self._due[0][0]
