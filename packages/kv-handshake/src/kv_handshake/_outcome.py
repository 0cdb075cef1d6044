"""The end of a handshake with one engine, and the times that bound it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._errors import ConfigurationError
from kv_handshake._messages import AgentMetadata
from kv_handshake._policy import Verdict
from kv_handshake._queries import Rank

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Outcome", "Timing"]


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """All asked ranks of one engine, or a reason.

    Attributes:
        peers: Metadata by (pp rank, tp rank); empty unless everything went well.
        code: Empty if all went well, else a key of `CODES`.
        message: The reason in words: host, port, rank, elapsed time, differing factors.
        context: The values behind the message.
        is_retry_safe: Whether the same request may succeed later; None if nobody can tell.
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
    """How long a client waits and how often it tries; all in seconds.

    Attributes:
        deadline_s: A handshake ends after this, whatever happens.
        attempt_s: One connection is given up after this without the next reply.
        retry_first_s: Wait before the second attempt; doubles from there.
        retry_most_s: Longest wait between attempts.
        hold_first_s: After a failed handshake the peer is not asked for this long; doubles from there.
        hold_most_s: Longest hold.
        pipeline: Queries that may be under way at once on one connection.
        connections: Peers that are talked to at once; further ones wait for a place.
    """

    deadline_s: float = 15.0
    attempt_s: float = 5.0
    retry_first_s: float = 0.1
    retry_most_s: float = 2.0
    hold_first_s: float = 0.5
    hold_most_s: float = 30.0
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
        )
        if not all(0 < each < 86_400 for each in times) or not 1 <= self.pipeline <= 64 or self.connections < 1:
            raise ConfigurationError("invalid-argument", f"a time or a limit is out of range: {self}")
