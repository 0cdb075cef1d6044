"""Asking rank (0, 0) alone, and the other ranks on the same connection once the caller agrees.

A listener of vLLM itself ends on a query for a rank that it does not have, and every engine has rank (0, 0). So a caller that is
not sure of an engine's size looks at the metadata of that rank first. The rule belongs to the session, so that every attempt
keeps it: the first attempt, an attempt at another address or with another key, a retry, and a background attempt. An engine that
restarts smaller ends the connection, and the next attempt begins with rank (0, 0) again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, final

from kv_handshake._errors import HandshakeError, WireError, without_frames
from kv_handshake._text import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake._endpoint import Endpoint
    from kv_handshake._messages import AgentMetadata
    from kv_handshake._policy import Verdict
    from kv_handshake._queries import Rank
    from kv_handshake._session import ClientSession
    from kv_handshake._task import HandshakeRequest

__all__ = ["FirstRankRequest", "FirstRankSession"]

_FIRST: Rank = (0, 0)


@final
@dataclass(frozen=True, slots=True)
class FirstRankRequest:
    """A request whose attempts ask for rank (0, 0) first.

    Attributes:
        whole: The request for all ranks.
        check: Called with the metadata of rank (0, 0); an exception ends the handshake before another rank is asked for.

    Raises:
        ConfigurationError: As `HandshakeRequest.new_session`, before anything is sent.
    """

    whole: HandshakeRequest
    check: Callable[[AgentMetadata], None]

    def __post_init__(self) -> None:
        self.whole.new_session()  # once: 4096 ranks take some milliseconds, and a forged ticket may name so many

    @property
    def endpoint(self) -> Endpoint:
        """Host and port of the listener."""
        return self.whole.endpoint

    def new_session(self) -> FirstRankSession:
        """Return a session that asks for the first rank."""
        return FirstRankSession(self)


@final
class FirstRankSession:
    """Two sessions on one connection, one after the other: rank (0, 0), then the ranks that are wanted besides."""

    def __init__(self, request: FirstRankRequest) -> None:
        self._request = request
        self._first = replace(request.whole, question=replace(request.whole.question, ranks=(_FIRST,))).new_session()
        self._rest: ClientSession | None = None
        self._refusal: HandshakeError | None = None

    @property
    def _present(self) -> ClientSession:
        return self._rest or self._first

    @property
    def _wanted(self) -> tuple[Rank, ...]:
        return self._request.whole.question.ranks

    @property
    def is_over(self) -> bool:
        """Whether the session has ended: every rank is known, or there is an error."""
        return self.error is not None or (self._present.is_over and not self.missing_ranks)

    @property
    def error(self) -> HandshakeError | None:
        """The error that ended it early."""
        return self._refusal or self._present.error

    @property
    def queries_left(self) -> int:
        """Ranks that may be asked for now; the others wait for the answer of rank (0, 0)."""
        return 0 if self._refusal is not None else self._present.queries_left

    @property
    def queries_outstanding(self) -> int:
        """Queries without a reply."""
        return self._present.queries_outstanding

    @property
    def missing_ranks(self) -> tuple[Rank, ...]:
        """Ranks without an answer."""
        if self._rest is not None:
            return self._rest.missing_ranks
        return (*self._first.missing_ranks, *(rank for rank in self._wanted if rank != _FIRST))

    @property
    def peers(self) -> Mapping[Rank, AgentMetadata]:
        """Metadata of the wanted ranks that have answered so far, by (pp, tp)."""
        answers = {**self._first.peers, **(self._rest.peers if self._rest is not None else {})}
        return MappingProxyType({rank: answers[rank] for rank in self._wanted if rank in answers})

    @property
    def verdict(self) -> Verdict:
        """The comparison with the peer that answered last."""
        return self._present.verdict

    @property
    def _nearest(self) -> ClientSession:
        """The session with the shortest round trip."""
        return self._first if self._rest is None or self._first.rtt_s <= self._rest.rtt_s else self._rest

    @property
    def rtt_s(self) -> float:
        """Shortest round trip so far, seconds."""
        return self._nearest.rtt_s

    @property
    def clock_offset_s(self) -> float | None:
        """Peer's clock minus ours at the shortest round trip, seconds; None in dialects without a clock frame."""
        return self._nearest.clock_offset_s

    def next_query(self, *, now_s: float) -> bytes:
        """Return the next query."""
        return self._present.next_query(now_s=now_s)

    def receive_message(self, frames: Sequence[bytes], *, now_s: float) -> None:
        """Take in one reply."""
        self._present.receive_message(frames, now_s=now_s)
        if self._rest is None and _FIRST in self._first.peers and self._refusal is None:
            self._go_on(self._first.peers[_FIRST])

    def fail(self, error: HandshakeError) -> None:
        """End the session with a reason; the first one stays."""
        if not self.is_over:
            self._present.fail(error)
            self._refusal = self.error or without_frames(error)

    def _go_on(self, first: AgentMetadata) -> None:
        """Begin to ask for the other ranks, of the same life of the same engine, if the caller agrees."""
        try:
            self._request.check(first)
        except Exception as error:  # noqa: BLE001 - the caller's, whatever a peer's metadata provokes
            code, text = "first-rank-refused", f"the metadata of rank {_FIRST} was refused: {shortened(str(error))}"
            self._refusal = without_frames(WireError(code, text))
            return
        whole = self._request.whole
        ranks = tuple(rank for rank in self._wanted if rank != _FIRST)
        if not ranks:
            return
        generation = whole.question.generation if first.generation is None else first.generation
        rest = replace(whole.question, ranks=ranks, engine_id=first.engine_id, generation=generation)
        self._rest = replace(whole, question=rest).new_session()
