"""Requests that hold the same ticket: the children of a request with n > 1.

One hand-over serves one read. Its first holder to be allocated reads; the others wait (`external_tokens` answers None) and
find the prompt in the local prefix cache afterwards. A read that has ended, well or badly, has used the ticket up. A reader
that is aborted passes the hand-over on: its read is cancelled without telling the peer, and the next holder reads.
The peer is told that a hand-over is not needed only when its last holder gives it up.

Example: d1, d2 and d3 hold one ticket. d1 reads, d2 and d3 wait. d1 is aborted: once its cancelled read is quiet, d2 reads. When
that read has ended, d3 finds the prompt in the prefix cache, and reads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from kv_scheduler_state._ticket import HandoffTicket

__all__ = ["HandOver", "HandOvers"]


@final
class HandOver:
    """A ticket and the local requests that hold it.

    Attributes:
        waiting: Holders that have neither read nor given it up.
        reading: Holders whose read has been ordered and has not ended.
        is_spent: Whether nobody can read it any more.
    """

    __slots__ = ("is_spent", "key", "reading", "waiting")

    def __init__(self, key: tuple[object, ...]) -> None:
        self.key = key
        self.waiting = 0
        self.reading = 0
        self.is_spent = False

    @property
    def is_wanted_by_others(self) -> bool:
        """Whether a waiting holder that gives up now leaves the hand-over, or its end, to another request."""
        return self.is_spent or self.reading > 0 or self.waiting > 1

    @property
    def is_abandoned(self) -> bool:
        """Whether a read was passed on and no holder is left to take it up."""
        return not (self.is_spent or self.reading or self.waiting)


@final
class HandOvers:
    """The hand-overs that local requests hold."""

    __slots__ = ("_by_key",)

    def __init__(self) -> None:
        self._by_key: dict[tuple[object, ...], HandOver] = {}

    def join(self, ticket: HandoffTicket) -> HandOver:
        """Return the ticket's hand-over, with one more waiting holder."""
        key = (ticket.peer.engine_id, ticket.peer_request_id, ticket.nonce, ticket.fence)
        hand_over = self._by_key.get(key)
        if hand_over is None:
            hand_over = self._by_key[key] = HandOver(key)
        hand_over.waiting += 1
        return hand_over

    def leave(self, hand_over: HandOver) -> None:
        """Note that a waiting holder gave up."""
        hand_over.waiting -= 1
        self._forget(hand_over)

    def read(self, hand_over: HandOver) -> None:
        """Note that a waiting holder's read is ordered."""
        hand_over.waiting -= 1
        hand_over.reading += 1

    def read_ended(self, hand_over: HandOver, *, is_passed: bool) -> None:
        """Note the end of a read; unless it is passed on, the ticket is used up."""
        hand_over.reading -= 1
        if not is_passed:
            hand_over.is_spent = True
        self._forget(hand_over)

    def _forget(self, hand_over: HandOver) -> None:
        if not hand_over.waiting and not hand_over.reading:
            self._by_key.pop(hand_over.key, None)

    def __len__(self) -> int:
        return len(self._by_key)
