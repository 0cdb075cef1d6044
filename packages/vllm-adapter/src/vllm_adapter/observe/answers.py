"""Answers of an engine's processes to `status`, `trace` and `revoke`: the shape that engines build and commands read.

A process reports the fields of its part. An engine of another version may answer otherwise, so a command reads each field as one
that may be missing or null, and shows fields that are not declared here as they are.
"""

from __future__ import annotations

from typing import Annotated, Required, TypedDict

import msgspec

__all__ = ["Answer", "Entry", "HandOverEntry", "Number", "HealthEntry"]

Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Bytes, counts, seconds. What is computed from numbers within these bounds stays a finite float."""


Entry = dict[str, object]
"""A request, a lease, a read, a streamed read or a peer engine, without the values that could end a lease; shown as it is."""


class HandOverEntry(TypedDict, total=False):
    """A hand-over that a process remembers: seconds of its monotonic clock by stage, and facts."""

    request_id: str | None
    role: str | None
    peer_engine_id: str | None
    peer_request_id: str | None
    frontend_s: Number | None
    tokens: Number | None
    bytes: Number | None
    early_bytes: Number | None
    is_early: bool | None
    is_streamed: bool | None
    code: str | None
    moments: Required[dict[str, Number | None]]


class HealthEntry(TypedDict, total=False):
    """Health of a rank's transfer thread."""

    state: str | None
    calls_waiting: Number | None
    errors: Number | None
    last_error: str | None
    ucx_requests: str | None


class Answer(TypedDict, total=False):
    """The answer of one process."""

    # Of every process. The socket, the command that asked (`desk`) and its clock are added where the answer arrives.
    engine_id: str | None
    part: str | None
    pid: Number | None
    ucx_tls: str | None
    error: str | None
    socket: str | None
    desk: str | None
    asked_s: Number | None
    heard_s: Number | None
    answered_s: Number | None
    received_s: Number | None
    hand_overs: list[HandOverEntry] | None
    leases: Number | None
    # Of the scheduler's.
    side_channel: str | None
    compatibility_policy: str | None
    lease_s: Number | None
    heartbeat_s: Number | None
    requires_seals: bool | None
    is_encrypted: bool | None
    seals: list[str] | None
    served_ranks: Number | None
    is_draining: bool | None
    leased_blocks: Number | None
    leased_bytes: Number | None
    fence_slots_used: Number | None
    stream_slots_used: Number | None
    stream_blocks_held: Number | None
    requests_by_state: dict[str, int] | None
    oldest_requests: list[Entry] | None
    # Of a rank's.
    is_asleep: bool | None
    is_registered: bool | None
    is_silent: bool | None
    thread: HealthEntry | None
    figures: dict[str, Number | None] | None
    quarantined_transfers: Number | None
    quarantined_bytes: Number | None
    stalled_transfers: Number | None
    stalled_bytes: Number | None
    oldest_leases: list[Entry] | None
    reads: Number | None
    reads_waiting_for_a_peer: Number | None
    oldest_reads: list[Entry] | None
    streams: Number | None
    oldest_streams: list[Entry] | None
    peers: Number | None
    peer_engines: list[Entry] | None
