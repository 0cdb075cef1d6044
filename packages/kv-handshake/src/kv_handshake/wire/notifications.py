"""Notifications between the workers of two engines: a reader's reports to the engine that it reads from.

Every payload is UTF-8 text. vLLM's wire has two forms: ``<request id>:<reader count>`` (a read is complete) and
``HB:<id>,<id>,...`` (keep these requests alive). A request id may contain a comma, which the second form cannot carry; such
an id travels alone, as ``HB:,<id>``, which vLLM's own connector takes for ids that it does not know.

Between two engines of ours the same reports carry the nonce of the lease that they mean, so that a late one cannot end or
renew the lease of a later request with the same id, and the consumer that reads:

    KVH:["<id>","<nonce>","<consumer>"]:<reader count>
    HB:,KVH:[["<id>","<nonce>"],...]

The bracketed part is JSON. Ids that begin with one of `RESERVED_PREFIXES` cannot be notified, so neither text is ever a
report about a request in vLLM's forms. A peer that does not know our forms, vLLM or our release 0.1, finds an unknown
request id in both and drops them. Anything else that arrives parses to *unknown* with a reason; a peer's bytes never raise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, AnyStr, Literal, TypeVar, final

import msgspec

from kv_handshake.errors import ConfigurationError, require
from kv_handshake.wire import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["RESERVED_PREFIXES", "Notification", "encode_heartbeats", "encode_read_complete", "parse_notification"]

_HEARTBEAT = "HB:"
_VERBATIM = "HB:,"
_PUSH = "PUSH_REG:"
_OURS = "KVH:"
_OUR_HEARTBEAT = f"{_VERBATIM}{_OURS}"

RESERVED_PREFIXES = (_HEARTBEAT, _PUSH, _OURS)
"""A request id that begins with one of these cannot be notified."""

T = TypeVar("T")

_COUNT = re.compile(r"[1-9][0-9]{0,4}")
_NONCE = re.compile(r"[!-~]{1,64}")
_TARGET_BYTES = 8192

_read_decoder = msgspec.json.Decoder(tuple[str, str, str])
_heartbeat_decoder = msgspec.json.Decoder(list[tuple[str, str]])


class _Registration(msgspec.Struct):
    """The part of a push registration that is read; the rest is addresses and blocks to write to."""

    request_id: str


_registration_decoder = msgspec.msgpack.Decoder(_Registration)


@final
@dataclass(frozen=True, slots=True)
class Notification:
    """A parsed notification.

    Attributes:
        kind: ``read-complete``, ``heartbeat`` or ``unknown``.
        request_ids: The requests it is about, on the receiver's side; empty if unknown, but for a push registration: that has
            the id of the sender's own request, if it can be read.
        reader_count: Consumer ranks that will report this request to this rank; 0 unless a read is complete.
        reason: Why the payload is unknown: ``oversized``, ``not-utf8``, ``no-count``, ``bad-count``, ``bad-id``,
            ``bad-nonce`` or ``push-registration``; empty otherwise.
        nonces: The lease's nonce for each request id; "" in vLLM's forms.
        consumer: Engine id of the consumer; "" in vLLM's forms and in heartbeats.
        surplus: Entries of a heartbeat beyond the first 8192, which are not read.
    """

    kind: Literal["read-complete", "heartbeat", "unknown"]
    request_ids: tuple[str, ...] = ()
    reader_count: int = 0
    reason: str = ""
    nonces: tuple[str, ...] = ()
    consumer: str = ""
    surplus: int = 0


def parse_notification(payload: bytes) -> Notification:
    """Parse a peer's notification; bytes never raise."""
    require(bytes, payload=payload)
    if len(payload) > limits.MAX_NOTIFICATION_BYTES:
        return _unknown("oversized")
    if payload.startswith(_PUSH.encode()):
        return _parse_registration(payload[len(_PUSH) :])
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return _unknown("not-utf8")
    if text.startswith(_OUR_HEARTBEAT):
        return _parse_our_heartbeat(text)
    return _parse_heartbeat(text) if text.startswith(_HEARTBEAT) else _parse_read(text)


