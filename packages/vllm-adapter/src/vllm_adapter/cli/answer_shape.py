"""The shape of engines' answers, as far as commands compute with them: an engine of another version may answer otherwise.

Fields that are not named here are shown as they are, or not at all. A field may be missing, or null, where it is not needed.
"""

from __future__ import annotations

from typing import Annotated, Any, Required, TypedDict

import msgspec

__all__ = ["AnswerShape", "Number", "misfit"]

Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Numbers beyond are none of an engine's: bytes, counts, seconds. What is computed from those within stays a finite float."""


class _Entry(TypedDict, total=False):
    """A request, a lease, a read, a stream or a peer engine."""

    request_id: str | None
    engine_id: str | None
    state: str | None
    waits_for: str | None
    age_s: Number | None
    bytes: Number | None


class _HandOver(TypedDict, total=False):
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


class _Thread(TypedDict, total=False):
    state: str | None
    last_error: str | None
    ucx_requests: str | None


class _Figures(TypedDict, total=False):
    transfers_done: Number | None
    bytes_moved: Number | None
    recent_bytes_per_s: Number | None


class AnswerShape(TypedDict, total=False):
    """An answer to `status` or `trace`, as it comes or as `vllm-adapter trace --save` has written it."""

    desk: str | None
    socket: str | None
    error: str | None
    engine_id: str | None
    part: str | None
    side_channel: str | None
    compatibility_policy: str | None
    ucx_tls: str | None
    pid: Number | None
    leases: Number | None
    leased_blocks: Number | None
    leased_bytes: Number | None
    reads: Number | None
    reads_waiting_for_a_peer: Number | None
    streams: Number | None
    peers: Number | None
    quarantined_transfers: Number | None
    quarantined_bytes: Number | None
    stalled_transfers: Number | None
    stalled_bytes: Number | None
    lease_s: Number | None
    heartbeat_s: Number | None
    asked_s: Number | None
    heard_s: Number | None
    answered_s: Number | None
    received_s: Number | None
    is_draining: bool | None
    is_silent: bool | None
    is_asleep: bool | None
    requires_seals: bool | None
    is_encrypted: bool | None
    oldest_requests: list[_Entry] | None
    oldest_leases: list[_Entry] | None
    oldest_reads: list[_Entry] | None
    oldest_streams: list[_Entry] | None
    peer_engines: list[_Entry] | None
    thread: _Thread | None
    figures: _Figures | None
    seals: list[str] | None
    hand_overs: list[_HandOver] | None


def misfit(value: object, shape: Any) -> str:  # noqa: ANN401 - any type that msgspec knows
    """Return the first field that has another shape, with what it must be; nothing if there is none.

    Example: ``Expected `object | null`, got `int` - at `$.thread` ``.
    """
    try:
        msgspec.convert(value, shape)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half of a surrogate pair is no text
        return str(error)
    return ""
