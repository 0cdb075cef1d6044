"""Requests that hold the same ticket: the children of a request with n > 1.

One hand-over serves one read. Its first holder to be allocated reads; the others wait (`external_tokens` answers None) and
find the prompt in the local prefix cache afterwards. A read that has ended, well or badly, has used the ticket up. A reader
that is aborted passes the hand-over on: its read is cancelled without telling the peer, and the next holder reads.
The peer is notified that a hand-over is not needed only when its last holder gives it up.

Example: d1, d2 and d3 hold one ticket. d1 reads, d2 and d3 wait. d1 is aborted: once its cancelled read is quiet, d2 reads. When
that read has ended, d3 finds the prompt in the prefix cache, and reads nothing.

Children arrive one by one, and a read takes a millisecond: d2 may come after the good end of d1's read. So the latest tickets
that were read to the end are remembered, and a request that brings one of them reads nothing. Without that it would read blocks
that the peer has freed: the fence refuses them, and `kv_load_failure_policy` would end the request; where there is no fence, as
at peers of vLLM's own kind, it would take another prompt's KV for its own. So a ticket without a fence is remembered after every
end of which the peer may have been told: a failed or aborted read, also one that never reached the peer, or a request that
needed none. With a fence it may be tried again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from kv_scheduler_state._ticket import HandoffTicket

__all__ = ["HandOver", "HandOvers", "TicketKey", "key_of"]

_REMEMBERED: Final = 1024
"""Tickets that are used up and remembered."""

TicketKey = tuple[str, str, str, tuple[int, int] | None]
"""Peer engine, request id there, nonce and fence of a ticket: requests with the same key hold the same ticket."""


@final
class HandOver:
    """A ticket that several local requests have held.

    Attributes:
        ticket: The ticket.
        waiting: Holders that have neither read nor given it up.
        reading: Holders whose read has been ordered and has not ended.
        is_spent: Whether the ticket is used up and can no longer be read.
    """

    __slots__ = ("is_spent", "reading", "ticket", "waiting")

    def __init__(self, ticket: HandoffTicket) -> None:
        self.ticket = ticket
        self.waiting = 0
        self.reading = 0
        self.is_spent = False

    @property
    def is_wanted_by_others(self) -> bool:
        """Whether a waiting holder that gives up now leaves the hand-over, or its end, to another request."""
        return self.is_spent or self.reading > 0 or self.waiting > 1

    def read(self) -> None:
        """Note that a waiting holder's read is ordered."""
        self.waiting -= 1
        self.reading += 1

    @property
    def is_abandoned(self) -> bool:
        """Whether a read was passed on and no holder is left to take it up."""
        return not (self.is_spent or self.reading or self.waiting)


class Holder(Protocol):
    """The part of a consumer record that this module reads, and the hand-over that it sets."""

    state: str
    ticket: HandoffTicket
    hand_over: HandOver | None


@final
class HandOvers:
    """The hand-overs that local requests hold.

    Nearly every ticket has one holder. The state of its record says all that a `HandOver` would, so none is made until a
    second request brings the ticket. Nearly every ticket is also the only one with its peer's request id, so its key is made only
    where another engine, or an earlier life of that request, has used the same id.
    """

    __slots__ = ("_by_id", "_by_key", "_read")

    def __init__(self) -> None:
        # The latest tickets that are used up, by the peer's request id, oldest first.
        self._read: OrderedDict[str, TicketKey] = OrderedDict()
        self._by_id: dict[str, Holder | HandOver] = {}
        # Tickets whose peer request id was already in `_by_id`, for another ticket.
        self._by_key: dict[TicketKey, Holder | HandOver] = {}

    def join(self, record: Holder) -> None:
        """Note one more waiting holder of the record's ticket."""
        ticket = record.ticket
        if self.was_read(ticket):
            hand_over = record.hand_over = HandOver(ticket)
            hand_over.waiting, hand_over.is_spent = 1, True
            return
        known = self._by_key.get(key_of(ticket)) if self._by_key else None
        if known is None:
            known = self._by_id.setdefault(ticket.peer_request_id, record)
            if known is record:
                return
            if key_of(known.ticket) != key_of(ticket):
                self._by_key[key_of(ticket)] = record
                return
        if not isinstance(known, HandOver):
            known = self._share(known)
        known.waiting += 1
        record.hand_over = known

    def _share(self, first: Holder) -> HandOver:
        """Put a hand-over in the place of its only holder so far, and return it."""
        ticket = first.ticket
        hand_over = first.hand_over = HandOver(ticket)
        if self._by_id.get(ticket.peer_request_id) is first:
            self._by_id[ticket.peer_request_id] = hand_over
        else:
            self._by_key[key_of(ticket)] = hand_over
        if first.state == "queued":
            hand_over.waiting = 1
        else:
            hand_over.reading = 1
            hand_over.is_spent = first.state == "draining"
        return hand_over

    def leave(self, record: Holder) -> None:
        """Note that a waiting holder gave up."""
        hand_over = record.hand_over
        if hand_over is None:
            self._remove(record)
            return
        hand_over.waiting -= 1
        self._forget(hand_over)

    def read_ended(self, record: Holder, *, is_passed: bool, is_good: bool = False) -> None:
        """Note the end of a read, which uses the ticket up unless passed on.

        A good end uses it up for later requests, too, and without a fence any end of which the peer was told.
        """
        hand_over = record.hand_over
        if is_good:
            self.note_read(record.ticket)
        elif not is_passed:
            self.note_told(record.ticket)
        if hand_over is None:
            self._remove(record)
            return
        hand_over.reading -= 1
        if not is_passed:
            hand_over.is_spent = True
        self._forget(hand_over)

    def note_read(self, ticket: HandoffTicket) -> None:
        """Note that a ticket was read to the end, or must not be read any more."""
        self._read[ticket.peer_request_id] = key_of(ticket)
        if len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)

    def note_told(self, ticket: HandoffTicket) -> None:
        """Note that the peer was told to free a ticket's blocks: without a fence, new content in them would go unnoticed."""
        if ticket.fence is None:
            self.note_read(ticket)

    def was_read(self, ticket: HandoffTicket) -> bool:
        """Whether a ticket was noted as used up, as far as that is remembered."""
        return ticket.peer_request_id in self._read and self._read[ticket.peer_request_id] == key_of(ticket)

    def _forget(self, hand_over: HandOver) -> None:
        if not hand_over.waiting and not hand_over.reading:
            self._remove(hand_over)

    def _remove(self, known: Holder | HandOver) -> None:
        ticket = known.ticket
        if self._by_id.get(ticket.peer_request_id) is known:
            del self._by_id[ticket.peer_request_id]
        elif self._by_key.get(key_of(ticket)) is known:
            del self._by_key[key_of(ticket)]

    def __len__(self) -> int:
        return len(self._by_id) + len(self._by_key)


def key_of(ticket: HandoffTicket) -> TicketKey:
    """Return the key that requests with the same ticket have in common."""
    return ticket.peer.engine_id, ticket.peer_request_id, ticket.nonce, ticket.fence
