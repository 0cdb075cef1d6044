"""One handshake under way: attempts, their sessions, and the decision to try again. No input or output."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._errors import CODES, HandshakeError, TransportError
from kv_handshake._outcome import Outcome, Timing
from kv_handshake._pacing import Backoff
from kv_handshake._session import ClientSession, SessionMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake._policy import LocalOffer
    from kv_handshake._queries import Rank

__all__ = ["Request", "Task"]


@final
@dataclass(frozen=True, slots=True)
class Request:
    """What a caller wants: some ranks of the engine at an address.

    Attributes:
        host: Address or name of the listener.
        port: Its port.
        ranks: (pp, tp) ranks to ask for.
        engine_id: The engine that must answer; empty for any.
        dialect: The peer's connector version.
        generation: Registration generation that the ticket was made with; None for any.
        on_done: Called once with the outcome.
    """

    host: str
    port: int
    ranks: Sequence[Rank]
    engine_id: str
    dialect: int
    generation: int | None
    on_done: Callable[[Outcome], None]

    @property
    def peer(self) -> tuple[str, int, str, tuple[Rank, ...], int, int | None]:
        """What failures are remembered by: the whole question, so that a wrong one does not block the right one."""
        return (self.host, self.port, self.engine_id, tuple(self.ranks), self.dialect, self.generation)


@final
class Task:
    """Decides about one request: which session runs, when the next attempt is due, and when it is over.

    Every attempt asks for all ranks again, so that an outcome never mixes two lives of an engine.
    """

    def __init__(
        self,
        request: Request,
        *,
        offer: LocalOffer,
        timing: Timing,
        now_s: float,
        memory: SessionMemory | None = None,
    ) -> None:
        self.request = request
        self._memory = memory
        self._offer = offer
        self._timing = timing
        self._began_s = now_s
        self._backoff = Backoff(timing.retry_first_s, timing.retry_most_s)
        self.deadline_s = now_s + timing.deadline_s
        self.next_attempt_s = now_s
        self.attempts = 0
        self.session = self._new_session()
        self.patience_s = now_s

    def begin_attempt(self, now_s: float) -> None:
        """Start afresh, with a new session."""
        if self.attempts:
            self.session = self._new_session()
        self.attempts += 1
        self.extend_patience(now_s)

    def extend_patience(self, now_s: float) -> None:
        """Allow the attempt its full time again: a reply has come, or it has just begun."""
        self.patience_s = min(self.deadline_s, now_s + self._timing.attempt_s)

    def check_time(self, now_s: float) -> None:
        """Fail the session if the attempt or the whole handshake has taken too long."""
        if now_s < self.patience_s:
            return
        missing = self.session.missing_ranks
        asked = f"rank {missing[0]}" if missing else "any rank"
        self.session.fail(self.transport_error("timed-out", f"no reply for {asked}", now_s))

    def transport_error(self, code: str, problem: str, now_s: float) -> TransportError:
        """Return an error that names the peer, the missing ranks and the elapsed time."""
        request, elapsed_s = self.request, now_s - self._began_s
        missing = self.session.missing_ranks
        return TransportError(
            code,
            f"{problem} from {request.host} port {request.port} after {elapsed_s:.2f} s, attempt {self.attempts}; "
            f"ranks still missing: {', '.join(map(str, missing))}",
            host=request.host,
            port=request.port,
            missing_ranks=missing,
            elapsed_s=elapsed_s,
        )

    def plan_retry(self, now_s: float, chance: float) -> bool:
        """Return whether the failed attempt is followed by another one; sets when."""
        error = self.session.error
        if error is None or not _may_retry(error):
            return False
        asked_s = error.context.get("retry_after_s")
        least_s = float(asked_s) if isinstance(asked_s, (int, float)) else 0.0
        self.next_attempt_s = now_s + max(self._backoff.delay_s(self.attempts, chance), least_s)
        return self.next_attempt_s < self.deadline_s

    def outcome(self, now_s: float) -> Outcome:
        """Return how the request ended, from its last session."""
        session, error = self.session, self.session.error
        elapsed_s = now_s - self._began_s
        if error is None:
            return Outcome(
                peers=session.peers,
                elapsed_s=elapsed_s,
                attempts=self.attempts,
                rtt_s=session.rtt_s,
                clock_offset_s=session.clock_offset_s,
                verdict=session.verdict,
            )
        context = {"host": self.request.host, "port": self.request.port, **error.context}
        where = f"{self.request.host} port {self.request.port}"
        message = str(error) if where in str(error) else f"{error} (peer {where})"
        return Outcome(
            code=error.code,
            message=message,
            context=MappingProxyType(context),
            is_retry_safe=_may_retry(error),
            elapsed_s=elapsed_s,
            attempts=self.attempts,
            verdict=session.verdict,
        )

    def _new_session(self) -> ClientSession:
        request = self.request
        return ClientSession(
            ranks=request.ranks,
            version=request.dialect,
            offer=self._offer,
            engine_id=request.engine_id,
            generation=request.generation,
            memory=self._memory,
        )


def _may_retry(error: HandshakeError) -> bool:
    """Whether the same request may succeed soon; a refusal is as lasting as the peer's own code says."""
    peer_code = error.context.get("peer_code")
    if isinstance(peer_code, str) and peer_code in CODES:
        return CODES[peer_code].is_retry_safe is True
    return error.is_retry_safe is True
