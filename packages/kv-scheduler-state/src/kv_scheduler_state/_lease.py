"""A lease on a worker: its readers, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, final

from kv_scheduler_state._machine import NEW, Trace

__all__ = ["END_REASONS", "Lease", "LeaseEnd", "LeaseEndReason", "ReaderVerdict", "Readers", "Refusal"]

LeaseEndReason = Literal["read", "expired", "released"]
ReaderVerdict = Literal[
    "counted",
    "complete",
    "duplicate",
    "unknown",
    "expired",
    "stale",
    "bad-count",
    "bad-reader",
    "unadmitted-reader",
    "too-many-consumers",
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
        reason: "read": all readers of a consumer are done. "expired": its deadline passed, or the scheduler revoked it.
            "released": it was never handed over.
        fence: (slot, generation) to write before the blocks are reported free, or None.
        is_reported: Whether the engine waits for its report as sent. False for "released": the engine has forgotten it.
        is_revoked: Whether the scheduler ended it early.
        readers_done: Readers that had reported, over all consumers.
    """

    request_id: str
    reason: LeaseEndReason
    fence: tuple[int, int] | None
    is_reported: bool
    is_revoked: bool
    readers_done: int


@final
class Refusal(NamedTuple):
    """An order of a plan that the lease table refused; all others were applied.

    Attributes:
        request_id: The request.
        order: The kind of order.
        code: Code of the error.
        message: The same as a sentence.
    """

    request_id: str
    order: Literal["expect", "grant", "release", "revoke", "void"]
    code: str
    message: str


@final
class Readers:
    """The ranks of one consumer engine that are done with a request.

    Attributes:
        needed: Ranks that the consumer says there are.
        done: Identities of those that have reported.
    """

    __slots__ = ("done", "needed")

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.done: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have reported."""
        return len(self.done) >= self.needed


@final
class Lease:
    """The record of one lease.

    Readers are kept by (nonce, consumer): before the grant its nonce is not known here, and the ranks of two consumers that
    hold the same ticket never add up to a complete read.
    """

    __slots__ = ("deadline_s", "extension_s", "fence", "lease_s", "nonce", "readers", "state", "trace")

    def __init__(self) -> None:
        self.state = NEW
        self.trace: Trace = None
        self.deadline_s = 0.0
        self.extension_s = 0.0
        self.lease_s = 0.0
        self.fence: tuple[int, int] | None = None
        self.nonce = ""
        self.readers: dict[tuple[str, str], Readers] = {}

    def keep_readers_of(self, nonces: set[str]) -> None:
        """Drop readers that answered with another nonce than these."""
        self.readers = {key: readers for key, readers in self.readers.items() if key[0] in nonces}

    @property
    def is_read(self) -> bool:
        """Whether some consumer has read it with all its ranks."""
        return any(readers.is_complete for readers in self.readers.values())

    @property
    def readers_done(self) -> tuple[str, ...]:
        """Identities of all readers that have reported."""
        return tuple(sorted({reader for readers in self.readers.values() for reader in readers.done}))
