"""Waits, retries and limits of a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from kv_handshake._errors import ConfigurationError

__all__ = ["Timing"]


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
