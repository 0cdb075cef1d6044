"""The client's half of the protocol, without any input or output; see `kv_handshake._states` for the theory.

session = ClientSession(ranks=[(0, 0), (0, 1)], version=14, offer=offer)
while session.queries_left:
    transport.send(session.next_query(now_s=clock()))
while not session.is_over:
    session.receive(transport.read(), ends_frame=..., ends_message=..., now_s=clock())
if session.error is None:
    use(session.peers)
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, final

from kv_handshake._dialect import dialect_of
from kv_handshake._errors import ConfigurationError, HandshakeError, WireError, without_frames
from kv_handshake._judging import Judge
from kv_handshake._limits import MAX_HANDSHAKE_BYTES, MAX_REPLY_BYTES
from kv_handshake._queries import Rank, check_rank_count, encode_query
from kv_handshake._reading import decode_clock, decode_envelope, decode_metadata
from kv_handshake._repeated import Repeated
from kv_handshake._states import FINAL_STATES, INITIAL_STATE, Cause, IllegalEvent, RanksLeft, State, next_step
from kv_handshake._text import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake._messages import AgentMetadata, Envelope
    from kv_handshake._policy import LocalOffer, Verdict

__all__ = ["ClientSession", "Reply"]

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
    """Asks one listener for several ranks and judges the replies.

    Args:
        ranks: (pp, tp) ranks to ask for, each once, in this order.
        version: The peer's connector version (2 to 15), from the ticket or the operator.
        offer: This engine's side of the comparison.
        engine_id: The engine that must answer; empty if any may.
        generation: The registration generation that the ticket was made with; None to accept any.
        keeps_replies: Whether `replies` keeps the bytes of accepted replies.
        repeated: Values that sessions on one thread share.

    Raises:
        ConfigurationError: ``invalid-argument`` for no or repeated ranks or ranks that the dialect cannot ask for,
            ``unknown-dialect`` for a version that is not known.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[Rank],
        version: int,
        offer: LocalOffer,
        engine_id: str = "",
        generation: int | None = None,
        keeps_replies: bool = False,
        repeated: Repeated | None = None,
    ) -> None:
        check_rank_count(ranks)
        if not ranks or len(set(ranks)) != len(ranks):
            raise ConfigurationError("invalid-argument", f"ranks {list(ranks)} are empty or repeat one")
        self._dialect = dialect_of(version)
        self._queries = deque((rank, encode_query(rank, self._dialect)) for rank in ranks)
        self._outstanding: deque[tuple[Rank, float]] = deque()
        self._engine_id = engine_id
        self._generation = generation
        self._keeps_replies = keeps_replies
        self._state: State = INITIAL_STATE
        self._frames: list[bytes] = []
        self._partial = bytearray()
        self._peers: dict[Rank, AgentMetadata] = {}
        self._replies: dict[Rank, Reply] = {}
        self._taken_bytes = 0
        self._repeated = Repeated(repeated)
        self._judge = Judge(offer, version, self._repeated)
        self._error: HandshakeError | None = None
        self._best_rtt_s = float("inf")
        self._clock_offset_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"ClientSession({self._state}, asked={len(self._outstanding)}, left={len(self._queries)}, "
            f"done={len(self._peers)})"
        )

    @property
    def state(self) -> State:
        """The present state, a key of the transition table."""
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether the session has ended: every rank is known, or there is an error."""
        return self._state in FINAL_STATES

    @property
    def queries_left(self) -> int:
        """Ranks that have not been asked for yet; 0 once the session is over."""
        return 0 if self.is_over else len(self._queries)

    @property
    def queries_outstanding(self) -> int:
        """Queries without a reply."""
        return len(self._outstanding)

    @property
    def peers(self) -> Mapping[Rank, AgentMetadata]:
        """Metadata of the ranks that have answered so far, by (pp, tp)."""
        return MappingProxyType(self._peers)

    @property
    def replies(self) -> Mapping[Rank, Reply]:
        """Accepted replies by (pp, tp), if the session keeps them."""
        return MappingProxyType(self._replies)

    @property
    def missing_ranks(self) -> tuple[Rank, ...]:
        """Ranks without an answer, in the order in which they were, or would have been, asked."""
        return (*(rank for rank, _ in self._outstanding), *(rank for rank, _ in self._queries))

    @property
    def verdict(self) -> Verdict:
        """The comparison with the peer that answered last; empty before the first answer."""
        return self._judge.verdict

    @property
    def error(self) -> HandshakeError | None:
        """The error that ended the session early."""
        return self._error

    @property
    def rtt_s(self) -> float:
        """Shortest round trip so far, seconds; infinite before the first answer."""
        return self._best_rtt_s

    @property
    def clock_offset_s(self) -> float | None:
        """Peer's clock minus ours at the shortest round trip, seconds; None in dialects without a clock frame."""
        return self._clock_offset_s

    def next_query(self, *, now_s: float) -> bytes:
        """Return the next rank's query, to be sent now.

        Raises:
            ConfigurationError: ``illegal-event`` if no query is left.
        """
        if not self.queries_left:
            raise ConfigurationError("illegal-event", f"no query is left: the session is {self._state}")
        rank, query = self._queries.popleft()
        self._outstanding.append((rank, now_s))
        self._step("query")
        return query

    def receive(self, data: bytes, *, ends_frame: bool, ends_message: bool, now_s: float) -> None:
        """Take in the next piece of a reply, of any size.

        Bytes before the first query fail the session with ``illegal-event`` (the caller's mistake), bytes that answer
        no query with ``unexpected-reply`` (the peer's).

        Args:
            data: Bytes of the current frame.
            ends_frame: Whether the frame ends after these bytes.
            ends_message: Whether the reply ends with this frame; ignored unless the frame ends.
            now_s: This engine's monotonic clock.
        """
        if self.is_over or not self._step("bytes"):
            return
        if len(self._partial) + sum(map(len, self._frames)) + len(data) > MAX_REPLY_BYTES:
            self.fail(WireError("oversized-reply", f"a reply exceeds {MAX_REPLY_BYTES} bytes"))
            return
        if not ends_frame:
            self._partial += data
            return
        self._frames.append(bytes(self._partial) + data if self._partial else data)
        self._partial.clear()
        if len(self._frames) > _MAX_FRAMES:
            self.fail(WireError("unexpected-reply", f"a reply has more than {_MAX_FRAMES} frames"))
        elif ends_message:
            whole, self._frames = self._frames, []
            self._take_reply(whole, now_s)

    def receive_message(self, frames: Sequence[bytes], *, now_s: float) -> None:
        """Take in one whole reply."""
        if 1 <= len(frames) <= _MAX_FRAMES and not self._frames and not self._partial:
            if self.is_over or not self._step("bytes"):
                return
            if sum(map(len, frames)) <= MAX_REPLY_BYTES:
                self._take_reply(frames, now_s)
                return
        if not frames:
            self.fail(WireError("unexpected-reply", "a reply has no frame"))
        for index, frame in enumerate(frames):
            self.receive(frame, ends_frame=True, ends_message=index + 1 == len(frames), now_s=now_s)

    def fail(self, error: HandshakeError) -> None:
        """End the session early, with the reason; the first reason stays."""
        if not self.is_over:
            self._error = without_frames(error)
            self._step("fault")
            self._frames.clear()
            self._partial.clear()

    def _step(self, cause: Cause) -> bool:
        """Move to the state that the table gives; fail the session and return False if it gives none."""
        left: RanksLeft = "outstanding" if self._outstanding else "unasked" if self._queries else "none"
        step = next_step(self._state, cause, left)
        if not isinstance(step, IllegalEvent):
            self._state = step
            return True
        self.fail(
            WireError("unexpected-reply", "a reply came that answers no query")
            if step.fault == "peer"
            else ConfigurationError("illegal-event", f"a session that is {step.state} cannot take {step.cause}")
        )
        return False

    def _take_reply(self, frames: Sequence[bytes], now_s: float) -> None:
        rank, sent_s = self._outstanding[0]
        self._taken_bytes += sum(map(len, frames))
        if self._taken_bytes > MAX_HANDSHAKE_BYTES:
            self.fail(WireError("oversized-reply", f"the replies of one handshake exceed {MAX_HANDSHAKE_BYTES} bytes"))
            return
        try:
            metadata = self._accepted(rank, frames)
            self._measure_clock(frames, now_s - sent_s, (now_s + sent_s) / 2)
        except HandshakeError as error:
            self.fail(error)
            return
        self._outstanding.popleft()
        self._peers[rank] = metadata
        if self._keeps_replies:
            self._replies[rank] = Reply(frames[0], now_s - sent_s, now_s)
        self._step("reply")

    def _accepted(self, rank: Rank, frames: Sequence[bytes]) -> AgentMetadata:
        envelope = decode_envelope(frames[0], self._repeated)
        verdict = self._judge.judge(envelope)
        if not verdict.is_accepted:
            raise _refusal(rank, envelope, verdict)
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
                f"the ticket is of generation {self._generation}, the engine is at {envelope.generation}",
            )
        metadata = decode_metadata(envelope, self._repeated)
        self._check_agreement(metadata)
        if self._engine_id and metadata.engine_id != self._engine_id:
            raise WireError(
                "engine-mismatch",
                f"expected engine {self._engine_id!r}, {metadata.engine_id!r} answers",
                expected=self._engine_id,
                found=metadata.engine_id,
            )
        return metadata

    def _check_agreement(self, metadata: AgentMetadata) -> None:
        """Raise unless the rank is of the same life of the same engine as those before it."""
        first = next(iter(self._peers.values()), metadata)
        if metadata.engine_id != first.engine_id:
            raise WireError("engine-mismatch", f"ranks of {first.engine_id!r} and {metadata.engine_id!r} in one engine")
        if metadata.generation != first.generation:
            raise WireError(
                "generation-mismatch",
                f"ranks of generations {first.generation} and {metadata.generation} in one handshake; ask again",
            )

    def _measure_clock(self, frames: Sequence[bytes], rtt_s: float, middle_s: float) -> None:
        """Keep the offset of the shortest round trip: longer ones are waiting time, which only blurs the estimate."""
        peer_clock_s = decode_clock(frames[1]) if self._dialect.has_clock_frame else None
        if rtt_s < self._best_rtt_s:
            self._best_rtt_s = rtt_s
            if peer_clock_s is not None:
                self._clock_offset_s = peer_clock_s - middle_s


def _refusal(rank: Rank, envelope: Envelope, verdict: Verdict) -> WireError:
    context: dict[str, object] = {
        "rank": rank,
        "names": tuple(shortened(each.name) for each in verdict.differences[:_MAX_NAMES]),
    }
    if envelope.refusal is not None:
        context |= {"peer_code": shortened(envelope.refusal.code), "retry_after_s": envelope.refusal.retry_after_s}
    return WireError(verdict.code, verdict.message, **context)
