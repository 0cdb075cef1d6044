"""Questions and answers of streamed hand-overs, between the request machines and the side channel.

The machines belong to the scheduler's thread; the listener and the client have threads of their own. Those threads decode and
check each message and put it into an inbox. `receive` passes the inbox to the machines; `send` takes their outgoing messages
once a step. Neither blocks: `send` writes to queues of the side channel, and `receive` reads from its own queue.

An engine at rest does not call `receive`, however long it rests. So a question leaves the inbox as soon as its asker has gone,
and the inbox never holds more than the questions that the listener keeps open, plus as many that were withdrawn since.

A question must not wait for a step: a busy engine looks at its queue only when the step has ended, which for a prompt of one
step is too late to read any of it early, and an engine without requests takes no step. So answers that are the same for every
further question about an id are kept on a board, from which the listener's thread answers by itself: the offer of a prompt
from its first step on, its final ticket while it is leased, and `withdrawn` once it has ended. A briefly outdated answer does
no harm, because the fence of its ticket decides.
"""

from __future__ import annotations

import logging
import secrets as random
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, NamedTuple, cast, final

from vllm_adapter.errors import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.cause_log import CauseLog
    from vllm_adapter.ports import (
        Codec,
        HandshakeClient,
        HandshakeListener,
        StreamOutcome,
        StreamQuestion,
        Streams,
        StreamStanding,
    )
    from vllm_adapter.scheduler.hooks import Arrival, HookGuards
    from vllm_adapter.steps import Rank

__all__ = ["StreamChannel", "Streaming"]

_AGAIN: Final = frozenset(
    {
        "ask-busy",
        "ask-expired",
        "closed",
        "connection-lost",
        "name-unresolved",
        "rate-limited",
        "recently-failed",
        "refused",
        "timed-out",
        "too-many-peers",
        "transport-failed",
    }
)
"""Codes after which the same question may still be answered; after any other code the prompt is computed here."""

_UNSUPPORTED: Final = "ask-unsupported"
"""The peer runs another release, or does not stream."""

_UNREAD: Final = "hand-over-seal"
"""A peer that cannot read a question sends an empty answer: the secrets differ, or the peer's log gives the reason."""

_RESULTS: Final = {
    "read-whole": "is read once it is finished",
    "computed-here": "is computed here",
    "given-up": "is given up, and kv_load_failure_policy decides",
    "fails": "fails, whatever the policy: its images came to the prefill engine alone; send them or their uuids to decode, too",
}
"""Results for a prompt that is not streamed, in words."""

_MARGIN_S: Final = 2.0
"""Extra wait for an answer, so that the peer's listener gives the question up first and reports that."""
_MOST_PEERS: Final = 256
_MOST_STANDING: Final = 4096


class _Answered(NamedTuple):
    """The outcome of a question that this engine asked."""

    request_id: str
    number: int
    answer: Mapping[str, object]


class _Published(NamedTuple):
    """A published answer, and the digest of the prompt that it is for; empty for any prompt."""

    digest: str
    answer: Mapping[str, object]