def encode_read_complete(request_id: str, reader_count: int, *, nonce: str = "", consumer: str = "") -> bytes:
    """Return the payload that tells a producer rank that this reader is done with a request.

    Args:
        request_id: The request's id on the producer.
        reader_count: Consumer ranks that report this request to that producer rank, 1 to 65 536.
        nonce: The lease's nonce from the ticket, 1 to 64 printable ASCII characters; "" selects vLLM's form.
        consumer: Engine id of the reader, at most 512 characters; must be "" in vLLM's form.

    Raises:
        ConfigurationError: ``invalid-argument`` if the peer could not read the result back.
    """
    if [*map(type, (request_id, nonce, consumer, reader_count))] != [str, str, str, int]:
        require(str, request_id=request_id, nonce=nonce, consumer=consumer)
        require(int, reader_count=reader_count)
    if not _is_request_id(request_id) or request_id.startswith(RESERVED_PREFIXES):
        raise _unsendable("request id", request_id)
    if not 1 <= reader_count <= limits.MAX_READER_COUNT:
        raise _unsendable("reader count", str(reader_count))
    if not nonce and not consumer:
        return f"{request_id}:{reader_count}".encode()
    if _NONCE.fullmatch(nonce) is None:
        raise _unsendable("nonce", nonce)
    if not _is_text(consumer):
        raise _unsendable("consumer", consumer)
    return b"%s%s:%d" % (_OURS.encode(), msgspec.json.encode((request_id, nonce, consumer)), reader_count)


def encode_heartbeats(readers: Sequence[tuple[str, str]]) -> tuple[bytes, ...]:
    """Return the payloads that keep requests alive on a producer, few and none much longer than 8 KiB.

    Args:
        readers: (request id, nonce) pairs in any number; nonce "" selects vLLM's form, repeated pairs are sent once.

    Raises:
        ConfigurationError: ``invalid-argument`` for an id that is empty, reserved for us, not UTF-8 or longer than 4096
            bytes, or for a nonce that is not 1 to 64 printable ASCII characters.
    """
    distinct = dict.fromkeys(_require_pairs(readers))
    for request_id, nonce in distinct:
        if not _is_request_id(request_id) or request_id.startswith(_OURS):
            raise _unsendable("request id", request_id)
        if nonce and _NONCE.fullmatch(nonce) is None:
            raise _unsendable("nonce", nonce)
    plain = [request_id for request_id, nonce in distinct if not nonce]
    ours = [msgspec.json.encode(pair) for pair in distinct if pair[1]]
    alone = [f"{_VERBATIM}{request_id}".encode() for request_id in plain if "," in request_id]
    listed = [request_id.encode() for request_id in plain if "," not in request_id]
    our_bytes = len(_OUR_HEARTBEAT) + len("[]")
    return (
        *alone,
        *(_HEARTBEAT.encode() + batch for batch in _batches(listed, _TARGET_BYTES - len(_HEARTBEAT))),
        *(_OUR_HEARTBEAT.encode() + b"[" + batch + b"]" for batch in _batches(ours, _TARGET_BYTES - our_bytes)),
    )


def _require_pairs(readers: object) -> list[tuple[str, str]]:
    try:
        return msgspec.convert(readers, list[tuple[str, str]])
    except msgspec.ValidationError as error:
        raise ConfigurationError("invalid-argument", f"readers must be pairs (request id, nonce): {error}") from error


