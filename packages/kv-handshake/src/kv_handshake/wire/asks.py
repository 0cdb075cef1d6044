"""Messages of streamed hand-overs: asks and their replies as frames, and the questions and answers in their payloads.

An ask is a query with a payload of the engine's own, whose reply may come later and in another order. It carries a number that
its asker chooses, and its reply carries the same number. So one connection may have many open asks at once, beside other
queries, whose replies still come in the order of the queries.

The frame of an ask begins with fixed bytes, the shortest encoding of the array's head and of the command. They tell a listener,
before it decodes anything, which frames may be longer than other queries.

The payload of a hand-over is an array of a seal and a body. The body is a map whose key ``kind`` says which message it is:
QUESTION, OFFER, FINAL or NO. The seal is HMAC-SHA-256 under a fleet secret over the 11 characters ``kv-stream-1``, one zero byte
and the body as it came: these messages go from engine to engine, so no intermediary rewrites them. Without secrets the seal is
empty. An engine with secrets refuses messages that none of them has sealed; an engine without secrets ignores seals.

An answer repeats the id, the number and the nonce of its question, so an answer to another question, however old, does not fit.
"""

from __future__ import annotations

import hmac
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast, final

import msgspec
from msgspec import Meta

from kv_handshake.errors import CODES, ConfigurationError, WireError, shortened
from kv_handshake.wire.limits import DECODE_ERRORS, MAX_ASK_BYTES, MAX_ASK_REPLY_BYTES, MAX_QUERY_BYTES, NUMBER_END

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "ASK_CAPABILITY",
    "answer_payload",
    "encode_answer",
    "encode_ask",
    "encode_ask_refusal",
    "encode_cancel",
    "is_ask",
    "parse_answer",
    "parse_ask",
    "question_payload",
    "read_answer",
    "read_question",
]

ASK_CAPABILITY = "ask"
"""Announced in the envelopes of an engine whose listener takes asks. Never send asks without this:
vLLM's own listener crashes on them."""

_ASK = b"ask"
_CANCEL = b"cancel_ask"
_HEADS = (b"\x93\xc4\x03ask", b"\x92\xc4\x0acancel_ask")
_OVERHEAD_BYTES = 32
_LONGEST_CODE = 64
_OTHER_CODE = "refused"
"""Replaces every refusal code that this release does not know, so that no code carries a peer's own words."""
_encode = msgspec.msgpack.Encoder().encode


class Ask(NamedTuple):
    """A parsed ask or cancellation.

    Attributes:
        number: Chosen by the asker, 1 to 2**53 - 1.
        payload: The engine's own bytes; None cancels the ask of this number.
    """

    number: int
    payload: bytes | None


class AskReply(NamedTuple):
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
    raise WireError("malformed-answer", "answer is not an array of 'ask', a number, and bytes or a code and a time")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value < NUMBER_END


def _check(number: int, payload: bytes, most: int) -> None:
    if not _is_number(number) or len(payload) > most:
        raise ConfigurationError(
            "invalid-argument",
            f"ask {number} of {len(payload)} bytes; numbers are 1 to 2**53 - 1, bytes at most {most}",
        )


