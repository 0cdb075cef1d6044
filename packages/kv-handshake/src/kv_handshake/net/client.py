"""Handshakes with many peers at once, and the memory of those that failed.

A failed handshake is remembered under its question. From then on requests with the same question end at once with
``recently-failed``, and one background attempt at a time asks the peer again, after 0.5 s, 1 s, 2 s and so on. The first
good answer ends that: the next request is performed as usual. A peer that no request has named for two minutes is forgotten.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, final

from kv_handshake.core.attempt import HandshakeRequest, Outcome, Question, Task, Timing, outcome_of
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.pacing import Backoff, FailureMemory, GatedLog
from kv_handshake.errors import ConfigurationError, HandshakeError, TransportError
from kv_handshake.net.loop import Loop
from kv_handshake.stream.asker import Asker
from kv_handshake.stream.messages import encode_ask
from kv_handshake.wire.queries import check_rank_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_handshake.core.pacing import RememberedFailure
    from kv_handshake.sockets import ClientSecurity
    from kv_handshake.wire.messages import AgentMetadata
    from kv_handshake.wire.policy import LocalOffer
    from kv_handshake.wire.queries import Rank

__all__ = ["Client"]

_NOT_THE_PEERS = frozenset(
    {
        "closed",
        "recently-failed",
        "first-rank-refused",
        "transport-failed",
        "invalid-key-file",
        "insecure-key-file",
    }
)
"""Failures that say nothing about the peer and are not remembered."""

_BACKGROUND_SHARE = 8
"""Background attempts take at most one place in this many, so that requests always find one."""


@final
class Client:
    """Performs handshakes with many peers concurrently from one thread of its own.

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
        self._offer = offer
        self._timing = timing or Timing()
        self._log = GatedLog()
        self._lock = threading.Lock()
        self._counts = {"requests": 0, "succeeded": 0, "failed": 0, "callback_errors": 0, "background_attempts": 0}
        self._memory = FailureMemory(Backoff(self._timing.hold_first_s, self._timing.hold_most_s))
        self._security, self._seed = security, seed
        self._asker: Asker | None = None
        self._is_closed = False
        self._loop = Loop(
            self._timing,
            self._log,
            security=security,
            seed=seed,
            allows_link_local_names=False,  # tickets name hosts, and strangers write tickets
        )

    def __repr__(self) -> str:
        return f"Client(policy={self._offer.policy!r}, {self._loop!r})"

    def request(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str,
        dialect: int,
        on_done: Callable[[Outcome], None],
        generation: int | None = None,
        check_first: Callable[[AgentMetadata], None] | None = None,
    ) -> None:
        """Start a handshake and return at once; `on_done` runs on the client's thread exactly once.

        Args:
            host: The listener's address or name.
            port: The listener's port.
            ranks: (pp, tp) ranks to ask for.
            engine_id: The engine that must answer; empty if any may.
            dialect: The peer's connector version, 2 to 15.
            on_done: Gets the outcome; it must not block, and an exception that it raises is logged and counted.
            generation: The registration generation that the ticket was made with; None to accept any.
            check_first: If given, every attempt asks for rank (0, 0) alone and calls this with its metadata, on the client's
                thread. The other ranks are asked for on the same connection after it has returned; an exception ends the
                handshake with ``first-rank-refused``. vLLM's own listener crashes on an unknown rank.

        Raises:
            ConfigurationError: ``invalid-endpoint``, ``invalid-argument`` or ``unknown-dialect``, before anything is
                sent; ``invalid-argument`` also after `close`.
        """
        check_rank_count(ranks)
        question = Question(endpoint_of(host, port), tuple(ranks), engine_id, dialect, generation)
        asked = HandshakeRequest(question, self._offer, check_first=check_first)
        task = Task(
            asked,
            lambda task: self._ended(task, asked, question, on_done),
            timing=self._timing,
            now_s=time.monotonic(),
            admit=lambda now_s: self._remembered_failure(question, now_s),
        )
        if not self._loop.submit(task):
            raise ConfigurationError("invalid-argument", "the client is closed")
        self._count("requests")

    def fetch(
        self,
        *,
        host: str,
        port: int,
        ranks: Sequence[Rank],
        engine_id: str = "",
        dialect: int,
        generation: int | None = None,
    ) -> Outcome:
        """Perform one handshake and wait for its outcome; not for use in `on_done`.

        Raises:
            ConfigurationError: As `request`.
        """
        box: list[Outcome] = []
        is_done = threading.Event()

        def keep(outcome: Outcome) -> None:
            box.append(outcome)
            is_done.set()

        self.request(
            host=host,
            port=port,
            ranks=ranks,
            engine_id=engine_id,
            dialect=dialect,
            on_done=keep,
            generation=generation,
        )
        is_done.wait()
        return box[0]

    def ask(
        self, *, host: str, port: int, payload: bytes, on_reply: Callable[[str, bytes], None], deadline_s: float
    ) -> Callable[[], None]:
        """Ask an engine of our own kind and return at once; many asks may be open, over one connection per peer.

        The client first requests the peer's envelope, and sends asks only if it announces the capability ``ask``.

        Args:
            host: The listener's address or name.
            port: The listener's port.
            payload: The engine's own bytes, at most `MAX_ASK_BYTES`, 4096.
            on_reply: Called once, on a thread of the client's that it must not block, with (code, payload): the answer and an
                empty code, or a code without an answer. ``ask-unsupported``: this peer will not answer asks.
            deadline_s: Seconds after which the ask ends with ``timed-out``.

        Returns:
            A function that cancels the ask: `on_reply` is not called any more, unless its call is already running.

        Raises:
            ConfigurationError: ``invalid-endpoint`` or ``invalid-argument``, before anything is sent.
            TransportError: ``transport-failed``: too few files may be opened for the first ask.
        """
        endpoint = endpoint_of(host, port)
        encode_ask(1, payload)
        with self._lock:
            if self._asker is None and not self._is_closed:
                self._asker = Asker(self._timing, self._log, security=self._security, seed=self._seed)
            asker = self._asker
        number = asker.ask(endpoint, payload, on_reply, deadline_s) if asker is not None else None
        if asker is None or number is None:
            raise ConfigurationError("invalid-argument", "the client is closed")
        return partial(asker.cancel, endpoint, number)

    def statistics(self) -> Mapping[str, int]:
        """Return the counts so far.

        They are ``requests``, ``succeeded``, ``failed``, ``attempts`` (connections tried), ``background_attempts`` (those
        among them that no request waits for), ``callback_errors``, ``restarts`` (failures of the thread that were not
        foreseen), ``remembered_failures`` (questions that failed and have not been answered since) and
        ``log_lines_held_back``; after the first ask also ``asks``, ``asks_answered``, ``asks_failed`` and ``ask_connections``.
        """
        with self._lock:
            counts, asker = dict(self._counts), self._asker
        return {
            **counts,
            **(asker.statistics() if asker is not None else {}),
            **self._loop.statistics(),
            "remembered_failures": len(self._memory),
            "log_lines_held_back": self._log.held_back,
        }

    def close(self) -> None:
        """End all handshakes with the outcome ``closed``, all asks with this code, and stop the threads; idempotent."""
        with self._lock:
            self._is_closed, asker = True, self._asker
        if asker is not None:
            asker.close()
        self._loop.close()

    # Everything below runs on the loop's thread.

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _remembered_failure(self, question: Question, now_s: float) -> HandshakeError | None:
        """Return the error that ends a request at once, if its question failed and has not been answered since."""
        remembered = self._memory.blocking(question, now_s)
        if remembered is None:
            return None
        wait_s = max(0.0, remembered.until_s - now_s)
        return TransportError(
            "recently-failed",
            f"{question.endpoint.host} port {question.endpoint.port} failed {remembered.failures} times, is asked again "
            f"in {wait_s:.2f} s; last: {remembered.code}: {remembered.message}",
            last_code=remembered.code,
            failures=remembered.failures,
            retry_after_s=wait_s,
        )

    def _ended(
        self,
        task: Task,
        asked: HandshakeRequest,
        question: Question,
        on_done: Callable[[Outcome], None],
    ) -> None:
        outcome = outcome_of(task, time.monotonic())
        self._learn(question, asked, outcome)
        if outcome.is_ok and outcome.verdict.warnings:
            peer = f"{question.endpoint.host} port {question.endpoint.port}"
            self._log.warning("accepted", f"peer {peer}: {'; '.join(outcome.verdict.warnings)}")
        self._count("succeeded" if outcome.is_ok else "failed")
        try:
            on_done(outcome)
        except Exception as error:  # noqa: BLE001 - a caller's mistake must not end other handshakes
            self._count("callback_errors")
            self._log.warning("callback", f"on_done of a handshake with {question.endpoint.host} raised {error!r}")

    def _learn(self, question: Question, asked: HandshakeRequest, outcome: Outcome) -> None:
        """Forget an answered question's failures; remember a failure, and ask again in the background."""
        if outcome.is_ok:
            self._memory.forget(question)
        elif outcome.code not in _NOT_THE_PEERS and outcome.attempts:
            now_s, chance = time.monotonic(), self._loop.chance()
            failure = self._memory.record(
                question, code=outcome.code, message=outcome.message, now_s=now_s, chance=chance
            )
            if now_s - failure.wanted_s > self._timing.forget_s:
                self._memory.forget(question)
            else:
                self._ask_again(question, asked, failure)

    def _ask_again(self, question: Question, asked: HandshakeRequest, failure: RememberedFailure) -> None:
        """Plan one background attempt of a request, which keeps its rule about the first rank.

        If there is no place for it, the next request after the hold asks the peer itself.
        """
        if failure.is_retried or self._memory.retried >= self._timing.connections // _BACKGROUND_SHARE:
            return
        task = Task(
            asked,
            lambda task: self._asked_again(task, asked, question),
            timing=self._timing,
            now_s=time.monotonic(),
            attempts_most=1,
        )
        task.postpone(failure.until_s)
        if self._loop.submit(task):
            self._memory.hold(question)

    def _asked_again(self, task: Task, asked: HandshakeRequest, question: Question) -> None:
        self._memory.release(question)
        if task.attempts:
            self._count("background_attempts")
        self._learn(question, asked, outcome_of(task, time.monotonic()))
