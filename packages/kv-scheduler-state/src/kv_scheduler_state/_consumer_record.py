"""Records of requests whose prompts are read from a peer: one for each request, and a second one if it is streamed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from kv_scheduler_state._early_ticket import EarlyTicket
    from kv_scheduler_state._handovers import HandOver
    from kv_scheduler_state._heartbeats import PeerLeases
    from kv_scheduler_state._machine import Trace, Transition
    from kv_scheduler_state._plan import ReadOrder
    from kv_scheduler_state._ticket import HandoffTicket

__all__ = ["UNRESERVED", "ConsumedStream", "ConsumerRecord"]

UNRESERVED: Final = frozenset({"asking", "asking-final", "offered"})
"""States of a request with an early ticket in which the engine has allocated nothing for it."""


@final
class ConsumerRecord:
    """A request whose prompt a peer has computed."""

    __slots__ = (
        "computed_tokens",
        "hand_over",
        "loadable_tokens",
        "peer",
        "state",
        "stream",
        "ticket",
        "trace",
    )

    # Set only for a request with an early ticket, and read only in the states of streams.
    stream: ConsumedStream

    def __init__(self, arrival: Transition, ticket: HandoffTicket, loadable_tokens: int, now_s: float) -> None:
        self.state = arrival.target
        self.trace: Trace = (now_s, arrival, None)
        self.ticket = ticket
        # Set only if another request has brought the same ticket, see `HandOvers`.
        self.hand_over: HandOver | None = None
        self.loadable_tokens = loadable_tokens
        # Local prefix hit of the latest look-up, which is the one that an allocation follows.
        self.computed_tokens: int | None = None
        self.peer: PeerLeases | None = None

    def advance(self, row: Transition, now_s: float) -> None:
        """Do the same as `_machine.advance`; in a method of the class, CPython knows where the record's slots are."""
        if row.target != self.state:
            self.state = row.target
            self.trace = now_s, row, self.trace


@final
class ConsumedStream:
    """A request whose prompt is to be read while the peer computes it."""

    __slots__ = (
        "breaks",
        "digest",
        "done",
        "early",
        "entered_s",
        "hold_s",
        "is_too_large",
        "last_word",
        "media",
        "number",
        "offered_tokens",
        "prompt_tokens",
        "read",
        "record",
        "request_id",
        "retry_s",
        "since_s",
        "start",
        "torn",
    )

    def __init__(
        self,
        request_id: str,
        record: ConsumerRecord,
        early: EarlyTicket,
        digest: str,
        prompt_tokens: int,
        offered_tokens: int,
        now_s: float,
    ) -> None:
        self.request_id = request_id
        self.record = record
        self.early = early
        self.digest = digest
        # Its images, videos and sounds that this engine has, and the digest without them, see `missing_media`.
        self.media: tuple[int, str] = (0, digest)
        self.prompt_tokens = prompt_tokens
        # Tokens under the digest, which the peer offers; all of them are read, or none.
        self.offered_tokens = offered_tokens
        # Number of the outstanding question; 0 if there is none.
        self.number = 0
        # Reason or code of the latest answer that was no ticket; empty before the first one.
        self.last_word = ""
        self.breaks = 0
        # Start of this state, and the time from which its deadline counts. The latter does not move when a question is asked
        # again, but it does when the peer says that the prompt is on its way.
        self.entered_s = self.since_s = now_s
        # Whether it needs more blocks than all streams together may hold, so that it would wait for room in vain.
        self.is_too_large = False
        # Time until which the offer is withheld from the engine; None if it is not withheld.
        self.hold_s: float | None = None
        self.retry_s: float | None = None
        # The read as first ordered; every later read fills the same blocks.
        self.read: ReadOrder | None = None
        self.start = 0
        # Workers whose fence held, which is final; and workers that broke off the current stream.
        self.done: set[object] = set()
        self.torn: set[object] = set()