_TAG: Final = b"kv-stream-1\0"
_Hex32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Exact = Annotated[int, Meta(ge=1, lt=1 << 53)]
_Slot = Annotated[int, Meta(ge=0, lt=1 << 24)]
_RequestId = Annotated[str, Meta(min_length=1, max_length=512)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Keys of every message.

    Attributes:
        hand_over_id: The id that both engines have from the router.
        number: The question's number, by which the asker's scheduler recognises late answers.
        nonce: 128 random bits of the question.
    """

    hand_over_id: _Hex32 = msgspec.field(name="id")
    number: _Exact
    nonce: _Hex32


@final
class Question(_Message, frozen=True, kw_only=True, tag="question"):
    """A consumer asks for a hand-over.

    Attributes:
        digest: Digest of the consumer's own prompt.
        tokens: Tokens under it.
        wants_final: Whether only the whole ticket is of use.
    """

    digest: _Digest
    tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    wants_final: bool


@final
class Offer(_Message, frozen=True, kw_only=True, tag="offer"):
    """The prompt is being computed, and may be read meanwhile.

    Attributes:
        request_id: The producer's own.
        slot: Where its words lie.
        generation: Value that the fence word must show in the end.
        tag: Tag of the progress word and the table; the low 32 bits of the generation.
        ticket: The plain ticket without block ids, as JSON.
    """

    request_id: _RequestId
    slot: _Slot
    generation: _Exact
    tag: Annotated[int, Meta(ge=0, lt=1 << 32)]
    ticket: bytes


@final
class Final_(_Message, frozen=True, kw_only=True, tag="final"):  # noqa: N801 - `Final` is typing's
    """The prompt is whole.

    Attributes:
        request_id: The producer's own.
        slot: Where its fence word lies.
        generation: Value that it must show.
        ticket: The plain ticket, as JSON.
    """

    request_id: _RequestId
    slot: _Slot
    generation: _Exact
    ticket: bytes


@final
class No(_Message, frozen=True, kw_only=True, omit_defaults=True, tag="no"):
    """A refusal.

    Attributes:
        reason: Why; after ``unknown-id`` and ``busy`` another question makes sense.
        media: After ``digest-mismatch`` only: how many images, videos and sounds the prompt has, and its digest without them.
    """

    reason: Literal["digest-mismatch", "unknown-id", "withdrawn", "busy", "not-streamed"]
    media: tuple[Annotated[int, Meta(ge=1, le=1 << 20)], _Digest] | None = None


_Answer: TypeAlias = Offer | Final_ | No
_tickets = msgspec.json.Decoder(dict[str, object])
_payloads = msgspec.msgpack.Decoder(tuple[bytes, bytes])
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)


def question_payload(question: Mapping[str, object], secrets: Sequence[bytes]) -> bytes:
    """Return the payload of an ask.

    Args:
        question: ``hand_over_id``, ``number``, ``nonce``, ``digest``, ``tokens`` and ``wants_final``.
        secrets: Fleet secrets; the first one seals.

    Raises:
        ConfigurationError: ``invalid-argument`` for values that no peer takes.
    """
    return _payload(_converted({**question, "kind": "question"}, Question), secrets, MAX_ASK_BYTES)


def answer_payload(question: Mapping[str, object], answer: Mapping[str, object], secrets: Sequence[bytes]) -> bytes:
    """Return the payload of an answer.

    Args:
        question: The question as `read_question` returned it.
        answer: ``kind`` (``offer``, ``final`` or ``no``), and the other keys of that kind; ``ticket`` is a mapping.
        secrets: Fleet secrets; the first one seals.

    Raises:
        ConfigurationError: ``invalid-argument`` for values that no peer takes.
    """
    values = {**answer, **{key: question[key] for key in ("hand_over_id", "number", "nonce")}}
    if "ticket" in values:
        try:
            values["ticket"] = msgspec.json.encode(values["ticket"])
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError("invalid-argument", f"the ticket cannot be written as JSON: {error}") from error
    return _payload(_converted(values, cast("Any", _Answer)), secrets, MAX_ASK_REPLY_BYTES)


def read_question(payload: bytes, secrets: Sequence[bytes]) -> dict[str, object]:
    """Return the question in an ask's payload, by attribute names.

    Raises:
        WireError: ``malformed-hand-over`` or ``hand-over-seal``.
    """
    return _values(_opened(payload, secrets, _questions))


def read_answer(payload: bytes, question: Mapping[str, object], secrets: Sequence[bytes]) -> dict[str, object]:
    """Return the answer to a question: ``kind`` and the values of that kind by attribute names; ``ticket`` is a dict.

    Raises:
        WireError: ``malformed-hand-over``, ``hand-over-seal`` or ``hand-over-mismatch``.
    """
    answer = _opened(payload, secrets, _answers)
    for name in ("hand_over_id", "number", "nonce"):
        if getattr(answer, name) != question[name]:
            raise WireError("hand-over-mismatch", f"the answer is to another question: its {name} differs")
    values = {**_values(answer), "kind": str(answer.__struct_config__.tag)}
    if not isinstance(answer, No):
        try:
            values["ticket"] = _tickets.decode(answer.ticket)
        except DECODE_ERRORS as error:
            size = len(answer.ticket)
            raise WireError("malformed-hand-over", f"ticket of {size} bytes is not a JSON object: {error}") from error
        if not answer.request_id.isprintable():
            raise WireError("malformed-hand-over", "the answer's request id is not printable")
    return values


def _payload(message: msgspec.Struct, secrets: Sequence[bytes], most: int) -> bytes:
    body = _encode(message)
    seal = hmac.digest(secrets[0], _TAG + body, "sha256") if secrets else b""
    payload = _encode((seal, body))
    if len(payload) > most:
        raise ConfigurationError("invalid-argument", f"a message of {len(payload)} bytes; at most {most} are sent")
    return payload


def _converted(values: Mapping[str, object], kind: type[msgspec.Struct]) -> msgspec.Struct:
    named = {("id" if key == "hand_over_id" else key): value for key, value in values.items()}
    try:
        return msgspec.convert(named, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise ConfigurationError("invalid-argument", f"no peer would take this message: {error}") from error


def _opened(payload: bytes, secrets: Sequence[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:  # noqa: ANN401
    try:
        seal, body = _payloads.decode(payload)
    except DECODE_ERRORS as error:
        raise WireError("malformed-hand-over", f"message of {len(payload)} bytes does not decode: {error}") from error
    if secrets and not any(hmac.compare_digest(hmac.digest(key, _TAG + body, "sha256"), seal) for key in secrets):
        raise WireError(
            "hand-over-seal",
            "no fleet secret of this engine has sealed the message" if seal else "the message has no seal",
        )
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        shown = shortened(str(error))  # the error quotes an unknown key as the peer wrote it
        raise WireError("malformed-hand-over", f"message of {len(body)} bytes does not decode: {shown}") from error


def _values(message: msgspec.Struct) -> dict[str, object]:
    return dict(msgspec.structs.asdict(message))
