"""The open asks at one peer, over one connection after the other. No input or output.

The first query of each connection asks for the metadata of rank (0, 0), which every listener answers. The envelope tells whether
the peer takes asks; only then are asks sent. So no ask ever reaches vLLM's own listener, which would crash on it.

When a connection ends, its asks move to the next one, once. When the peer cannot be reached, all its asks end with the reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_handshake.errors import HandshakeError, TransportError, WireError, shortened, without_frames
from kv_handshake.wire.asks import ASK_CAPABILITY, encode_ask, encode_cancel, parse_answer
from kv_handshake.wire.dialects import NEWEST_DIALECT, dialect_of
from kv_handshake.wire.messages import usable_capabilities
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_envelope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_handshake.core.endpoint import Endpoint

__all__ = ["OpenAsk", "PeerAsks"]

_FIRST_QUERY = encode_query((0, 0), dialect_of(NEWEST_DIALECT))
_MOST_SENDINGS = 2
_NOT_UNDERSTOOD = frozenset({"unknown-command", "oversized-query", "wrong-arity"})
_IDLE_S = 30.0
"""A connection without open asks is closed after this, below the 60 s after which a listener closes one without queries."""


@final
@dataclass(slots=True)
class OpenAsk:
    """An ask without a reply.

    Attributes:
        number: Its number, in this process never used twice.
        payload: The engine's own bytes.
        on_reply: Called once with (code, payload).
        deadline_s: Time at which it ends.
        sendings: Connections on which it was sent.
    """

    number: int
    payload: bytes
    on_reply: Callable[[str, bytes], None]
    deadline_s: float
    sendings: int = 0


@final
class PeerAsks:
    """Decides about the asks at one peer: what to send, when to give the peer up, the end.

    Args:
        endpoint: The peer's listener.
        on_end: Called once, with the error if the peer could not be asked, when the last ask has ended.
        attempt_s: Longest wait for the first reply on a connection.
        start_s: The present time.

    Attributes:
        open: Open asks by number.
        heard_s: Time of the attempt's begin; infinite once the peer has said that it takes asks, since an answer may take long.
        error: Why the connection must be closed; None while it is good.
        is_over: Whether the connection must be closed.
    """

    def __init__(
        self, endpoint: Endpoint, on_end: Callable[[HandshakeError | None], None], *, attempt_s: float, start_s: float
    ) -> None:
        self.endpoint = endpoint
        self.open: dict[int, OpenAsk] = {}
        self.error: HandshakeError | None = None
        self.attempts = 0
        self.next_attempt_s = self.heard_s = self._used_s = start_s
        self._on_end = on_end
        self._attempt_s = attempt_s
        self._is_waiting = True
        self._is_greeted = False
        self.is_over = False
        self._unsent: deque[bytes] = deque()
        # Replies that may still come to asks cancelled on this connection: a refusal, and an answer that crossed the cancel.
        self._late_replies = 0

    @property
    def is_idle(self) -> bool:
        """Whether no ask is open, so that another peer may have the place."""
        return not self.open

    @property
    def due_s(self) -> float:
        """Time of the next deadline that `check_time` handles."""
        if self._is_waiting:
            return min((ask.deadline_s for ask in self.open.values()), default=0.0)
        asks_s = min((ask.deadline_s for ask in self.open.values()), default=self._used_s + _IDLE_S)
        return min(asks_s, self.heard_s + self._attempt_s)

    def add(self, ask: OpenAsk, now_s: float) -> None:
        """Add an ask, and send it if the peer takes asks."""
        self._used_s = now_s
        self.open[ask.number] = ask
        if self._is_greeted:
            self._send(ask)

    def cancel(self, number: int) -> None:
        """Forget an ask, and cancel it at the peer if it was sent."""
        ask = self.open.pop(number, None)
        if ask is not None and ask.sendings and self._is_greeted:
            self._unsent.append(encode_cancel(number))
            self._late_replies += 2

    def begin_attempt(self, now_s: float) -> None:
        """Start over on a new connection."""
        self.attempts += 1
        self._is_waiting = False
        self.heard_s = now_s
        self.reconnect()

    def reconnect(self) -> None:
        """Start over on another connection of the same attempt."""
        self._is_greeted = False
        self._unsent = deque((_FIRST_QUERY,))
        self._late_replies = 0

    def next_query(self, _now_s: float) -> bytes | None:
        """Return the next query to send, None for none now."""
        return self._unsent.popleft() if self._unsent else None

    def receive(self, frames: Sequence[bytes], _now_s: float) -> None:
        """Process a reply. A peer's fault is stored in `error`."""
        try:
            if self._is_greeted:
                self._take_reply(frames)
            else:
                self._take_greeting(frames)
        except HandshakeError as error:
            self.fail_with(error)

    def check_time(self, now_s: float) -> None:
        """End the asks that have waited too long, and the connection if the peer is silent or no longer asked."""
        late = [ask for ask in self.open.values() if now_s >= ask.deadline_s]
        for ask in late:
            self.cancel(ask.number)
            ask.on_reply("timed-out" if self.attempts else "too-many-peers", b"")
        if self._is_waiting:
            self.is_over = not self.open
        elif now_s >= self.heard_s + self._attempt_s or (late and not self.open and not self._is_greeted):
            self.fail("timed-out", f"no reply from {self.endpoint}", now_s)
        elif not self.open and now_s >= self._used_s + _IDLE_S:
            self.is_over = True

    def fail(self, code: str, problem: str, _now_s: float) -> None:
        """Note that the connection cannot be used."""
        self.fail_with(TransportError(code, problem))

    def fail_with(self, error: HandshakeError) -> None:
        """Note that the connection cannot be used; the first reason stays."""
        self.error = self.error or without_frames(error)
        self.is_over = True

    def plan_retry(self, now_s: float, _chance: float) -> bool:
        """Return whether open asks move to another connection: those that only one connection has failed."""
        self._is_waiting = True
        if self.error is None or self.error.code != "connection-lost" or not self._is_greeted:
            return False
        self._end_asks([ask for ask in self.open.values() if ask.sendings >= _MOST_SENDINGS], "connection-lost")
        self.error = None
        self.is_over = self._is_greeted = False
        self.next_attempt_s = now_s
        return bool(self.open)

    def end(self, _now_s: float) -> None:
        """End all asks with the code of the error."""
        if self.error is not None:
            self._end_asks(list(self.open.values()), self.error.code)
        self._on_end(self.error)

    def _end_asks(self, asks: Sequence[OpenAsk], code: str) -> None:
        for ask in asks:
            del self.open[ask.number]
            ask.on_reply(code, b"")

    def _take_greeting(self, frames: Sequence[bytes]) -> None:
        envelope = decode_envelope(frames[0] if frames else b"")
        refusal = envelope.refusal
        if refusal is not None:
            raise TransportError("refused", f"the peer refused: {shortened(refusal.code)}")
        if ASK_CAPABILITY not in usable_capabilities(envelope.capabilities):
            raise WireError("ask-unsupported", "the peer announces no asks in its envelope")
        self._is_greeted = True
        self.heard_s = float("inf")
        for ask in self.open.values():
            self._send(ask)

    def _take_reply(self, frames: Sequence[bytes]) -> None:
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
            ask.on_reply(reply.code, reply.payload)
        elif self._late_replies:
            self._late_replies -= 1
        else:
            raise WireError("unexpected-reply", f"reply to unknown ask {reply.number}")

    def _send(self, ask: OpenAsk) -> None:
        ask.sendings += 1
        self._unsent.append(encode_ask(ask.number, ask.payload))
