"""A handshake under way: its waits, its attempts and their sessions, the decision to try again, and its outcome.

No input or output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake.core.pacing import Backoff
from kv_handshake.core.session import ClientSession
from kv_handshake.errors import CODES, ConfigurationError, HandshakeError, TransportError
from kv_handshake.wire.messages import AgentMetadata
from kv_handshake.wire.policy import Verdict
from kv_handshake.wire.queries import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake.core.endpoint import Endpoint
    from kv_handshake.wire.policy import LocalOffer

__all__ = ["HandshakeRequest", "Outcome", "Question", "Task", "Timing", "outcome_of"]


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Waits and retries of a client; times in seconds.

    Attributes:
        deadline_s: A handshake ends after this, whatever happens.
        attempt_s: A connection is given up when the next reply does not come within this time; a connection for asks, when its
            first reply does not.
        retry_first_s: Wait before the second attempt; doubles from there.
        retry_most_s: Longest wait between attempts.
        hold_first_s: After a failed handshake the peer is asked again, in the background, after this time; doubles from
            there. Until it has answered, requests for it fail at once.
        hold_most_s: Longest wait between two background attempts.
        forget_s: A failed peer that no request has named for this long is forgotten.
        pipeline: Queries that may be under way at once on one connection.
        connections: Peers with a connection at once; fewer where the process may open few files. Further handshakes wait for a
            place until their deadline; further asks do not wait but end with ``too-many-peers``.
    """

    deadline_s: float = 15.0
    attempt_s: float = 5.0
    retry_first_s: float = 0.1
    retry_most_s: float = 2.0
    hold_first_s: float = 0.5
    hold_most_s: float = 5.0
    forget_s: float = 120.0
    pipeline: int = 16
    connections: int = 512

    def __post_init__(self) -> None:
        times = (
            self.deadline_s,
            self.attempt_s,
            self.retry_first_s,
            self.retry_most_s,
            self.hold_first_s,
            self.hold_most_s,
            self.forget_s,
        )
        if not all(0 < each < 86_400 for each in times) or not 1 <= self.pipeline <= 64 or self.connections < 1:
            raise ConfigurationError("invalid-argument", f"a time or a limit is out of range: {self}")


_SHOWN_RANKS = 16


@final
@dataclass(frozen=True, slots=True)
class Question:
    """The ranks of an engine that a caller asks for.

    Failures are remembered by the whole question, so that a wrong one does not block the right one.

    Attributes:
        endpoint: Host and port of the listener.
        ranks: (pp, tp) ranks to ask for.
        engine_id: The engine that must answer; empty for any.
        dialect: The peer's connector version.
        generation: Registration generation that the ticket was made with; None for any.
    """

    endpoint: Endpoint
    ranks: tuple[Rank, ...]
    engine_id: str
    dialect: int
    generation: int | None = None


