"""The client's half of the protocol for one connection to one listener, without any input or output.

    session = ClientSession(offer, [(0, 0), (0, 1)], dialect=14)
    while not session.is_over:
        while session.queries_left:
            transport.send(session.next_query(now_s=clock()))
        session.receive_message(transport.read(), now_s=clock())
    if session.error is None:
        use(session.peers)

Queries may be sent ahead of their replies (pipelining). A listener answers in order, so replies are matched to queries by
position. The first error ends the session, because afterwards no later reply can be matched to its query.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, final

import msgspec

from kv_handshake.errors import ConfigurationError, HandshakeError, WireError, require, shortened, without_frames
from kv_handshake.wire.dialects import DEFAULT_DIALECT, dialect_of
from kv_handshake.wire.factors import hashed_factors
from kv_handshake.wire.limits import MAX_HANDSHAKE_BYTES, MAX_RANKS, MAX_REPLY_BYTES
from kv_handshake.wire.policy import LocalOffer, Verdict, judge
from kv_handshake.wire.queries import Rank, check_askable, encode_query
from kv_handshake.wire.replies import decode_clock, decode_envelope, decode_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake.wire.messages import AgentMetadata, Envelope

__all__ = ["ClientSession"]

_FIRST: Rank = (0, 0)
_MAX_FRAMES = 2
_MAX_NAMES = 64


class Reply(NamedTuple):
    """An accepted reply.

    Attributes:
        envelope: The envelope's bytes.
        rtt_s: Round trip of its query, seconds.
        received_s: Time of its end, on the clock that the caller passes in.
    """

    envelope: bytes
    rtt_s: float
    received_s: float


@final
class ClientSession:
    """Requests the metadata of several ranks from one listener and judges the replies.

    Args:
        offer: This engine's side of the comparison.
        ranks: (pp, tp) ranks to ask for, each once, in this order.
        dialect: The peer's connector version (2 to 15), from the ticket or the operator.
        engine_id: The engine that must answer; empty if any may.
        generation: The registration generation that the ticket was made with; None to accept any.
        keeps_replies: Whether `replies` keeps the bytes of accepted replies.
        check_first: If given, rank (0, 0) is asked for alone, even if it is not among `ranks`, and this is called with its
            metadata; the other ranks follow once it has returned, and an exception ends the session with ``first-rank-refused``.

    Attributes:
        peers: Metadata of the wanted ranks that have answered so far, by (pp, tp).
        replies: Accepted replies by (pp, tp), if the session keeps them.
        verdict: The comparison with the peer that answered last; empty before the first answer.
        error: The error that ended the session early.
        rtt_s: Shortest round trip so far, seconds; infinite before the first answer.
        clock_offset_s: Peer's clock minus ours at the shortest round trip, seconds; None in dialects without a clock frame.

    Raises:
        ConfigurationError: ``invalid-argument`` for no or repeated ranks or ranks that the dialect cannot ask for,
            ``unknown-dialect`` for a version that is not known.
    """

    def __init__(
        self,
        offer: LocalOffer,
        ranks: Sequence[Rank],
        *,
        dialect: int = DEFAULT_DIALECT,
        engine_id: str = "",
        generation: int | None = None,
        keeps_replies: bool = False,
        check_first: Callable[[AgentMetadata], None] | None = None,
    ) -> None:
        require(LocalOffer, offer=offer)
        require((tuple, list), ranks=ranks)
        require(str, engine_id=engine_id)
        require((int, type(None)), generation=generation)
        if len(ranks) > MAX_RANKS:  # a ticket may name 1024 x 1024
            raise ConfigurationError(
                "invalid-argument", f"{len(ranks)} ranks; one handshake asks for at most {MAX_RANKS}"
            )
        self._dialect = dialect_of(dialect)
        for rank in ranks:
            check_askable(rank, self._dialect)
        if not ranks or len(set(ranks)) != len(ranks):
            raise ConfigurationError("invalid-argument", f"ranks {list(ranks)} are empty or repeat one")
        self._wanted = frozenset(ranks)
        # vLLM's own listener crashes on a query for a rank that it does not have, and every engine has rank (0, 0).
        self._check_first = check_first
        first = () if check_first is None else (_FIRST,)
        self._unasked = deque(dict.fromkeys((*first, *ranks)))
        self._outstanding: deque[tuple[Rank, float]] = deque()
        self._offer = offer
        self._engine_id = engine_id
        self._generation = generation
        self._first: tuple[str, int | None] | None = None  # engine and generation of the first rank
        self._keeps_replies = keeps_replies
        self._received_bytes = 0
        self.peers: dict[Rank, AgentMetadata] = {}
        self.replies: dict[Rank, Reply] = {}
        self.verdict = Verdict()
        self.error: HandshakeError | None = None
        self.rtt_s = float("inf")
        self.clock_offset_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether the session has ended: every rank is known, or there is an error."""
        return self.error is not None or not (self._unasked or self._outstanding)

    @property
    def queries_left(self) -> int:
        """Ranks that may be asked for now; 0 once the session is over."""
        if self.is_over:
            return 0
        if self._check_first is not None:
            return int(not self._outstanding)
        return len(self._unasked)

    @property
    def queries_outstanding(self) -> int:
        """Queries without a reply."""
        return len(self._outstanding)

    @property
    def missing_ranks(self) -> tuple[Rank, ...]:
        """Ranks without an answer, in the order in which they were, or would have been, asked."""
        return (*(rank for rank, _ in self._outstanding), *self._unasked)

    def next_query(self, *, now_s: float) -> bytes:
        """Return the next rank's query, to be sent now.

        Raises:
            ConfigurationError: ``illegal-event`` if no query is left.
        """
        if not self.queries_left:
            raise ConfigurationError("illegal-event", "no query is left, or the reply of rank (0, 0) must come first")
        rank = self._unasked.popleft()
        self._outstanding.append((rank, now_s))
        return encode_query(rank, self._dialect)

    def receive_message(self, frames: Sequence[bytes], *, now_s: float) -> None:
        """Take in one whole reply; a reply to no query fails the session."""
        if self.is_over:
            return
        try:
            self._take_reply(frames, now_s)
        except HandshakeError as error:
            self.fail(error)

    def fail(self, error: HandshakeError) -> None:
        """End the session early, with the reason; the first reason stays."""
        if not self.is_over:
            self.error = without_frames(error)

    def _take_reply(self, frames: Sequence[bytes], now_s: float) -> None:
        if not self._outstanding and self.rtt_s == float("inf"):
            raise ConfigurationError("illegal-event", "a reply came before the first query")
        if not self._outstanding:
            raise WireError("unexpected-reply", "a reply came that answers no query")
        size_bytes = sum(map(len, frames))
        if size_bytes > MAX_REPLY_BYTES:
            raise WireError("oversized-reply", f"a reply exceeds {MAX_REPLY_BYTES} bytes")
        if not 1 <= len(frames) <= _MAX_FRAMES:
            raise WireError("unexpected-reply", f"a reply has {len(frames)} frames, not 1 to {_MAX_FRAMES}")
        self._received_bytes += size_bytes
        if self._received_bytes > MAX_HANDSHAKE_BYTES:
            raise WireError("oversized-reply", f"the replies of one handshake exceed {MAX_HANDSHAKE_BYTES} bytes")
        rank, sent_s = self._outstanding[0]
        metadata = self._accepted(rank, frames)
        self._measure_clock(frames, now_s - sent_s, (now_s + sent_s) / 2)
        self._check_first_rank(metadata)
        self._outstanding.popleft()
        self._first = self._first or (metadata.engine_id, metadata.generation)
        if rank in self._wanted:
            self.peers[rank] = metadata
        if self._keeps_replies:
            self.replies[rank] = Reply(frames[0], now_s - sent_s, now_s)

    def _accepted(self, rank: Rank, frames: Sequence[bytes]) -> AgentMetadata:
        envelope = decode_envelope(frames[0])
        self.verdict = judge(self._offer, envelope, self._dialect.version)
        if not self.verdict.is_accepted:
            raise _refusal(rank, envelope, self.verdict)
        wanted = 2 if self._dialect.has_clock_frame else 1
        if len(frames) != wanted:
            raise WireError(
                "unexpected-reply",
                f"a reply of version {self._dialect.version} has {wanted} frames, this one {len(frames)}; "
                "is the dialect the peer's own?",
                frames=len(frames),
                dialect=self._dialect.version,
            )
        if envelope.rank is not None and envelope.rank != rank:
            raise WireError("rank-mismatch", f"asked for rank {rank}, the reply is about {envelope.rank}")
        if None not in (self._generation, envelope.generation) and self._generation != envelope.generation:
            raise WireError(
                "generation-mismatch",
                f"generation {self._generation} was expected, the engine is at {envelope.generation}; ask again",
            )
        metadata = decode_metadata(envelope)
        if not envelope.factors and self.verdict.differences:
            known = hashed_factors(self._offer.factors, self._dialect)
            found = {each.name: each.peer for each in self.verdict.differences}
            metadata = msgspec.structs.replace(metadata, factors={**known, **found})
        # All ranks are of one life of one engine, also where the ticket names neither.
        engine_id, generation = self._first or (self._engine_id, metadata.generation)
        if engine_id and metadata.engine_id != engine_id:
            raise WireError(
                "engine-mismatch",
                f"expected engine {engine_id!r}, {metadata.engine_id!r} answers",
                expected=engine_id,
                found=metadata.engine_id,
            )
        if metadata.generation != generation:
            raise WireError(
                "generation-mismatch",
                f"ranks of generations {generation} and {metadata.generation} in one handshake; ask again",
            )
        return metadata

    def _check_first_rank(self, metadata: AgentMetadata) -> None:
        check, self._check_first = self._check_first, None
        if check is None:
            return
        try:
            check(metadata)
        except Exception as error:
            text = f"the metadata of rank {_FIRST} was refused: {shortened(str(error))}"
            raise WireError("first-rank-refused", text) from error

    def _measure_clock(self, frames: Sequence[bytes], rtt_s: float, middle_s: float) -> None:
        """Keep the offset of the shortest round trip: longer ones are waiting time, which only blurs the estimate."""
        peer_clock_s = decode_clock(frames[1]) if self._dialect.has_clock_frame else None
        if rtt_s < self.rtt_s:
            self.rtt_s = rtt_s
            if peer_clock_s is not None:
                self.clock_offset_s = peer_clock_s - middle_s


def _refusal(rank: Rank, envelope: Envelope, verdict: Verdict) -> WireError:
    context: dict[str, object] = {
        "rank": rank,
        "names": tuple(shortened(each.name) for each in verdict.differences[:_MAX_NAMES]),
    }
    if envelope.refusal is not None:
        context |= {"peer_code": shortened(envelope.refusal.code), "retry_after_s": envelope.refusal.retry_after_s}
    return WireError(verdict.code, verdict.message, **context)
