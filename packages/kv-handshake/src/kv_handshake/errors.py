"""Every way in which a handshake can fail: one code each, with the side at fault and whether a retry can help."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CODES",
    "ConfigurationError",
    "HandshakeError",
    "TransportError",
    "WireError",
    "require",
    "shortened",
    "without_frames",
]

Fault = Literal["local", "peer", "environment"]


class CodeFacts(NamedTuple):
    """Facts about a code.

    Attributes:
        fault: The side that made the mistake.
        is_retry_safe: True if the same request may succeed later, False if it will not, None if that is unknown.
        meaning: A sentence for the table in the documentation.
    """

    fault: Fault
    is_retry_safe: bool | None
    meaning: str


_FACTS: Mapping[str, tuple[Fault, bool | None, str]] = {
    # Refusals of a listener.
    "oversized-query": ("peer", False, "The query is longer than any valid query."),
    "malformed-query": ("peer", False, "The query is not one complete MessagePack array of the allowed types."),
    "wrong-arity": ("peer", False, "The query has another number of fields than its command takes."),
    "wrong-type": ("peer", False, "A rank in the query is not a non-negative integer."),
    "unknown-command": ("peer", False, "The first field of the query names no command."),
    "pipeline-stages": (
        "peer",
        False,
        "The asker reads one pipeline stage, as vLLM's own connector does, and this engine has several.",
    ),
    "context-turns": (
        "peer",
        False,
        "The asker takes every block for consecutive tokens, as vLLM's own connector does, and ranks here hold parts of blocks.",
    ),
    "unknown-rank": ("peer", None, "No metadata is served for this (pp, tp) rank."),
    "not-ready": ("peer", True, "The engine has not published its metadata yet, or has withdrawn it."),
    "rate-limited": ("peer", True, "This address asks faster than the listener allows."),
    "wrong-frames": ("peer", False, "The message has too many or too few frames for a query."),
    # Refusals of an ask, which carry its number.
    "ask-busy": ("peer", True, "The listener has as many open asks as its budget allows."),
    "ask-expired": ("peer", True, "The engine had no answer to an ask within the listener's time."),
    "ask-cancelled": ("local", True, "The asker has taken its ask back."),
    "ask-repeated": ("peer", False, "An ask of this number is open on this connection."),
    # Findings of a client in a reply.
    "refused": ("peer", None, "The peer's listener refused the query; its own code is in the context."),
    "unexpected-reply": ("peer", False, "A reply has the wrong number of frames, or answers no query."),
    "oversized-reply": ("peer", False, "A reply exceeds the size limit."),
    "malformed-envelope": ("peer", False, "The outer message of a reply does not decode."),
    "malformed-metadata": ("peer", False, "The agent metadata in an accepted envelope does not decode."),
    "invalid-metadata": ("peer", False, "The agent metadata decodes, but its values contradict each other."),
    "malformed-clock": ("peer", False, "The clock frame is not one finite MessagePack number."),
    "malformed-answer": ("peer", False, "The reply to an ask does not decode or is too long."),
    "too-many-peers": ("local", True, "As many peers are asked at once as this process has places for."),
    "ask-unsupported": ("peer", False, "The peer does not take asks: it is of an older release, or takes none now."),
    "malformed-hand-over": ("peer", False, "A message of a streamed hand-over does not decode or is out of bounds."),
    "hand-over-seal": ("peer", False, "No fleet secret has sealed a message of a streamed hand-over."),
    "hand-over-mismatch": ("peer", False, "A message of a streamed hand-over answers another question."),
    "checksum-mismatch": ("peer", True, "The agent metadata was altered on its way."),
    "rank-mismatch": ("peer", False, "The reply is about another rank than the one that was asked."),
    "engine-mismatch": ("peer", None, "Another engine answers at this address than the ticket says."),
    "generation-mismatch": ("peer", True, "The engine has registered its memory anew since the ticket was made."),
    "first-rank-refused": (
        "peer",
        False,
        "The caller refused the metadata of rank (0, 0); no other rank was asked for.",
    ),
    "hash-mismatch": ("peer", False, "The compatibility hashes differ."),
    "factors-differ": ("peer", False, "Factors that must be equal differ."),
    "protocol-range": ("peer", False, "The two protocol ranges do not overlap."),
    "capability-missing": ("peer", False, "One side requires a capability that the other does not have."),
    # The transport.
    "timed-out": ("environment", True, "The peer did not answer in time."),
    "connection-refused": ("environment", True, "Nothing accepts connections at this address."),
    "connection-lost": ("environment", True, "The connection ended before all replies had come."),
    "authentication-refused": (
        "environment",
        False,
        (
            "The connection could not be opened: no side channel at this port, keys on one side only, wrong keys, "
            "or too many connections at the peer."
        ),
    ),
    "name-unresolved": ("environment", True, "The host name has no address."),
    "recently-failed": ("environment", True, "The peer failed a moment ago and is not asked again yet."),
    "bind-failed": ("environment", None, "The listener cannot bind its address."),
    "transport-failed": ("environment", None, "The messaging library failed in a way not foreseen here."),
    "closed": ("local", True, "The client was closed before the handshake ended."),
    # The caller.
    "illegal-event": ("local", False, "The session cannot do this in its present state."),
    "invalid-argument": ("local", False, "An argument is outside its allowed range."),
    "invalid-endpoint": ("local", False, "A host or port cannot be used."),
    "invalid-factors": ("local", False, "Factors cannot be written as JSON."),
    "unknown-dialect": ("local", False, "No such version of the wire is known."),
    "missing-field": ("local", False, "A field that the dialect needs was not given."),
    "invalid-key-file": ("local", False, "A key file cannot be read or holds no key."),
    "insecure-key-file": ("local", False, "A secret key file may be read by others."),
    "invalid-recording": ("local", False, "A recording file cannot be read."),
}

CODES: Mapping[str, CodeFacts] = {code: CodeFacts(*facts) for code, facts in _FACTS.items()}


class HandshakeError(Exception):
    """Base of all errors that this package raises on purpose; its text is "message (code)".

    Attributes:
        code: Stable kebab-case name, a key of `CODES`.
        message: The problem as a sentence, without the code.
        fault: The side at fault: ``local``, ``peer`` or ``environment``.
        is_retry_safe: Whether the same request may succeed later; None if that is unknown.
        context: The numbers and names behind the text, as plain values.
    """

    def __init__(self, code: str, message: str, **context: object) -> None:
        super().__init__(message)
        facts = CODES[code]
        self.code, self.message = code, message
        self.fault: Fault = facts.fault
        self.is_retry_safe = facts.is_retry_safe
        self.context: Mapping[str, object] = MappingProxyType(context)

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.code, self.message, **self.context), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.code!r}, {self.message!r})"


def without_frames(error: HandshakeError) -> HandshakeError:
    """Return the error without the stack frames behind it and behind its causes, to be kept.

    They hold every local variable, among them the peer's reply of up to 4 MiB, until the garbage collector finds them.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


