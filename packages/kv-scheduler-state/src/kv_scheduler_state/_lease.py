"""One lease on one worker, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from kv_scheduler_state._machine import NEW, TraceEntry

__all__ = ["END_REASONS", "Lease", "LeaseEnd", "LeaseEndReason", "ReaderVerdict"]

LeaseEndReason = Literal["read", "expired", "released"]
ReaderVerdict = Literal[
    "counted", "complete", "duplicate", "unknown", "expired", "bad-count", "bad-reader", "unadmitted-reader"
]
END_REASONS: Final[dict[str, LeaseEndReason]] = {
    "end-read": "read",
    "end-expired": "expired",
    "end-released": "released",
    "end-revoked": "expired",
}


@final
@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A producer request whose blocks may be given back, once its fence word is written.

    Attributes:
        request_id: The request.
        reason: "read": all readers are done. "expired": nobody asked in time, or the scheduler revoked it.
            "released": it was never handed over.
        fence: (slot, generation) to write before the blocks are reported free, or None.
        is_reported: Whether the engine waits to hear of it as sent. False for "released": the engine has forgotten it.
        is_revoked: Whether the scheduler ended it early.
        readers_done: Readers that had reported.
    """

    request_id: str
    reason: LeaseEndReason
    fence: tuple[int, int] | None
    is_reported: bool
    is_revoked: bool
    readers_done: int


@final
class Lease:
    """What one worker remembers of one lease."""

    __slots__ = ("deadline_s", "extension_s", "fence", "readers", "readers_needed", "since_s", "state", "trace")

    def __init__(self, now_s: float) -> None:
        self.state = NEW
        self.since_s = now_s
        self.trace: list[TraceEntry] = []
        self.deadline_s = 0.0
        self.extension_s = 0.0
        self.fence: tuple[int, int] | None = None
        self.readers: set[str] = set()
        self.readers_needed = 0