def _batches(items: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the items joined by commas, in batches of at most so many bytes or of one item."""
    batch: list[bytes] = []
    batch_bytes = 0
    for item in items:
        if batch and batch_bytes + 1 + len(item) > most_bytes:
            yield b",".join(batch)
            batch, batch_bytes = [], 0
        batch_bytes += len(item) + bool(batch)
        batch.append(item)
    if batch:
        yield b",".join(batch)


def _parse_read(text: str) -> Notification:
    request_id, colon, count = text.rpartition(":")
    if not colon:
        return _unknown("no-count")
    if _COUNT.fullmatch(count) is None or int(count) > limits.MAX_READER_COUNT:
        return _unknown("bad-count" if _is_request_id(request_id) else "bad-id")
    if request_id.startswith(_OURS):
        return _parse_our_read(request_id, int(count))
    if not _is_request_id(request_id):
        return _unknown("bad-id")
    return Notification("read-complete", (request_id,), int(count), nonces=("",))


def _parse_registration(body: bytes) -> Notification:
    sent = _decode(_registration_decoder.decode, body)
    return _unknown("push-registration", (sent.request_id,) if sent and _is_request_id(sent.request_id) else ())


def _parse_heartbeat(text: str) -> Notification:
    if text.startswith(_VERBATIM) and "," in text[len(_VERBATIM) :]:
        request_ids, surplus = [text[len(_VERBATIM) :]], 0
    else:
        request_ids = text[len(_HEARTBEAT) :].split(",", limits.MAX_HEARTBEAT_IDS)
        surplus = sum(1 + unread.count(",") for unread in request_ids[limits.MAX_HEARTBEAT_IDS :])
    read = request_ids[: limits.MAX_HEARTBEAT_IDS]
    kept = tuple(filter(_is_request_id, dict.fromkeys(read)))
    return Notification("heartbeat", kept, nonces=("",) * len(kept), surplus=surplus) if kept else _unknown("bad-id")


def _parse_our_heartbeat(text: str) -> Notification:
    found = _first_pairs(text[len(_OUR_HEARTBEAT) :])
    if found is None:
        return _unknown("bad-nonce")
    pairs, surplus = found
    kept = [pair for pair in dict.fromkeys(pairs) if _is_request_id(pair[0]) and _NONCE.fullmatch(pair[1])]
    if not kept:
        return _unknown("bad-id")
    request_ids = tuple([request_id for request_id, _ in kept])
    return Notification("heartbeat", request_ids, nonces=tuple([nonce for _, nonce in kept]), surplus=surplus)


def _first_pairs(text: str) -> tuple[list[tuple[str, str]], int] | None:
    r"""Return the first 8192 pairs of a JSON list and the number of entries after them; None if it is not a list of pairs.

    A pair has four quotes, so that of a longer text the first 8192 pairs end with its 32 768th quote: only they are read.
    Escaped quotes do not count, so that escapes are masked first: of ``[["a\"b","n"], ...`` quotes 1 to 4 are those around
    ``a\"b`` and ``n``. Reading ends at the first entry that is not a pair.
    """
    masked = text.replace("\\\\", "__").replace('\\"', "__") if "\\" in text else text
    if masked.count('"') <= 4 * limits.MAX_HEARTBEAT_IDS:
        pairs = _decode(_heartbeat_decoder.decode, text)
        return None if pairs is None else (pairs, 0)
    rest = masked.split('"', 4 * limits.MAX_HEARTBEAT_IDS)[-1]
    pairs = _decode(_heartbeat_decoder.decode, f"{text[: len(text) - len(rest)]}]]")
    return None if pairs is None or len(pairs) != limits.MAX_HEARTBEAT_IDS else (pairs, rest.count('"') // 4)


def _parse_our_read(text: str, reader_count: int) -> Notification:
    fields = _decode(_read_decoder.decode, text[len(_OURS) :])
    if fields is None or _NONCE.fullmatch(fields[1]) is None or not _is_text(fields[2]):
        return _unknown("bad-nonce")
    request_id, nonce, consumer = fields
    if not _is_request_id(request_id) or request_id.startswith(RESERVED_PREFIXES):
        return _unknown("bad-id")
    return Notification("read-complete", (request_id,), reader_count, nonces=(nonce,), consumer=consumer)


def _decode(decode: Callable[[AnyStr], T], text: AnyStr) -> T | None:
    try:
        return decode(text)
    except limits.DECODE_ERRORS:
        return None


def _is_request_id(request_id: str) -> bool:
    try:
        return 0 < len(request_id.encode()) <= limits.MAX_REQUEST_ID_BYTES
    except UnicodeEncodeError:
        return False


def _is_text(engine_id: str) -> bool:
    return len(engine_id) <= limits.MAX_ENGINE_ID_CHARS and engine_id.isprintable()


def _unsendable(name: str, value: str) -> ConfigurationError:
    return ConfigurationError("invalid-argument", f"{name} {value[:200]!r} cannot be notified")


def _unknown(reason: str, request_ids: tuple[str, ...] = ()) -> Notification:
    return Notification("unknown", request_ids, reason=reason)