@final
class StreamChannel:
    """Passes questions and answers on. Call `receive`, `send` and `close` on the scheduler's thread only.

    Args:
        streams: The request machines of streams.
        codec: Encodes and decodes the messages.
        make_client: Creates the client, at the first question.
        secrets: Returns the fleet's secrets, empty if nothing is sealed; any thread.
        wait_s: Seconds that a question may wait at the peer.
        log: Rate-limits log lines about peers.
        count: Counts a prompt that is not streamed, by the code of the reason.
    """

    def __init__(
        self,
        streams: Streams,
        codec: Codec,
        make_client: Callable[[], HandshakeClient],
        *,
        secrets: Callable[[], Sequence[bytes]],
        wait_s: float,
        log: CauseLog,
        count: Callable[[str], None],
    ) -> None:
        self._streams = streams
        self._codec = codec
        self._make_client = make_client
        self._secrets = secrets
        self._wait_s = wait_s
        self._log = log
        self._count = count
        self._client: HandshakeClient | None = None
        self._listener: HandshakeListener | None = None
        self._lock = threading.Lock()
        # The inbox: questions of peers, questions withdrawn after the machines received them, and answers to our own questions.
        self._questions: dict[int, Mapping[str, object]] = {}
        self._gone_askers: list[int] = []
        self._answers: list[_Answered] = []
        # Peers' questions that the machines have not answered yet, by asker.
        self._asked: dict[str, Mapping[str, object]] = {}
        # Functions that withdraw this engine's questions, by request and number.
        self._cancels: dict[tuple[str, int], Callable[[], None]] = {}
        # Published answers, by hand-over id. The scheduler's thread writes, the listener's thread reads.
        self._board: dict[str, StreamStanding] = {}
        # The latest reason why prompts of a peer were computed here.
        self._plain_peers: OrderedDict[tuple[str, int], str] = OrderedDict()

    def serve(self, listener: HandshakeListener) -> None:
        """Take peers' questions from a listener that has not started yet."""
        self._listener = listener
        listener.take_asks(self._on_question, self._on_taken_back, wait_s=self._wait_s)

    @property
    def has_received(self) -> bool:
        """Whether `receive` has anything to pass on."""
        return bool(self._questions or self._gone_askers or self._answers)

    @property
    def is_asking(self) -> bool:
        """Whether a question of this engine is still unanswered."""
        return bool(self._cancels)

    def receive(self, now_s: float) -> None:
        """Pass the received messages to the machines.

        Each message fails alone: a message that the machines refuse is logged, and its sender gets a refusal.
        """
        self._take_questions()
        with self._lock:
            answers, self._answers = self._answers, []
        for answer in answers:
            self._take_answer(answer, now_s)

    def send(self) -> None:
        """Send the machines' questions, answers and cancellations to the side channel; once a step."""
        self.publish()
        self._take_questions()  # questions that arrived before the answers that are published now
        for each in self._streams.produced.take_answers():
            self._answer(each.asker, each.answer)
        questions = self._streams.take_questions()  # also cancels questions that have waited too long
        for request_id, number in self._streams.consumed.take_cancels():
            cancel = self._cancels.pop((request_id, number), None)
            if cancel is not None:
                cancel()
        for outcome in self._streams.consumed.take_outcomes():
            self._note_outcome(outcome)
        for question in questions:
            self._ask(question)

    def publish(self) -> None:
        """Publish the current answers, so that the listener's thread can give them by itself."""
        board = self._board
        for standing in self._streams.produced.take_standings():
            board.pop(standing.hand_over_id, None)
            if standing.answer is not None:
                board[standing.hand_over_id] = standing
                if len(board) > _MOST_STANDING:
                    del board[next(iter(board))]

    def close(self) -> None:
        """Stop asking questions; idempotent. The listener's owner closes the listener."""
        client, self._client = self._client, None
        self._listener = None
        if client is not None:
            client.close()

    # ------------------------------------------------------------------------------- the scheduler's thread

    def _take_questions(self) -> None:
        with self._lock:
            questions, self._questions = self._questions, {}
            gone, self._gone_askers = self._gone_askers, []
        for ask_id, question in questions.items():
            self._take_question(str(ask_id), question)
        for ask_id in gone:
            self._take_back(str(ask_id))

    def _take_question(self, asker: str, question: Mapping[str, object]) -> None:
        self._asked[asker] = question
        try:
            self._streams.produced.ask(asker, {key: value for key, value in question.items() if key != "nonce"})
        except Exception as error:  # noqa: BLE001 - one peer's question fails alone
            self._log.error("stream-question", "a peer's question for a hand-over was refused", trace=error)
            self._answer(asker, {"kind": "no", "reason": "withdrawn"})

    def _take_back(self, asker: str) -> None:
        known = self._asked.pop(asker, None)
        try:
            if known is not None:
                self._streams.produced.cancel(asker, str(known["hand_over_id"]))
        except Exception as error:  # noqa: BLE001 - one peer's question fails alone
            self._log.error("stream-question", "a peer's question could not be taken back", trace=error)

    def _answer(self, asker: str, answer: Mapping[str, object]) -> None:
        question = self._asked.pop(asker, None)
        if question is not None:
            self._send_answer(int(asker), question, answer)

    def _send_answer(self, ask_id: int, question: Mapping[str, object], answer: Mapping[str, object]) -> None:
        """Answer a question; any thread."""
        listener = self._listener
        if listener is None:
            return
        for each in (answer, {"kind": "no", "reason": "withdrawn"}):
            try:
                listener.answer(ask_id, self._codec.answer_payload(question, each, self._secrets()))
            except Exception as error:  # noqa: BLE001 - as when a ticket is too long for an answer
                self._log.error("stream-answer", "an answer to a peer's question cannot be sent", trace=error)
            else:
                return

    def _ask(self, question: StreamQuestion) -> None:
        key = question.request_id, question.number
        told = {
            "hand_over_id": question.hand_over_id,
            "number": question.number,
            "nonce": random.token_hex(16),
            "digest": question.digest,
            "tokens": question.tokens,
            "wants_final": question.wants_final,
        }
        peer = question.host, question.port
        try:
            if self._client is None:
                self._client = self._make_client()
            self._cancels[key] = self._client.ask(
                host=question.host,
                port=question.port,
                payload=self._codec.question_payload(told, self._secrets()),
                on_reply=partial(self._on_answer, key, peer, told),
                deadline_s=self._wait_s + _MARGIN_S,
            )
        except Exception as error:  # noqa: BLE001 - a question that cannot be asked makes its hand-over a plain one
            self._log.error(
                "stream-ask", "request %s: its hand-over cannot be asked for", question.request_id, trace=error
            )
            self._keep_answer(_Answered(*key, {"kind": "no", "reason": "not-streamed"}))

    def _take_answer(self, event: _Answered, now_s: float) -> None:
        self._cancels.pop((event.request_id, event.number), None)
        try:
            self._streams.answered(event.request_id, event.number, event.answer, now_s=now_s)
        except Exception as error:  # noqa: BLE001 - one peer's answer fails alone
            self._log.error("stream-answered", "request %s: an answer was refused", event.request_id, trace=error)

    def _note_outcome(self, outcome: StreamOutcome) -> None:
        """Count a prompt that is not streamed, and log it unless the reason was logged for its peer as a whole."""
        self._count(outcome.code)
        if self._plain_peers.get((outcome.host, outcome.port)) == outcome.code:
            return
        log = self._log.error if outcome.result == "fails" else self._log.warning
        log(
            f"stream-{outcome.code}",
            "request %s: its prompt is not streamed (hand-over %.8s of %s port %d: %s); it %s",
            outcome.request_id,
            outcome.hand_over_id,
            outcome.host,
            outcome.port,
            outcome.code,
            _RESULTS[outcome.result],
        )

    # ------------------------------------------------------------------- threads of the listener and of the client

    def _on_question(self, ask_id: int, payload: bytes) -> None:
        try:
            question = self._codec.read_question(payload, self._secrets())
        except Exception as error:  # noqa: BLE001 - whatever a peer sends
            self._log.warning(code_of(error), "a question for a hand-over was refused: %s", error)
            if self._listener is not None:
                # No answer can be bound to the question; the asker treats an empty one as a wrong seal.
                self._listener.answer(ask_id, b"")
            return
        standing = self._standing_for(question)
        if standing is None:
            with self._lock:
                self._questions[ask_id] = question
            # Look again: an engine that published its last answer meanwhile may rest now, and takes no question from the inbox.
            standing = self._standing_for(question)
            if standing is None:
                return
            with self._lock:
                if self._questions.pop(ask_id, None) is None:
                    return  # the machines have it, or its asker has gone
        is_same = not standing.digest or compare_digest(standing.digest.encode(), str(question["digest"]).encode())
        self._send_answer(ask_id, question, standing.answer if is_same else _mismatch(standing.answer))

    def _standing_for(self, question: Mapping[str, object]) -> _Published | None:
        """Return the published answer that settles a question; None if there is none."""
        standing = self._board.get(str(question["hand_over_id"]))
        if standing is None or standing.answer is None or not _is_of_use(standing.answer, question):
            return None
        return _Published(standing.digest, standing.answer)

    def _on_taken_back(self, ask_id: int) -> None:
        with self._lock:
            if self._questions.pop(ask_id, None) is None:
                self._gone_askers.append(ask_id)

    def _on_answer(
        self, key: tuple[str, int], peer: tuple[str, int], question: Mapping[str, object], code: str, payload: bytes
    ) -> None:
        answer: Mapping[str, object] = {"kind": "no", "reason": "unanswered"}
        if not code:
            try:
                answer = self._codec.read_answer(payload, question, self._secrets())
                self._plain_peers.pop(peer, None)
            except Exception as error:  # noqa: BLE001 - whatever a peer sends
                code = code_of(error) if payload else _UNREAD
        if answer["kind"] == "offer" and question["wants_final"]:
            # Otherwise the stream would be offered and broken repeatedly.
            answer = {"kind": "no", "reason": "withdrawn"}
        if code in _AGAIN:
            answer = {**answer, "code": code}
        elif code:
            answer = {"kind": "no", "reason": "not-streamed", "code": code}
            self._note_plain_peer(peer, code)
        self._keep_answer(_Answered(*key, answer))

    def _keep_answer(self, answer: _Answered) -> None:
        with self._lock:
            self._answers.append(answer)

    def _note_plain_peer(self, peer: tuple[str, int], code: str) -> None:
        """Log why a peer's prompts cannot be read; log again after the reason has changed or has been absent."""
        if self._plain_peers.get(peer) == code:
            return
        self._plain_peers[peer] = code
        if len(self._plain_peers) > _MOST_PEERS:
            self._plain_peers.popitem(last=False)
        if code == _UNSUPPORTED:
            self._log.warning(code, "prompts of %s port %d are computed here, not streamed: %s", *peer, code)
        else:
            self._log.warning(
                code, "prompts of %s port %d cannot be asked for now, and are computed here: %s", *peer, code
            )


