"""A handshake under way: its waits, its attempts and their sessions, the decision to try again, and its outcome.

No input or output.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, final

from kv_handshake.core.pacing import backoff_s
from kv_handshake.errors import CODES, ConfigurationError, HandshakeError, TransportError, require
from kv_handshake.wire.messages import AgentMetadata
from kv_handshake.wire.policy import Verdict
from kv_handshake.wire.queries import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake.core.endpoint import Endpoint
    from kv_handshake.core.session import ClientSession

__all__ = ["Handshake", "Outcome", "Timing"]


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
        connections: Connections at once; fewer where the process may open few files. Further handshakes and asks wait for a place
            until their deadline, and then end with ``too-many-peers``.
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
        require((int, float), **asdict(self))
        times = [value for name, value in asdict(self).items() if name.endswith("_s")]
        if not all(0 < each < 86_400 for each in times) or not 1 <= self.pipeline <= 64 or self.connections < 1:
            raise ConfigurationError("invalid-argument", f"a time or a limit is out of range: {self}")


_SHOWN_RANKS = 16


@final
class Handshake:
    """Decides about one request: the running session, the time of the next attempt, the end.

    Args:
        endpoint: Host and port of the listener.
        new_session: Makes the session of a connection.
        on_done: Called once, with the outcome.
        timing: Deadlines and retries.
        start_s: Time of the first attempt.
        attempts_most: Attempts after which it ends, however much time is left; None for no bound.

    Attributes:
        next_attempt_s: Time of the next attempt.
        heard_s: Time of the last reply, or of the attempt's begin.

    Raises:
        ConfigurationError: As `new_session`.
    """

    is_idle = False

    def __init__(
        self,
        endpoint: Endpoint,
        new_session: Callable[[], ClientSession],
        on_done: Callable[[Outcome], None],
        *,
        timing: Timing,
        start_s: float,
        attempts_most: int | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.session = new_session()
        self.attempts = 0
        self.next_attempt_s = self.heard_s = start_s
        self._began_s = start_s
        self._deadline_s = start_s + timing.deadline_s
        self._is_waiting = True
        self._earlier: HandshakeError | None = None
        self._new_session = new_session
        self._on_done = on_done
        self._timing = timing
        self._attempts_most = attempts_most

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, well or not."""
        return self.session.is_over

    @property
    def due_s(self) -> float:
        """Time at which `check_time` ends the attempt, or the wait for one."""
        return self._deadline_s if self._is_waiting else min(self._deadline_s, self.heard_s + self._timing.attempt_s)

    def begin_attempt(self, now_s: float) -> None:
        """Start afresh, with a new session."""
        if self.attempts:
            self._earlier = self.session.error
            self.session = self._new_session()
        self.attempts += 1
        self._is_waiting = False
        self.heard_s = now_s

    def reconnect(self) -> None:
        """Prepare for another connection of the same attempt, with a new session."""
        self.session = self._new_session()

    def next_query(self, now_s: float) -> bytes | None:
        """Return a query to send now, None if there is none or as many are under way as may be."""
        session = self.session
        if session.queries_left and session.queries_outstanding < self._timing.pipeline:
            return session.next_query(now_s=now_s)
        return None

    def receive(self, frames: Sequence[bytes], now_s: float) -> None:
        """Take in a whole reply."""
        self.heard_s = now_s
        self.session.receive_message(frames, now_s=now_s)

    def check_time(self, now_s: float) -> None:
        """Fail if the attempt or the whole request has taken too long."""
        if now_s < self.due_s:
            return
        if self._is_waiting:  # after a failed attempt, that attempt's error stays
            self.fail("too-many-peers", f"no place in this process for a connection to {self.endpoint}", now_s)
            return
        if self._earlier is not None and now_s < self.heard_s + self._timing.attempt_s:
            # The request's deadline cuts this attempt short: what ended the one before says more.
            self.fail_with(self._earlier)
            return
        missing = self.session.missing_ranks
        asked = f"rank {missing[0]}" if missing else "any rank"
        self.fail("timed-out", f"no reply for {asked} from {self.endpoint}", now_s)

    def fail(self, code: str, problem: str, now_s: float) -> None:
        """End the session with an error that gives the problem (a text), the missing ranks and the elapsed time."""
        elapsed_s = now_s - self._began_s
        missing = self.session.missing_ranks
        shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
        more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
        text = f"{problem} (after {elapsed_s:.2f} s, attempt {self.attempts})"
        if missing:
            text += f"; ranks still missing: {shown}{more}"
        self.session.fail(TransportError(code, text, missing_ranks=missing, elapsed_s=elapsed_s))

    def fail_with(self, error: HandshakeError) -> None:
        """End the session with this error."""
        self.session.fail(error)

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
        timing = self._timing
        wait_s = backoff_s(timing.retry_first_s, timing.retry_most_s, failures=self.attempts, chance=chance)
        self.next_attempt_s = now_s + max(wait_s, least_s)
        self._is_waiting = True
        return self.next_attempt_s < self._deadline_s

    def end(self, now_s: float) -> None:
        """Hand the outcome of the last session over."""
        session, error, where = self.session, self.session.error, str(self.endpoint)
        outcome = Outcome(elapsed_s=now_s - self._began_s, attempts=self.attempts, verdict=session.verdict)
        if error is None:
            outcome = replace(outcome, peers=session.peers, rtt_s=session.rtt_s, clock_offset_s=session.clock_offset_s)
        else:
            outcome = replace(
                outcome,
                code=error.code,
                message=error.message if where in error.message else f"{error.message} (peer {where})",
                context={"host": self.endpoint.host, "port": self.endpoint.port, **error.context},
                is_retry_safe=may_retry(error),
            )
        self._on_done(outcome)


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

    peers: Mapping[Rank, AgentMetadata] = field(default_factory=dict[Rank, AgentMetadata])
    code: str = ""
    message: str = ""
    context: Mapping[str, object] = field(default_factory=dict[str, object])
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
