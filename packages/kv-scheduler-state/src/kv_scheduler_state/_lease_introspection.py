"""Descriptions of the leases on one worker, and checks of the lease table's internal promises."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from kv_scheduler_state._machine import describe_trace

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from kv_scheduler_state._lease import Lease

__all__ = ["describe_leases", "lease_violations"]

_TRACE_LENGTH: Final = 16


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
                **describe_trace(lease.trace, _TRACE_LENGTH, at_s),
            }
            for request_id, lease in islice(leases.items(), most)
        ]
    )


def lease_violations(
    leases: Mapping[str, Lease], deadlines: Container[str], lengths: Mapping[float, int]
) -> Iterator[str]:
    """Yield every broken promise between the leases, their deadlines and the counted lengths."""
    for request_id, lease in leases.items():
        if lease.state == "granted" and request_id not in deadlines:
            yield f"{request_id}: granted, but nothing will ever expire it"
        if lease.state not in {"expected", "granted"}:
            yield f"{request_id}: lease state '{lease.state}' is no live state"
    found = Counter([lease.lease_s for lease in leases.values() if lease.state == "granted"])
    if found != {lease_s: count for lease_s, count in lengths.items() if count}:
        yield f"lengths of live leases are {dict(found)}, noted are {dict(lengths)}"
