"""Notifications between the workers of two engines: what a reader tells the engine that it reads from.

Two payloads, both UTF-8 text, both of vLLM's wire: ``<request id>:<reader count>`` (a read is complete) and
``HB:<id>,<id>,...`` (keep these requests alive). Anything else that arrives, by mistake or by malice, parses to
*unknown* with a reason; nothing here raises on a peer's bytes.

A request id may contain a comma, which vLLM's heartbeat cannot carry. Such an id travels alone, as ``HB:,<id>``:
vLLM's own connector takes that for ids it does not know and ignores them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from kv_handshake._errors import ConfigurationError
from kv_handshake._limits import MAX_NOTIFICATION_BYTES, MAX_READER_COUNT, MAX_REQUEST_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Notification", "encode_heartbeats", "encode_read_complete", "parse_notification"]

_HEARTBEAT = "HB:"
_VERBATIM = "HB:,"
_PUSH = b"PUSH_REG:"
_COUNT = re.compile(r"[1-9][0-9]{0,4}")
_TARGET_BYTES = 8192


@final
@dataclass(frozen=True, slots=True)
class Notification:
    """A parsed notification.

    Attributes:
        kind: ``read-complete``, ``heartbeat`` or ``unknown``.
        request_ids: The requests it is about, on the receiver's side; empty if unknown.
        reader_count: Consumer ranks that will report this request to this rank; 0 unless a read is complete.
        reason: Why the payload is unknown: ``oversized``, ``not-utf8``, ``no-count``, ``bad-count``, ``bad-id`` or
            ``push-registration``; empty otherwise.
    """

    kind: Literal["read-complete", "heartbeat", "unknown"]
    request_ids: tuple[str, ...] = ()
    reader_count: int = 0
    reason: str = ""


def parse_notification(payload: bytes) -> Notification:
    """Return what a peer's notification says; never raises."""
    if len(payload) > MAX_NOTIFICATION_BYTES:
        return _unknown("oversized")
    if payload.startswith(_PUSH):
        return _unknown("push-registration")
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return _unknown("not-utf8")
    if text.startswith(_HEARTBEAT):
        return _parse_heartbeat(text)
    request_id, colon, count = text.rpartition(":")
    if not colon:
        return _unknown("no-count")
    if not _is_request_id(request_id):
        return _unknown("bad-id")
    if _COUNT.fullmatch(count) is None or int(count) > MAX_READER_COUNT:
        return _unknown("bad-count")
    return Notification("read-complete", (request_id,), int(count))


def encode_read_complete(request_id: str, reader_count: int) -> bytes:
    """Return the payload that tells a producer rank that this reader is done with a request.

    Args:
        request_id: The request's id on the producer.
        reader_count: Consumer ranks that report this request to that producer rank, 1 to 65 536.

    Raises:
        ConfigurationError: ``invalid-argument`` if the peer could not read the result back.
    """
    payload = f"{request_id}:{reader_count}".encode("utf-8", "surrogatepass")
    if parse_notification(payload) != Notification("read-complete", (request_id,), reader_count):
        raise ConfigurationError(
            "invalid-argument",
            f"request id {request_id!r} with {reader_count} readers cannot be notified",
            request_id=request_id,
            reader_count=reader_count,
        )
    return payload


def encode_heartbeats(request_ids: Sequence[str], *, target_bytes: int = _TARGET_BYTES) -> tuple[bytes, ...]:
    """Return the payloads that keep requests alive on a producer, few and none much longer than `target_bytes`.

    Args:
        request_ids: Ids on the producer, in any number; repeated ones are sent once.
        target_bytes: A payload is closed when the next id would make it longer than this.

    Raises:
        ConfigurationError: ``invalid-argument`` for an id that is empty, not UTF-8 or longer than 4096 bytes.
    """
    return tuple(_heartbeats(dict.fromkeys(request_ids), target_bytes))


def _heartbeats(request_ids: dict[str, None], target_bytes: int) -> Iterator[bytes]:
    batch: list[bytes] = []
    batch_bytes = len(_HEARTBEAT)
    for request_id in request_ids:
        if not _is_request_id(request_id):
            raise ConfigurationError(
                "invalid-argument", f"request id {request_id!r} cannot be kept alive", request_id=request_id
            )
        encoded = request_id.encode()
        if "," in request_id:
            yield _VERBATIM.encode() + encoded
            continue
        if batch and batch_bytes + 1 + len(encoded) > target_bytes:
            yield _HEARTBEAT.encode() + b",".join(batch)
            batch, batch_bytes = [], len(_HEARTBEAT)
        batch.append(encoded)
        batch_bytes += 1 + len(encoded)
    if batch:
        yield _HEARTBEAT.encode() + b",".join(batch)


def _parse_heartbeat(text: str) -> Notification:
    if text.startswith(_VERBATIM) and "," in text[len(_VERBATIM) :]:
        request_ids = [text[len(_VERBATIM) :]]
    else:
        request_ids = text[len(_HEARTBEAT) :].split(",")
    kept = tuple(dict.fromkeys(request_id for request_id in request_ids if _is_request_id(request_id)))
    return Notification("heartbeat", kept) if kept else _unknown("bad-id")


def _is_request_id(request_id: str) -> bool:
    if not request_id or len(request_id) > MAX_REQUEST_ID_BYTES:
        return False
    try:
        return len(request_id.encode()) <= MAX_REQUEST_ID_BYTES
    except UnicodeEncodeError:
        return False


def _unknown(reason: str) -> Notification:
    return Notification("unknown", reason=reason)
