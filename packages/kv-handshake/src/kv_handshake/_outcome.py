"""The end of a handshake with one engine, and the times that bound it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._errors import ConfigurationError
from kv_handshake._messages import AgentMetadata
from kv_handshake._policy import Verdict
from kv_handshake._queries import Rank
from kv_handshake._task import may_retry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._session import ClientSession
    from kv_handshake._task import Task

__all__ = ["Outcome", "Timing", "outcome_of"]


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


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """Waits and retries of a client; times in seconds.

    Attributes:
        deadline_s: A handshake ends after this, whatever happens.
        attempt_s: One connection is given up after this without the next reply.
        retry_first_s: Wait before the second attempt; doubles from there.
        retry_most_s: Longest wait between attempts.
        hold_first_s: After a failed handshake the peer is asked again, in the background, after this time; doubles from
            there. Until it has answered, requests for it fail at once.
        hold_most_s: Longest wait between two background attempts.
        forget_s: A failed peer that no request has named for this long is forgotten.
        pipeline: Queries that may be under way at once on one connection.
        connections: Peers that are talked to at once; further ones wait for a place.
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


def outcome_of(task: Task[ClientSession], now_s: float) -> Outcome:
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
