"""Asks: queries with a payload of the engine's own, whose replies may come later and in another order.

An ask carries a number that its asker chooses, and its reply carries the same number. So one connection may have many open asks
at once, beside other queries, whose replies still come in the order of the queries.

The frame of an ask begins with fixed bytes, the shortest encoding of the array's head and of the command. They tell a listener,
before it decodes anything, which frames may be longer than other queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast, final

import msgspec

from kv_handshake._decoding import DECODE_ERRORS
from kv_handshake._errors import CODES, ConfigurationError, WireError
from kv_handshake._limits import MAX_ASK_BYTES, MAX_ASK_REPLY_BYTES, MAX_QUERY_BYTES, NUMBER_END

__all__ = [
    "ASK_CAPABILITY",
    "Ask",
    "AskReply",
    "encode_answer",
    "encode_ask",
    "encode_ask_refusal",
    "encode_cancel",
    "is_ask",
    "parse_answer",
    "parse_ask",
]

ASK_CAPABILITY = "ask"
"""Announced in the envelopes of an engine whose listener takes asks. Send asks to no other: vLLM's own listener dies on them."""

_ASK = b"ask"
_CANCEL = b"cancel_ask"
_HEADS = (b"\x93\xc4\x03ask", b"\x92\xc4\x0acancel_ask")
_OVERHEAD_BYTES = 32
_LONGEST_CODE = 64
_OTHER_CODE = "refused"
"""Replaces every refusal code that this release does not know, so that no code carries a peer's own words."""
_encode = msgspec.msgpack.Encoder().encode


@final
@dataclass(frozen=True, slots=True)
class Ask:
    """A parsed ask or cancellation.

    Attributes:
        number: Chosen by the asker, 1 to 2**53 - 1.
        payload: The engine's own bytes; None cancels the ask of this number.
    """

    number: int
    payload: bytes | None


@final
@dataclass(frozen=True, slots=True)
class AskReply:
    """A parsed reply to an ask.

    Attributes:
        number: The ask's.
        payload: The engine's answer; empty in a refusal.
        code: Why there is no answer, a key of `CODES`; empty if there is one.
        retry_after_s: Earliest sensible next try after a refusal, in seconds.
    """

    number: int
    payload: bytes = b""
    code: str = ""
    retry_after_s: float = 0.0


def is_ask(frame: bytes) -> bool:
    """Return whether a query is an ask or a cancellation, by its first bytes alone."""
    return frame.startswith(_HEADS)


def encode_ask(number: int, payload: bytes) -> bytes:
    """Return the query that carries an ask.

    Raises:
        ConfigurationError: ``invalid-argument`` for a number or a payload that no listener takes.
    """
    _check(number, payload, MAX_ASK_BYTES)
    return _encode((_ASK, number, payload))


def encode_cancel(number: int) -> bytes:
    """Return the query that cancels an ask."""
    return _encode((_CANCEL, number))


def encode_answer(number: int, payload: bytes) -> bytes:
    """Return the reply with an answer.

    Raises:
        ConfigurationError: ``invalid-argument`` for a payload that no asker takes.
    """
    _check(number, payload, MAX_ASK_REPLY_BYTES)
    return _encode((_ASK, number, payload))


def encode_ask_refusal(number: int, code: str, *, retry_after_s: float = 0.0) -> bytes:
    """Return the reply that refuses an ask."""
    return _encode((_ASK, number, code, float(retry_after_s)))


def parse_ask(frame: bytes) -> Ask:
    """Parse a query for which `is_ask` holds.

    Raises:
        WireError: ``oversized-query``, ``malformed-query`` or ``wrong-type``.
    """
    most = MAX_ASK_BYTES + _OVERHEAD_BYTES if frame.startswith(_HEADS[0]) else MAX_QUERY_BYTES
    if len(frame) > most:
        raise WireError("oversized-query", f"ask of {len(frame)} bytes; at most {most} are read")
    try:
        fields: Any = msgspec.msgpack.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("malformed-query", f"ask of {len(frame)} bytes does not decode: {error}") from error
    _, number, *rest = cast("list[object]", fields)
    payload = rest[0] if rest else None
    if not _is_number(number) or not (not rest or (isinstance(payload, bytes) and len(payload) <= MAX_ASK_BYTES)):
        raise WireError("wrong-type", f"an ask has a number from 1 and at most {MAX_ASK_BYTES} bytes of its own")
    return Ask(cast("int", number), cast("bytes | None", payload))


def parse_answer(frame: bytes) -> AskReply:
    """Parse a reply to an ask.

    Raises:
        WireError: ``malformed-answer``.
    """
    if len(frame) > MAX_ASK_REPLY_BYTES + _OVERHEAD_BYTES:
        raise WireError("malformed-answer", f"answer of {len(frame)} bytes; at most {MAX_ASK_REPLY_BYTES} are read")
    try:
        fields: Any = msgspec.msgpack.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("malformed-answer", f"answer of {len(frame)} bytes does not decode: {error}") from error
    if isinstance(fields, list):
        match cast("list[object]", fields):
            case [b"ask", int() as number, bytes() as payload] if _is_number(number):
                return AskReply(number, payload)
            case [b"ask", int() as number, str() as code, float() as wait_s] if _is_number(number):
                if 0 < len(code) <= _LONGEST_CODE and math.isfinite(wait_s) and wait_s >= 0:
                    return AskReply(number, code=code if code in CODES else _OTHER_CODE, retry_after_s=wait_s)
            case _:
                pass
    raise WireError("malformed-answer", "answer is no array of 'ask', a number, and bytes or a code and a time")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value < NUMBER_END


def _check(number: int, payload: bytes, most: int) -> None:
    if not _is_number(number) or len(payload) > most:
        raise ConfigurationError(
            "invalid-argument",
            f"ask {number} of {len(payload)} bytes; numbers are 1 to 2**53 - 1, bytes at most {most}",
        )
