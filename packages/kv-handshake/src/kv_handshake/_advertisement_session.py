"""The question for one listener's advertisement, as a request and a session that the client loop can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_handshake._advertisement import Advertisement
from kv_handshake._errors import ConfigurationError, HandshakeError, WireError, without_frames
from kv_handshake._queries import ADVERTISEMENT_QUERY, Rank
from kv_handshake._reading import decode_envelope
from kv_handshake._states import FINAL_STATES, INITIAL_STATE, Cause, IllegalEvent, State, next_step
from kv_handshake._text import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake._endpoint import Endpoint

__all__ = ["AdvertisementRequest", "AdvertisementSession"]


@final
@dataclass(frozen=True, slots=True)
class AdvertisementRequest:
    """A request for one listener's advertisement."""

    endpoint: Endpoint

    def new_session(self) -> AdvertisementSession:
        """Return a session that asks for it."""
        return AdvertisementSession()


@final
class AdvertisementSession:
    """Asks one of our own listeners for its advertisement: one query, one reply of one frame of JSON."""

    missing_ranks: tuple[Rank, ...] = ()

    def __init__(self) -> None:
        self._state: State = INITIAL_STATE
        self.error: HandshakeError | None = None
        self.data = b""
        self._advertisement: Advertisement | None = None

    @property
    def is_over(self) -> bool:
        """Whether the session has ended."""
        return self._state in FINAL_STATES

    @property
    def queries_left(self) -> int:
        """1 until the query is sent."""
        return int(self._state == INITIAL_STATE)

    @property
    def queries_outstanding(self) -> int:
        """1 between the query and the reply."""
        return int(self._state in ("waiting", "receiving"))

    @property
    def advertisement(self) -> Advertisement:
        """The advertisement.

        Raises:
            ConfigurationError: ``illegal-event`` before the session is done.
        """
        if self._advertisement is None:
            raise ConfigurationError("illegal-event", f"no advertisement: the session is {self._state}")
        return self._advertisement

    def next_query(self, *, now_s: float) -> bytes:
        """Return the query."""
        del now_s
        self._step("query")
        return ADVERTISEMENT_QUERY

    def receive_message(self, frames: Sequence[bytes], *, now_s: float) -> None:
        """Take in the reply."""
        del now_s
        if self.is_over or not self._step("bytes"):
            return
        self.data = frames[0] if frames else b""
        try:
            self._advertisement = self._read()
        except HandshakeError as error:
            self.fail(error)
        else:
            self._step("reply")

    def fail(self, error: HandshakeError) -> None:
        """End the session with a reason; the first one stays."""
        if not self.is_over:
            self.error = without_frames(error)
            self._step("fault")

    def _read(self) -> Advertisement:
        if not self.data:
            raise WireError("unexpected-reply", "an empty reply")
        if self.data.startswith(b"{"):
            return Advertisement.decode(self.data)
        refusal = decode_envelope(self.data).refusal
        reason = shortened(refusal.code) if refusal is not None else "no advertisement in its reply"
        raise WireError("refused", f"the peer refused: {reason}")

    def _step(self, cause: Cause) -> bool:
        step = next_step(self._state, cause, "none")
        if isinstance(step, IllegalEvent):
            self.fail(ConfigurationError("illegal-event", f"a session that is {step.state} cannot take {step.cause}"))
            return False
        self._state = step
        return True
