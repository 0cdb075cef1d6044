"""The asking side of one peer: its connection, its open asks, and the queries to send. No input or output.

The first query of each connection asks for the metadata of rank (0, 0), which every listener answers. The envelope tells whether
the peer takes asks; only then are asks sent. So no ask ever reaches vLLM's own listener, which would crash on it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, final

from kv_handshake.errors import HandshakeError, TransportError, WireError, shortened
from kv_handshake.stream.messages import ASK_CAPABILITY, encode_ask, encode_cancel, parse_answer
from kv_handshake.wire.dialects import NEWEST_DIALECT, dialect_of
from kv_handshake.wire.messages import usable_capabilities
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake.core.endpoint import Endpoint

__all__ = ["AskSession", "OpenAsk"]

_FIRST_QUERY = encode_query((0, 0), dialect_of(NEWEST_DIALECT))
_MOST_SENDINGS = 2
_NOT_UNDERSTOOD = frozenset({"unknown-command", "oversized-query", "wrong-arity"})


@final
class OpenAsk:
    """An ask without a reply.

    Attributes:
        number: Its number, in this process never used twice.
        payload: The engine's own bytes.
        on_reply: Called once with (code, payload).
        deadline_s: Time at which it ends.
        sendings: Connections on which it was sent.
    """

    __slots__ = ("deadline_s", "number", "on_reply", "payload", "sendings")

    def __init__(self, number: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float) -> None:
        self.number = number
        self.payload = payload
        self.on_reply = on_reply
        self.deadline_s = deadline_s
        self.sendings = 0


@final
class AskSession:
    """Open asks at one peer, over one connection after the other.

    Attributes:
        endpoint: The peer's listener.
        open: Open asks by number.
        error: Why this connection must be closed, None while it is good.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.open: dict[int, OpenAsk] = {}
        self.error: HandshakeError | None = None
        self._state: Literal["closed", "greeting", "greeted"] = "closed"
        self._unsent: deque[bytes] = deque()
        # Replies that may still come to asks cancelled on this connection: a refusal, and an answer that crossed the cancel.
        self._late_replies = 0

    @property
    def is_greeted(self) -> bool:
        """Whether the peer has said over this connection that it takes asks."""
        return self._state == "greeted"

    def add(self, ask: OpenAsk) -> None:
        """Add an ask, and send it if the peer takes asks."""
        self.open[ask.number] = ask
        if self._state == "greeted":
            self._send(ask)

    def cancel(self, number: int) -> None:
        """Forget an ask, and cancel it at the peer if it was sent."""
        ask = self.open.pop(number, None)
        if ask is not None and ask.sendings and self._state == "greeted":
            self._unsent.append(encode_cancel(number))
            self._late_replies += 2

    def connected(self) -> None:
        """Start over on a new connection."""
        self.error = None
        self._state = "greeting"
        self._unsent = deque((_FIRST_QUERY,))
        self._late_replies = 0

    def disconnected(self) -> list[OpenAsk]:
        """Note the end of a connection; return the asks that end with it, because a second connection has failed them, too."""
        self._state = "closed"
        self._unsent.clear()
        return self.take([each for each in self.open.values() if each.sendings >= _MOST_SENDINGS])

    def take(self, asks: Sequence[OpenAsk]) -> list[OpenAsk]:
        """Return these asks, and forget them."""
        return [self.open.pop(each.number) for each in asks]

    def next_query(self) -> bytes | None:
        """Return the next query to send, None for none now."""
        return self._unsent.popleft() if self._unsent else None

    def receive(self, frames: Sequence[bytes]) -> tuple[OpenAsk, str, bytes] | None:
        """Process a reply; return (ask, code, payload) if it ends an ask. A peer's fault is stored in `error`."""
        try:
            if self._state == "greeting":
                self._greeted(frames)
                return None
            return self._answered(frames)
        except HandshakeError as error:
            self.error = error
            return None

    def _greeted(self, frames: Sequence[bytes]) -> None:
        envelope = decode_envelope(frames[0] if frames else b"")
        refusal = envelope.refusal
        if refusal is not None:
            raise TransportError(
                "refused", f"the peer refused: {shortened(refusal.code)}", retry_after_s=refusal.retry_after_s
            )
        if ASK_CAPABILITY not in usable_capabilities(envelope.capabilities):
            raise WireError("ask-unsupported", "the peer announces no asks in its envelope")
        self._state = "greeted"
        for ask in self.open.values():
            self._send(ask)

    def _answered(self, frames: Sequence[bytes]) -> tuple[OpenAsk, str, bytes] | None:
        if len(frames) != 1:
            raise WireError("unexpected-reply", f"the reply to an ask has {len(frames)} frames")
        if frames[0][:1] not in (b"\x93", b"\x94"):
            refusal = decode_envelope(frames[0]).refusal
            code = refusal.code if refusal is not None else ""
            if code in _NOT_UNDERSTOOD:
                raise WireError("ask-unsupported", f"the peer does not know asks: {shortened(code)}")
            raise WireError("unexpected-reply", f"neither answer nor refusal: {shortened(code) or 'an envelope'}")
        reply = parse_answer(frames[0])
        ask = self.open.pop(reply.number, None)
        if ask is not None:
            return ask, reply.code, reply.payload
        if not self._late_replies:
            raise WireError("unexpected-reply", f"reply to unknown ask {reply.number}")
        self._late_replies -= 1
        return None

    def _send(self, ask: OpenAsk) -> None:
        ask.sendings += 1
        self._unsent.append(encode_ask(ask.number, ask.payload))
