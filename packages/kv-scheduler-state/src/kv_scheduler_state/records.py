"""Records of the scheduler process: a request, with one record for each role that it has in a hand-over; their descriptions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from kv_scheduler_state.errors import UnknownRequest
from kv_scheduler_state.tables import GONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_scheduler_state.plan import ReadOrder
    from kv_scheduler_state.ticket.early import EarlyTicket
    from kv_scheduler_state.ticket.ticket import HandoffTicket, PeerAddress

__all__ = [
    "UNRESERVED",
    "ConsumedStream",
    "ConsumerRecord",
    "HandOver",
    "ProducerRecord",
    "Request",
    "TicketKey",
    "count_states",
    "describe",
    "find_request",
    "forget_if_ended",
    "state_of",
]

TicketKey = tuple[str, str, str, tuple[int, int] | None]
"""Peer engine, request id there, nonce and fence of a ticket: requests with the same key hold the same ticket."""

UNRESERVED: Final = frozenset({"asking", "asking-final", "offered"})
"""States of a request with an early ticket in which the engine has allocated nothing for it."""


@final
@dataclass(slots=True, eq=False)
class HandOver:
    """A ticket, shared by all local requests that hold it, see `HandOvers`.

    Attributes:
        key: Key of the ticket.
        waiting: Holders that have neither read nor given it up.
        reading: Holders whose read has been ordered and has not ended.
        is_spent: Whether the ticket is used up and can no longer be read.
    """

    key: TicketKey
    waiting: int = 0
    reading: int = 0
    is_spent: bool = False

    @property
    def is_wanted_by_others(self) -> bool:
        """Whether a waiting holder that gives up now leaves the hand-over, or its end, to another request."""
        return self.is_spent or self.reading > 0 or self.waiting > 1


@final
@dataclass(slots=True, eq=False)
class ConsumerRecord:
    """A request whose prompt a peer has computed.

    Attributes:
        hand_over: The ticket as all its holders share it; None while a stream has no final ticket, which has one reader.
        computed_tokens: Local prefix hit of the latest look-up, which is the one that an allocation follows.
        renewed_at: Peer engine at which the lease is renewed, or None.
    """

    request_id: str
    state: str
    ticket: HandoffTicket
    loadable_tokens: int
    hand_over: HandOver | None = None
    computed_tokens: int | None = None
    renewed_at: PeerAddress | None = None


@final
@dataclass(slots=True, eq=False)
class ConsumedStream:
    """A request whose prompt is to be read while the peer computes it.

    Attributes:
        digest: Digest of the tokens that the peer offers.
        offered_tokens: Tokens under the digest; all of them are read, or none.
        since_s: Time from which the deadline of its state counts. It does not move when a question is asked again, but it does
            when the peer says that the prompt is on its way.
        media: Its images, videos and sounds that this engine has, and the digest without them, see `missing_media`.
        number: Number of the outstanding question; 0 if there is none.
        last_word: Reason or code of the latest answer without a ticket; empty before the first one.
        breaks: How often a stream of it broke.
        entered_s: Start of its state.
        is_too_large: Whether it needs more blocks than all streams together may hold, so that it would wait for room in vain.
        hold_s: Time until which the offer is withheld from the engine; None if it is not withheld.
        retry_s: Time at which the peer is asked again, or None.
        read: The read as first ordered; every later read fills the same blocks.
        start: First token to read.
        done: Workers whose fence held, which is final.
        torn: Workers that broke off the current stream.
    """

    record: ConsumerRecord
    early: EarlyTicket
    digest: str
    media: tuple[int, str]
    prompt_tokens: int
    offered_tokens: int
    since_s: float
    entered_s: float
    number: int = 0
    last_word: str = ""
    breaks: int = 0
    is_too_large: bool = False
    hold_s: float | None = None
    retry_s: float | None = None
    read: ReadOrder | None = None
    start: int = 0
    done: set[object] = field(default_factory=set[object])
    torn: set[object] = field(default_factory=set[object])


@final
@dataclass(slots=True, eq=False)
class ProducerRecord:
    """A request whose blocks a peer is to read.

    Attributes:
        is_void: Whether what was computed so far must not be handed over, because the cache was reset.
        leased_blocks: Leased blocks per group, while the lease is outstanding.
        preemptions: The engine's own count of preemptions.
        is_preemption_due: Whether the engine has yet to report the latest one.
    """

    request_id: str
    state: str
    prompt_tokens: int
    is_readback: bool = False
    is_void: bool = False
    fence: tuple[int, int] | None = None
    leased_blocks: Sequence[int] = ()
    preemptions: int = 0
    is_preemption_due: bool = False


@final
@dataclass(slots=True, eq=False)
class Request:
    """A live request with its producer and consumer records; without either, it is the engine's own business.

    Attributes:
        rejected_code: Code of the reason why its ticket was refused; empty otherwise.
    """

    prompt_tokens: int
    born_s: float
    consumer: ConsumerRecord | None = None
    producer: ProducerRecord | None = None
    is_finished: bool = False
    rejected_code: str = ""


def find_request(requests: dict[str, Request], request_id: str, event: str) -> Request:
    """Return a live request.

    Raises:
        UnknownRequest: `unknown-request`.
    """
    try:
        return requests[request_id]
    except (KeyError, TypeError):
        raise UnknownRequest(request_id, event) from None


def forget_if_ended(requests: dict[str, Request], request_id: str, request: Request) -> None:
    """Drop the records that are gone, and with the last one a request that has finished."""
    if request.consumer is not None and request.consumer.state == GONE:
        request.consumer = None
    if request.producer is not None and request.producer.state == GONE:
        request.producer = None
    if request.consumer is None and request.producer is None and request.is_finished:
        del requests[request_id]


_WAITS_FOR: Final = {
    ("producer", "waiting"): "the engine, to allocate its prompt",
    ("producer", "prefilling"): "the engine, to compute its prompt",
    ("producer", "prefilled"): "the engine, to finish it",
    ("producer", "preempted"): "the engine, to start it again",
    ("producer", "leased"): "the workers, to report that its readers are done or its lease has expired",
    ("producer", "revoked"): "the workers, to report that its lease has ended early",
    ("producer", "early"): "the engine, to allocate its prompt",
    ("producer", "opening"): "the engine, to compute its prompt",
    ("producer", "offered"): "the engine, to compute its prompt",
    ("producer", "plain"): "the engine, to compute its prompt",
    ("producer", "complete"): "the engine, to finish it",
    ("producer", "stale"): "the engine, to start it again or to finish it",
    ("producer", "voided"): "the engine, to start it again",
    ("producer", "plain-again"): "the engine, to start it again",
    ("producer", "voiding"): "the workers, to report that its word has moved",
    ("producer", "streamed"): "the workers, to report that its readers are done or its lease has expired",
    ("producer", "taken-back"): "the workers, to report that its lease has ended early",
    ("consumer", "asking"): "the peer, to offer a stream or to finish the prompt",
    ("consumer", "asking-final"): "the peer, to finish the prompt, which cannot be read before",
    ("consumer", "offered"): "the engine, to find room for its blocks",
    ("consumer", "streaming"): "the workers, to report the end of its stream",
    ("consumer", "awaiting"): "the peer, to offer a new stream or to finish the prompt",
    ("consumer", "stopping"): "the workers, to report that its stream is given up",
    ("consumer", "draining-stream"): "the workers, to report that its stream is quiet",
    ("consumer", "queued"): "the engine, to allocate blocks for the read",
    ("consumer", "reading"): "the workers, to report the end of its read",
    ("consumer", "draining"): "the workers, to report that its cancelled read is quiet",
    ("consumer", "local"): "the engine, to finish it",
    ("consumer", "failed"): "the engine, to fail it",
}


def count_states(requests: Iterable[Request]) -> dict[str, int]:
    """Return how many records are in each state, such as `producer-leased`; an ordinary request has none."""
    return dict(Counter([f"{role}-{state}" for request in requests for role, state in _states(request)]))


def state_of(request: Request) -> str:
    """Return the states of a request's records as one word."""
    return "+".join([state for _, state in _states(request)]) or "running"


def _states(request: Request) -> list[tuple[str, str]]:
    records = ("consumer", request.consumer), ("producer", request.producer)
    return [(role, record.state) for role, record in records if record is not None and record.state != GONE]


def describe(request_id: str, request: Request, now_s: float) -> dict[str, object]:
    """Return a live request as plain values."""
    consumer, producer, states = request.consumer, request.producer, _states(request)
    entry: dict[str, object] = {
        "request_id": request_id,
        "role": "producer" if producer is not None else "consumer" if consumer is not None else "none",
        "age_s": now_s - request.born_s,
        "prompt_tokens": request.prompt_tokens,
        "rejected_code": request.rejected_code,
        "is_finished": request.is_finished,
        "state": state_of(request),
        "waits_for": _WAITS_FOR[states[0]] if states else "the engine, to finish it",
    }
    if consumer is not None:
        entry["consumer"] = {
            "peer_engine_id": consumer.ticket.peer.engine_id,
            "peer_request_id": consumer.ticket.peer_request_id,
            "loadable_tokens": consumer.loadable_tokens,
            "is_renewed": consumer.renewed_at is not None,
        }
    return entry
