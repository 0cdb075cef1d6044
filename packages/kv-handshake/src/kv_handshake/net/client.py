"""Handshakes with many peers at once, asks to them, and the memory of those that failed.

A failed handshake is remembered under its question. From then on requests with the same question end at once with
``recently-failed`` and the failure's code as ``last_code`` in the context, and one background attempt at a time asks the peer
again, after 0.5 s, 1 s, 2 s and so on. The first good answer ends that: the next request is performed as usual. A peer that no
request has named for two minutes is forgotten.

A peer whose asks failed is left alone for as long. Until then its asks end with the code of that failure.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, Self, final

from kv_handshake.core.asks import OpenAsk, PeerAsks
from kv_handshake.core.endpoint import Endpoint, endpoint_of
from kv_handshake.core.handshake import Handshake, Timing
from kv_handshake.core.pacing import FailureMemory, GatedLog
from kv_handshake.core.session import ClientSession
from kv_handshake.errors import ConfigurationError, HandshakeError, TransportError, WireError, require
from kv_handshake.net.loop import Loop
from kv_handshake.security import ClientSecurity
from kv_handshake.wire.asks import encode_ask
from kv_handshake.wire.dialects import DEFAULT_DIALECT
from kv_handshake.wire.policy import LocalOffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake.core.handshake import Outcome
    from kv_handshake.wire.messages import AgentMetadata
    from kv_handshake.wire.queries import Rank

__all__ = ["Client"]

_NOT_THE_PEERS = frozenset(
    {
        "closed",
        "recently-failed",
        "first-rank-refused",
        "too-many-peers",
        "transport-failed",
        "invalid-key-file",
        "insecure-key-file",
    }
)
"""Failures that say nothing about the peer and are not remembered."""

_BACKGROUND_SHARE = 8
"""Background attempts take at most one place in this many, so that requests always find one."""

_UNSUPPORTED_S = 30.0
"""A peer that takes no asks is tried again after this time; it may run another release by then."""


class Question(NamedTuple):
    """The ranks of an engine that a caller asks for.

    Failures are remembered by the whole question, so that a wrong one does not block the right one.
    """

    endpoint: Endpoint
    ranks: tuple[Rank, ...]
    engine_id: str
    dialect: int
    generation: int | None


@final
class Client:
    """Performs handshakes with many peers, and asks them, concurrently from one thread of its own.

    A context manager: leaving it closes the client.

    Args:
        offer: This engine's side of every comparison: its factors and how strictly it takes differences.
        timing: Deadlines, retries and limits.
        security: Keys of an encrypted side channel; plain TCP without.
        seed: Seed of the jitter, for reproducible tests.

    Raises:
        TransportError: ``transport-failed``: too few files may be opened.
    """

    def __init__(
        self,
        offer: LocalOffer,
        *,
        timing: Timing | None = None,
        security: ClientSecurity | None = None,
        seed: int | None = None,
    ) -> None:
        require(LocalOffer, offer=offer)
        require((Timing, type(None)), timing=timing)
        require((ClientSecurity, type(None)), security=security)
        self._offer = offer
        self._timing = timing or Timing()
        self._log = GatedLog()
        self._counts: Counter[str] = Counter()
        self._memory = FailureMemory(self._timing.hold_first_s, self._timing.hold_most_s)
        self._peers: dict[Endpoint, PeerAsks] = {}
        self._ask_numbers = itertools.count(1)
        self._loop = Loop(self._timing, self._log, security=security, seed=seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str,
        on_done: Callable[[Outcome], None],
        dialect: int = DEFAULT_DIALECT,
        generation: int | None = None,
        check_first: Callable[[AgentMetadata], None] | None = None,
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once.

        Args:
            host: The listener's address or name.
            port: The listener's port.
            ranks: (pp, tp) ranks to ask for.
            engine_id: The engine that must answer; empty if any may.
            dialect: The peer's connector version, 2 to 15; the default is for engines that are not vLLM.
            on_done: Gets the outcome; it must not block, and an exception that it raises is logged and counted.
            generation: The registration generation that the ticket was made with; None to accept any.
            check_first: If given, every attempt asks for rank (0, 0) alone and calls this with its metadata, on the client's
                thread. The other ranks are asked for on the same connection after it has returned; an exception ends the
                handshake with ``first-rank-refused``. vLLM's own listener crashes on an unknown rank.

        Raises:
            ConfigurationError: ``invalid-endpoint``, ``invalid-argument`` or ``unknown-dialect``, before anything is
                sent; ``invalid-argument`` also after `close`.
        """
        require(Callable, on_done=on_done)
        require((tuple, list), ranks=ranks)
        question = Question(endpoint_of(host, port), tuple(ranks), engine_id, dialect, generation)
        new_session = partial(
            ClientSession,
            self._offer,
            question.ranks,
            dialect=dialect,
            engine_id=engine_id,
            generation=generation,
            check_first=check_first,
        )
        on_end = partial(self._ended, question, new_session, on_done)
        handshake = Handshake(question.endpoint, new_session, on_end, timing=self._timing, start_s=time.monotonic())
        self._call(partial(self._begin, question, handshake))

    def fetch(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str = "",
        dialect: int = DEFAULT_DIALECT,
        generation: int | None = None,
    ) -> Outcome:
        """Perform one handshake and wait for its outcome; not for use in `on_done`.

        Raises:
            ConfigurationError: As `request`.
        """
        outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.request(
            host=host,
            port=port,
            ranks=ranks,
            engine_id=engine_id,
            dialect=dialect,
            on_done=outcomes.put,
            generation=generation,
        )
        return outcomes.get()

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        """Ask an engine of our own kind and return at once; many asks may be open, over one connection per peer.

        The client first requests the peer's envelope, and sends asks only if it announces the capability ``ask``.

        Args:
            host: The listener's address or name.
            port: The listener's port.
            payload: The engine's own bytes, at most `MAX_ASK_BYTES`, 4096.
            on_reply: Called once, on the client's thread that it must not block, with (code, payload): the answer and an empty
                code, or a code without an answer. ``ask-unsupported``: this peer will not answer asks.
            deadline_s: Seconds after which the ask ends with ``timed-out``.

        Returns:
            A function that cancels the ask: `on_reply` is not called any more, unless its call is already running.

        Raises:
            ConfigurationError: ``invalid-endpoint`` or ``invalid-argument``, before anything is sent.
        """
        endpoint = endpoint_of(host, port)
        require(bytes, payload=payload)
        require(Callable, on_reply=on_reply)
        require((int, float), deadline_s=deadline_s)
        encode_ask(1, payload)  # refuses a payload that is too long
        ask = OpenAsk(next(self._ask_numbers), payload, partial(self._replied, on_reply), time.monotonic() + deadline_s)
        self._call(partial(self._begin_ask, endpoint, ask))

        def cancel() -> None:
            self._loop.call(partial(self._cancel, endpoint, ask.number))

        return cancel

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far.

        They are ``requests``, ``succeeded``, ``failed``, ``asks``, ``asks_answered``, ``asks_failed``, ``attempts`` (connections
        tried), ``background_attempts`` (those among them that no request waits for), ``callback_errors``, ``restarts`` (failures
        of the thread that were not foreseen), ``remembered_failures`` (questions that failed and have not been answered since)
        and ``log_lines_held_back``.
        """
        names = ("requests", "succeeded", "failed", "asks", "asks_answered", "asks_failed")
        return {
            **dict.fromkeys((*names, "background_attempts", "callback_errors"), 0),
            **self._counts,
            **self._loop.counts,
            "remembered_failures": len(self._memory),
            "log_lines_held_back": self._log.held_back,
        }

    def close(self) -> None:
        """End all handshakes with the outcome ``closed``, all asks with this code, and stop the thread; idempotent."""
        self._loop.close()

    def _call(self, action: Callable[[], None]) -> None:
        if not self._loop.call(action):
            raise ConfigurationError("invalid-argument", "the client is closed")

    # Everything below runs on the loop's thread.

    def _begin(self, question: Question, handshake: Handshake) -> None:
        """Start a handshake, or end it at once if its question failed and has not been answered since."""
        self._counts["requests"] += 1
        now_s = time.monotonic()
        remembered = self._memory.blocking(question, now_s)
        if remembered is None:
            self._loop.start(handshake)
            return
        wait_s = max(0.0, remembered.until_s - now_s)
        error = TransportError(
            "recently-failed",
            f"{remembered.message}; failed handshakes: {remembered.failures}, next in {wait_s:.2f} s",
            last_code=remembered.code,
            failures=remembered.failures,
            retry_after_s=wait_s,
        )
        handshake.fail_with(error)
        handshake.end(now_s)

    def _ended(
        self,
        question: Question,
        new_session: Callable[[], ClientSession],
        on_done: Callable[[Outcome], None],
        outcome: Outcome,
    ) -> None:
        self._learn(question, new_session, outcome)
        if outcome.is_ok and outcome.verdict.warnings:
            self._log.warning("accepted", f"peer {question.endpoint}: {'; '.join(outcome.verdict.warnings)}")
        self._counts["succeeded" if outcome.is_ok else "failed"] += 1
        self._log.call(self._counts, f"on_done of a handshake with {question.endpoint.host}", on_done, outcome)

    def _learn(self, question: Question, new_session: Callable[[], ClientSession], outcome: Outcome) -> None:
        """Forget an answered question's failures; remember a failure, and ask again in the background."""
        if outcome.is_ok:
            self._memory.forget(question)
        elif outcome.code not in _NOT_THE_PEERS and outcome.attempts:
            now_s, chance, retried = time.monotonic(), self._loop.random.random(), self._memory.retried
            failure = self._memory.record(
                question, code=outcome.code, message=outcome.message, now_s=now_s, chance=chance
            )
            if now_s - failure.wanted_s > self._timing.forget_s:
                self._memory.forget(question)
            # If there is no place for a background attempt, the next request after the hold asks the peer itself.
            elif question not in retried and len(retried) < self._timing.connections // _BACKGROUND_SHARE:
                retried.add(question)
                on_end, at_s = partial(self._asked_again, question, new_session), failure.until_s
                self._loop.start(
                    Handshake(
                        question.endpoint, new_session, on_end, timing=self._timing, start_s=at_s, attempts_most=1
                    )
                )

    def _asked_again(self, question: Question, new_session: Callable[[], ClientSession], outcome: Outcome) -> None:
        self._memory.retried.discard(question)
        if outcome.attempts:
            self._counts["background_attempts"] += 1
        self._learn(question, new_session, outcome)

    def _begin_ask(self, endpoint: Endpoint, ask: OpenAsk) -> None:
        """Add an ask to those at its peer, or end it at once if the peer failed a moment ago."""
        self._counts["asks"] += 1
        now_s = time.monotonic()
        peer = self._peers.get(endpoint)
        if peer is None:
            failure = self._memory.blocking(endpoint, now_s)
            if failure is not None:
                ask.on_reply(failure.code, b"")
                return
            on_end = partial(self._asks_ended, endpoint)
            peer = PeerAsks(endpoint, on_end, attempt_s=self._timing.attempt_s, start_s=now_s)
            self._peers[endpoint] = peer
            self._loop.start(peer)
        peer.add(ask, now_s)

    def _cancel(self, endpoint: Endpoint, number: int) -> None:
        peer = self._peers.get(endpoint)
        if peer is not None:
            peer.cancel(number)

    def _replied(self, on_reply: Callable[[str, bytes], None], code: str, payload: bytes) -> None:
        self._counts["asks_failed" if code else "asks_answered"] += 1
        self._log.call(self._counts, "on_reply of an ask", on_reply, code, payload)

    def _asks_ended(self, endpoint: Endpoint, error: HandshakeError | None) -> None:
        del self._peers[endpoint]
        if error is None:
            self._memory.forget(endpoint)
        elif error.code not in _NOT_THE_PEERS:
            if isinstance(error, WireError):
                self._log.warning("ask", f"{endpoint} cannot be asked: {error}")
            self._memory.record(
                endpoint,
                code=error.code,
                message=error.message,
                now_s=time.monotonic(),
                chance=self._loop.random.random(),
                least_s=_UNSUPPORTED_S if error.code == "ask-unsupported" else 0.0,
            )