@final
@dataclass(frozen=True, slots=True)
class HandshakeRequest:
    """A question together with this engine's side of the comparison; see `ClientSession` for the rest."""

    question: Question
    offer: LocalOffer
    keeps_replies: bool = False
    check_first: Callable[[AgentMetadata], None] | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Host and port of the listener."""
        return self.question.endpoint

    def new_session(self) -> ClientSession:
        """Return a session that asks the question.

        Raises:
            ConfigurationError: ``invalid-argument`` or ``unknown-dialect`` for a question that cannot be asked.
        """
        return ClientSession(
            ranks=self.question.ranks,
            version=self.question.dialect,
            offer=self.offer,
            engine_id=self.question.engine_id,
            generation=self.question.generation,
            keeps_replies=self.keeps_replies,
            check_first=self.check_first,
        )


@final
class Task:
    """Decides about one request: the running session, the time of the next attempt, the end.

    Args:
        request: The request.
        on_end: Called once, with the task, when it has ended.
        timing: Deadlines and retries.
        now_s: The present time.
        attempts_most: Attempts after which it ends, however much time is left; None for no bound.
        admit: Called with the time when the task reaches the loop; an error that it returns ends the task at once.
    """

    def __init__(
        self,
        request: HandshakeRequest,
        on_end: Callable[[Task], None],
        *,
        timing: Timing,
        now_s: float,
        attempts_most: int | None = None,
        admit: Callable[[float], HandshakeError | None] | None = None,
    ) -> None:
        self.request = request
        self.on_end = on_end
        self.admit = admit
        self._timing = timing
        self._attempts_most = attempts_most
        self._backoff = Backoff(timing.retry_first_s, timing.retry_most_s)
        self._addresses: deque[str] = deque()
        self.began_s = now_s
        self.deadline_s = now_s + timing.deadline_s
        self.next_attempt_s = now_s
        self.attempt_deadline_s = now_s
        self.heard_s = now_s
        self.attempts = 0
        self.session = request.new_session()

    def postpone(self, start_s: float) -> None:
        """Begin at this time instead of now."""
        self.began_s = self.next_attempt_s = start_s
        self.deadline_s = start_s + self._timing.deadline_s

    def begin_attempt(self, now_s: float) -> None:
        """Start afresh, with a new session."""
        if self.attempts:
            self.session = self.request.new_session()
        self.attempts += 1
        self.extend_attempt(now_s)

    def extend_attempt(self, now_s: float) -> None:
        """Allow the attempt its full time again: a reply has come, or it has just begun."""
        self.heard_s = now_s
        self.attempt_deadline_s = min(self.deadline_s, now_s + self._timing.attempt_s)

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Set the addresses of this attempt; each attempt begins with the one after the last attempt's first."""
        self._addresses = deque(addresses)
        self._addresses.rotate(1 - self.attempts)

    def next_address(self) -> str | None:
        """Return the next address of this attempt, or None if all have been tried."""
        return self._addresses.popleft() if self._addresses else None

    def change_address(self) -> bool:
        """Prepare for the attempt's next address with a new session; return False if there is none."""
        if not self._addresses:
            return False
        self.session = self.request.new_session()
        return True

    def change_key(self) -> None:
        """Prepare for another key at the same address, with a new session."""
        self.session = self.request.new_session()

    def check_time(self, now_s: float) -> None:
        """Fail the session if the attempt or the whole request has taken too long."""
        if now_s < self.attempt_deadline_s:
            return
        missing = self.session.missing_ranks
        asked = f"rank {missing[0]}" if missing else "any rank"
        self.session.fail(self.transport_error("timed-out", f"no reply for {asked} from {self.peer}", now_s))

    @property
    def peer(self) -> str:
        """Host and port of the listener, for a text."""
        return f"{self.request.endpoint.host} port {self.request.endpoint.port}"

    def connection_error(self, fault: str, now_s: float) -> TransportError:
        """Return the error of a connection that could not be made or has ended, by the code that `Connection.fault` gave."""
        if fault == "connection-refused":
            return self.transport_error("connection-refused", f"cannot connect to {self.peer}", now_s)
        if fault == "authentication-refused":
            return self.transport_error(
                "authentication-refused",
                f"the connection to {self.peer} could not be opened: no side channel listens there (a web server, perhaps), "
                "keys on one side only, wrong keys, or too many connections at the peer",
                now_s,
            )
        return self.transport_error(
            "connection-lost", f"the connection to {self.peer} ended before all replies had come", now_s
        )

    def transport_error(self, code: str, problem: str, now_s: float) -> TransportError:
        """Return an error with the problem (a text that names the peer), the missing ranks and the elapsed time."""
        endpoint, elapsed_s = self.request.endpoint, now_s - self.began_s
        missing = self.session.missing_ranks
        shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
        more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
        return TransportError(
            code,
            f"{problem} (after {elapsed_s:.2f} s, attempt {self.attempts})"
            + (f"; ranks still missing: {shown}{more}" if missing else ""),
            host=endpoint.host,
            port=endpoint.port,
            missing_ranks=missing,
            elapsed_s=elapsed_s,
        )

    def plan_retry(self, now_s: float, chance: float) -> bool:
        """Return whether the failed attempt is followed by another one, and set its time.

        A refused connection is an answer: nothing listens there, and trying again within the request would only keep the
        caller waiting.
        """
        error = self.session.error
        if error is None or error.code == "connection-refused" or not may_retry(error):
            return False
        if self._attempts_most is not None and self.attempts >= self._attempts_most:
            return False
        asked_s = error.context.get("retry_after_s")
        least_s = float(asked_s) if isinstance(asked_s, (int, float)) else 0.0
        self.next_attempt_s = now_s + max(self._backoff.delay_s(self.attempts, chance), least_s)
        return self.next_attempt_s < self.deadline_s


def may_retry(error: HandshakeError) -> bool:
    """Return whether the same request may succeed later; a refusal is as lasting as the peer's own code says."""
    peer_code = error.context.get("peer_code")
    if isinstance(peer_code, str) and peer_code in CODES:
        return CODES[peer_code].is_retry_safe is True
    return error.is_retry_safe is True


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """All asked ranks of one engine, or a reason.

    Attributes:
        peers: Metadata by (pp rank, tp rank); empty unless everything went well.
        code: Empty if all went well, else a key of `CODES`.
        message: The reason in words: host, port, rank, elapsed time, differing factors.
        context: The values behind the message.
        is_retry_safe: Whether the same request may succeed later; None if that is unknown.
        elapsed_s: From the request to this outcome, all attempts included.
        attempts: Connections tried.
        rtt_s: Shortest round trip, seconds; infinite without an answer.
        clock_offset_s: Peer's clock minus ours, seconds; None if the peer does not say.
        verdict: The comparison with the peer; empty if it never answered.
    """

    peers: Mapping[Rank, AgentMetadata] = field(default_factory=lambda: MappingProxyType[Rank, AgentMetadata]({}))
    code: str = ""
    message: str = ""
    context: Mapping[str, object] = field(default_factory=lambda: MappingProxyType[str, object]({}))
    is_retry_safe: bool | None = None
    elapsed_s: float = 0.0
    attempts: int = 0
    rtt_s: float = float("inf")
    clock_offset_s: float | None = None
    verdict: Verdict = field(default_factory=Verdict)

    @property
    def is_ok(self) -> bool:
        """Whether every asked rank answered and was accepted."""
        return not self.code


def outcome_of(task: Task, now_s: float) -> Outcome:
    """Return the outcome of an ended handshake, from its last session."""
    session, error, endpoint = task.session, task.session.error, task.request.endpoint
    elapsed_s = now_s - task.began_s
    if error is None:
        return Outcome(
            peers=session.peers,
            elapsed_s=elapsed_s,
            attempts=task.attempts,
            rtt_s=session.rtt_s,
            clock_offset_s=session.clock_offset_s,
            verdict=session.verdict,
        )
    where = f"{endpoint.host} port {endpoint.port}"
    return Outcome(
        code=error.code,
        message=str(error) if where in str(error) else f"{error} (peer {where})",
        context=MappingProxyType({"host": endpoint.host, "port": endpoint.port, **error.context}),
        is_retry_safe=may_retry(error),
        elapsed_s=elapsed_s,
        attempts=task.attempts,
        verdict=session.verdict,
    )
