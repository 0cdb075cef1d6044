"""The end of a handshake with one engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._messages import AgentMetadata
from kv_handshake._policy import Verdict
from kv_handshake._queries import Rank
from kv_handshake._task import may_retry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_handshake._task import Task

__all__ = ["Outcome", "outcome_of"]


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
