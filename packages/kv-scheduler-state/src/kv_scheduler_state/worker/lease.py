"""A lease on a worker: its readers, how it ends, and what it looks like to an operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, final

from kv_scheduler_state.machine import NEW, Trace, Transition, describe_trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


__all__ = [
    "END_REASONS",
    "Lease",
    "LeaseEnd",
    "LeaseEndReason",
    "ReaderVerdict",
    "Readers",
    "Refusal",
    "describe_leases",
    "lease_violations",
]

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
    order: Literal["expect", "grant", "release", "revoke"]
    code: str
    message: str


@final
@dataclass(slots=True, eq=False)
class Readers:
    """The ranks of one consumer engine that are done with a request.

    Attributes:
        needed: Ranks that the consumer says there are.
        done: Identities of those that have reported.
    """

    needed: int
    done: set[str] = field(default_factory=set[str])

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have reported."""
        return len(self.done) >= self.needed


@final
@dataclass(slots=True, eq=False)
class Lease:
    """The record of one lease.

    Readers are kept by (nonce, consumer): before the grant its nonce is not known here, and the ranks of two consumers that
    hold the same ticket never add up to a complete read.
    """

    state: str = NEW
    trace: Trace = field(default_factory=list[tuple[float, Transition]])
    deadline_s: float = 0.0
    extension_s: float = 0.0
    lease_s: float = 0.0
    fence: tuple[int, int] | None = None
    nonce: str = ""
    readers: dict[tuple[str, str], Readers] = field(default_factory=dict[tuple[str, str], Readers])

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


def describe_leases(leases: Mapping[str, Lease], at_s: float, most: int | None = None) -> tuple[dict[str, object], ...]:
    """Return the oldest `most` leases as plain values, oldest first; all of them without a limit."""
    return tuple(
        [
            {
                "request_id": request_id,
                "state": lease.state,
                "left_s": lease.deadline_s - at_s if lease.state == "granted" else None,
                "fence": lease.fence,
                "nonce": lease.nonce,
                "readers": list(lease.readers_done),
                "readers_needed": max([readers.needed for readers in lease.readers.values()], default=0),
                **describe_trace(lease.trace, at_s),
            }
            for request_id, lease in islice(leases.items(), most)
        ]
    )


def lease_violations(leases: Mapping[str, Lease], next_due_s: float, lengths: Mapping[float, int]) -> Iterator[str]:
    """Yield every broken promise between the leases, their deadlines and the counted lengths."""
    for request_id, lease in leases.items():
        if lease.state == "granted" and lease.deadline_s < next_due_s:
            yield f"{request_id}: granted, but nothing will ever expire it"
        if lease.state not in {"expected", "granted"}:
            yield f"{request_id}: lease state '{lease.state}' is not a live state"
    found = Counter([lease.lease_s for lease in leases.values() if lease.state == "granted"])
    if found != {lease_s: count for lease_s, count in lengths.items() if count}:
        yield f"lengths of live leases are {dict(found)}, noted are {dict(lengths)}"