def _mismatch(granting: Mapping[str, object]) -> Mapping[str, object]:
    """Return the answer to a question about another prompt than that of an offer or a final answer."""
    ticket = cast("Mapping[str, object]", granting["ticket"])
    media = ticket.get("kv_media")
    return {"kind": "no", "reason": "digest-mismatch", **({} if media is None else {"media": media})}


def _is_of_use(answer: Mapping[str, object], question: Mapping[str, object]) -> bool:
    """Return whether an answer settles a question: an offer does not settle a question for the final ticket."""
    return answer["kind"] != "offer" or not question["wants_final"]


_logger = logging.getLogger("vllm.vllm_adapter")

_GOES_ON = "the prefill engine was asked for more than one token, and the model keeps a state, which would run on"
_WINDOW_GOES_ON = (
    "the prefill engine was asked for more than one token, and would free blocks of the prompt's last window"
)
_NOT_SHORTENED = "its last tokens are the decode engine's to compute, and could not be left out here"


@final
class Streaming:
    """Streamed hand-overs as the scheduler's hooks use them; it exists only where prompts are streamed. Scheduler's thread only.

    Args:
        facts: This engine.
        streams: The request machines of streams.
        channel: Passes questions and answers on.
        guards: Turns an exception of the machines into a log line.
    """

    def __init__(self, facts: EngineFacts, streams: Streams, channel: StreamChannel, guards: HookGuards) -> None:
        self._facts = facts
        self._streams = streams
        self._channel = channel
        self._guards = guards
        self._logged: set[str] = set()
        self._is_router_known = False

    def arrived(self, arrival: Arrival, *, tail: int, is_shortened: bool) -> None:
        """Check a producer's request that a peer wants to read early; hand it over whole if it cannot be streamed.

        Args:
            arrival: The request.
            tail: Tokens that were to be dropped from the end of its prompt.
            is_shortened: Whether they were dropped; the request then generates one token, whatever it was asked for.
        """
        reason = self._why_whole(arrival, tail=tail, is_shortened=is_shortened)
        if not reason:
            return
        with self._guards("hand-over in one piece", arrival.request_id):
            self._streams.produced.hand_over_whole(arrival.request_id)
        if reason not in self._logged:
            self._logged.add(reason)
            _logger.warning("prompts such as that of request %s are handed over whole: %s", arrival.request_id, reason)

    def taken(self, arrival: Arrival) -> None:
        """Log once, at the first hand-over, if this engine streams but its router does not."""
        if self._is_router_known:
            return
        self._is_router_known = True
        params = arrival.params
        if isinstance(params, Mapping) and "kv_stream" not in params:
            _logger.info(
                "prompts are handed over whole, not streamed: request %s came without an early ticket, so its router asks "
                "the decode engine when the prefill engine has answered",
                arrival.request_id,
            )

    def _why_whole(self, arrival: Arrival, *, tail: int, is_shortened: bool) -> str:
        if self._facts.whole_reason:
            return self._facts.whole_reason
        if tail and not is_shortened:
            return _NOT_SHORTENED
        if is_shortened or arrival.max_tokens == 1:
            return ""
        if self._facts.has_state:
            return _GOES_ON
        return _WINDOW_GOES_ON if any(group.window_tokens for group in self._facts.groups) else ""

    @property
    def is_asking(self) -> bool:
        """Whether a question to a peer is still unanswered."""
        return self._channel.is_asking

    def receive(self, now_s: float) -> None:
        """Pass the questions and answers that peers have sent since the last call to the machines."""
        if self._channel.has_received:
            with self._guards.of_engine(
                "receipt of questions and answers", "prompts are read early later, or not at all"
            ):
                self._channel.receive(now_s)

    def send(self) -> None:
        """Send the machines' questions and answers; once a step, after its plan was taken."""
        with self._guards.of_engine("sending of questions and answers", "prompts are read early later, or not at all"):
            self._channel.send()

    def publish(self) -> None:
        """Publish the answers that changed when a request ended, whether or not another step follows."""
        with self._guards.of_engine("standing answers", "peers are answered a step later"):
            self._channel.publish()

    def ended(self, ends: Iterable[tuple[str, Rank, bool]]) -> None:
        """Record the streams that have ended on a rank, and whether their fence held there."""
        for request_id, rank, is_done in ends:
            with self._guards("end of a stream", request_id):
                self._streams.ended(request_id, rank, is_done=is_done)

    def close(self) -> None:
        """Stop asking questions; idempotent."""
        self._channel.close()