class WireError(HandshakeError):
    """A peer's message is malformed or carries an invalid value."""


class ConfigurationError(HandshakeError):
    """The caller asked for something that cannot be done."""


def require(kinds: Any, **arguments: object) -> None:  # noqa: ANN401 - abstract classes are no `type` to mypy
    """Raise ``invalid-argument`` for an argument of a type that is not among these; a bool is not a number."""
    for name, value in arguments.items():
        if not isinstance(value, kinds) or isinstance(value, bool):
            accepted = cast("tuple[type, ...]", kinds if isinstance(kinds, tuple) else (kinds,))
            names = " or ".join(each.__name__ for each in accepted)
            problem = f"{name} is of type {type(value).__name__}, must be {names}"
            raise ConfigurationError("invalid-argument", problem, name=name)


class TransportError(HandshakeError):
    """The network or the machine failed."""


_SHORT_CHARS = 200


def shortened(text: str, most_chars: int = _SHORT_CHARS) -> str:
    """Return a printable text of at most so many characters, and a note of its length if it was longer.

    Characters that are not printable become escapes: a newline would fake a log line, and an escape sequence would reach a
    terminal.
    """
    kept = text[:most_chars]
    if not kept.isprintable():
        kept = "".join(char if char.isprintable() else repr(char)[1:-1] for char in kept)
    return kept if len(text) <= most_chars else f"{kept}... ({len(text)} characters)"
