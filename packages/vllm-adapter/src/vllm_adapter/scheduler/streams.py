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
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING, Final, cast, final

from vllm_adapter.errors import code_of
from vllm_adapter.observe.recorder import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config.secrets import FleetSecrets
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import (
        Codec,
        HandshakeClient,
        HandshakeListener,
        StreamOutcome,
        StreamQuestion,
        Streams,
    )
    from vllm_adapter.scheduler.followed import Arrival
    from vllm_adapter.steps import Rank

__all__ = ["Streaming"]

_logger = logging.getLogger("vllm.vllm_adapter")

_AGAIN: Final = frozenset(
    {
        "ask-busy",
        "ask-expired",
        "closed",
        "connection-lost",
        "name-unresolved",
        "rate-limited",
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
    "fails": "fails, whatever the policy: its images came to the prefill engine alone; send them or their uuids to decode, too",
}
"""Results for a prompt that is not streamed, in words."""

_MARGIN_S: Final = 2.0
"""Extra wait for an answer, so that the peer's listener gives the question up first and reports that."""
_MOST_PEERS: Final = 256
_MOST_STANDING: Final = 4096

_GOES_ON = "the prefill engine was asked for more than one token, and the model keeps a state, which would run on"
_WINDOW_GOES_ON = (
    "the prefill engine was asked for more than one token, and would free blocks of the prompt's last window"
)
_NOT_SHORTENED = "its last tokens are the decode engine's to compute, and could not be left out here"

Message = Mapping[str, object]
"""A question or an answer, decoded."""
_WITHDRAWN: Final[Message] = {"kind": "no", "reason": "withdrawn"}


@final
class Streaming:
    """Streamed hand-overs of one engine. Scheduler's thread only; it exists only where prompts are streamed.

    Args:
        facts: This engine.
        streams: The request machines of streams.
        codec: Encodes and decodes questions and answers.
        client: Asks peers; it compares no factors.
        listener: Receives peers' questions; it has not been started yet.
        secrets: The fleet's secrets; None if nothing is sealed.
        wait_s: Seconds that a question may wait at the peer.
        recorder: Counts prompts that are not streamed, by the code of the reason, and rate-limits log lines.
    """

    def __init__(
        self,
        facts: EngineFacts,
        streams: Streams,
        codec: Codec,
        client: HandshakeClient,
        listener: HandshakeListener,
        secrets: FleetSecrets | None,
        wait_s: float,
        recorder: Recorder,
    ) -> None:
        self._facts = facts
        self._streams = streams
        self._codec = codec
        self._client = client
        self._wait_s = wait_s
        self._listener: HandshakeListener | None = listener
        self._recorder = recorder
        self._fleet_secrets = secrets
        # The inbox: questions of peers, questions withdrawn after the machines received them, and (request, number, answer) of
        # this engine's own questions. Other threads put in, and whichever thread pops a question deals with it.
        self._questions: dict[int, Message] = {}
        self._gone_askers: deque[int] = deque()
        self._answers: deque[tuple[str, int, Message]] = deque()
        # Peers' questions that the machines have not answered yet, by asker.
        self._asked: dict[str, Message] = {}
        # Functions that withdraw this engine's questions, by request and number.
        self._cancels: dict[tuple[str, int], Callable[[], None]] = {}
        # Published answers with the digest of their prompt (empty for any prompt), by hand-over id. The scheduler's thread
        # writes, the listener's thread reads.
        self._board: dict[str, tuple[str, Message]] = {}
        # The latest reason why prompts of a peer were computed here.
        self._plain_peers: OrderedDict[tuple[str, int], str] = OrderedDict()
        listener.take_asks(self._on_question, self._on_taken_back, wait_s=wait_s)

    # ---------------------------------------------------------------------------------------------- requests

    def admitted(self, arrival: Arrival) -> None:
        """Log once, at the first hand-over, if this engine streams but its router does not."""
        params, is_first = arrival.params, self._recorder.is_first("hand-over")
        if is_first and isinstance(params, Mapping) and "kv_stream" not in params:
            _logger.info(
                "prompts are handed over whole, not streamed: request %s came without an early ticket, so its router asks "
                "the decode engine when the prefill engine has answered",
                arrival.request_id,
            )

    def check_whole(self, arrival: Arrival, *, tail: int, is_shortened: bool) -> None:
        """Check a producer's request that a peer wants to read early; hand it over whole if it cannot be streamed.

        Args:
            arrival: The request.
            tail: Tokens that were to be dropped from the end of its prompt.
            is_shortened: Whether they were dropped; the request then generates one token, whatever it was asked for.
        """
        reason = self._why_whole(arrival, tail=tail, is_shortened=is_shortened)
        if not reason:
            return
        with Guard(self._recorder, "hand-over in one piece", arrival.request_id):
            self._streams.produced.hand_over_whole(arrival.request_id)
        if self._recorder.is_first("handed over whole", reason):
            _logger.warning("prompts such as that of request %s are handed over whole: %s", arrival.request_id, reason)

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

    # ---------------------------------------------------------------------------------------------- steps

    @property
    def is_asking(self) -> bool:
        """Whether a question of this engine is still unanswered."""
        return bool(self._cancels)

    def receive(self, now_s: float) -> None:
        """Pass the messages of peers since the last call to the machines; one that they refuse is logged and fails alone."""
        self._take_questions()
        while self._answers:
            request_id, number, answer = self._answers.popleft()
            self._cancels.pop((request_id, number), None)
            with Guard(self._recorder, "stream-answered", request_id, "an answer was refused"):
                self._streams.answered(request_id, number, answer, now_s=now_s)

    def send(self) -> None:
        """Send the machines' questions, answers and cancellations to peers; once a step, after its plan was taken."""
        self.publish()
        with Guard(
            self._recorder,
            "sending of questions and answers",
            consequence="prompts are read early later, or not at all",
        ):
            self._take_questions()  # questions that arrived before the answers that are published now
            for each in self._streams.produced.take_answers():
                self._answer(each.asker, each.answer)
            questions = self._streams.take_questions()  # also cancels questions that have waited too long
            for key in self._streams.consumed.take_cancels():
                cancel = self._cancels.pop(key, None)
                if cancel is not None:
                    cancel()
            for outcome in self._streams.consumed.take_outcomes():
                self._note_outcome(outcome)
            for question in questions:
                self._ask(question)

    def publish(self) -> None:
        """Publish the answers that have changed, so that the listener's thread gives them whether or not a step follows."""
        board = self._board
        for standing in self._streams.produced.take_standings():
            board.pop(standing.hand_over_id, None)
            if standing.answer is not None:
                board[standing.hand_over_id] = standing.digest, standing.answer
                if len(board) > _MOST_STANDING:
                    del board[next(iter(board))]

    def ended(self, ends: Iterable[tuple[str, Rank, bool]]) -> None:
        """Record the streams that have ended on a rank, and whether their fence held there."""
        for request_id, rank, is_done in ends:
            with Guard(self._recorder, "end of a stream", request_id):
                self._streams.ended(request_id, rank, is_done=is_done)

    def close(self) -> None:
        """Stop asking and answering questions; idempotent. The listener's owner closes the listener."""
        self._listener = None
        self._client.close()

    def _take_questions(self) -> None:
        for ask_id in list(self._questions):
            question = self._questions.pop(ask_id, None)
            if question is None:
                continue
            asker = str(ask_id)
            self._asked[asker] = question
            with Guard(self._recorder, "stream-question", consequence="a peer's question for a hand-over was refused"):
                self._streams.produced.ask(asker, question)
                continue
            self._answer(asker, _WITHDRAWN)
        while self._gone_askers:
            asker = str(self._gone_askers.popleft())
            known = self._asked.pop(asker, None)
            if known is not None:
                with Guard(self._recorder, "stream-question", consequence="a peer's question could not be taken back"):
                    self._streams.produced.cancel(asker, str(known["hand_over_id"]))

    def _answer(self, asker: str, answer: Message) -> None:
        question = self._asked.pop(asker, None)
        if question is not None:
            self._send_answer(int(asker), question, answer)

    def _send_answer(self, ask_id: int, question: Message, answer: Message) -> None:
        """Answer a question; any thread."""
        listener = self._listener
        if listener is None:
            return
        # The second one for an answer that cannot be sent, as when its ticket is too long.
        for each in (answer, _WITHDRAWN):
            with Guard(self._recorder, "stream-answer", consequence="an answer to a peer's question cannot be sent"):
                listener.answer(ask_id, self._codec.answer_payload(question, each, self._secrets()))
                return

    def _ask(self, question: StreamQuestion) -> None:
        key = question.request_id, question.number
        sent = {**question._asdict(), "nonce": random.token_hex(16)}
        for own in ("request_id", "host", "port"):  # the request means nothing to the peer
            del sent[own]
        peer = question.host, question.port
        with Guard(self._recorder, "stream-ask", question.request_id, "its hand-over cannot be asked for"):
            self._cancels[key] = self._client.ask(
                host=question.host,
                port=question.port,
                payload=self._codec.question_payload(sent, self._secrets()),
                on_reply=partial(self._on_answer, key, peer, sent),
                deadline_s=self._wait_s + _MARGIN_S,
            )
            return
        self._answers.append((*key, {"kind": "no", "reason": "not-streamed"}))

    def _note_outcome(self, outcome: StreamOutcome) -> None:
        """Count a prompt that is not streamed, and log it unless the reason was logged for its peer as a whole."""
        self._recorder.observe("num_unstreamed_prompts", outcome.code)
        if self._plain_peers.get((outcome.host, outcome.port)) == outcome.code:
            return
        log = self._recorder.error if outcome.result == "fails" else self._recorder.warning
        log(
            f"stream-{outcome.code}",
            "request %s: its prompt is not streamed (hand-over %.8s of %s port %d: %s); it %s",
            outcome.request_id,
            outcome.hand_over_id,
            outcome.host,
            outcome.port,
            outcome.code,
            _RESULTS.get(outcome.result) or f"is given up; {self._facts.after_failure}",
        )

    # ------------------------------------------------------------------- threads of the listener and of the client

    def _secrets(self) -> Sequence[bytes]:
        return self._fleet_secrets.current if self._fleet_secrets is not None else ()

    def _on_question(self, ask_id: int, payload: bytes) -> None:
        try:
            question = self._codec.read_question(payload, self._secrets())
        except Exception as error:  # noqa: BLE001 - whatever a peer sends
            self._recorder.warning(
                code_of(error),
                "a peer's question was refused, so it computes the prompt: %s",
                error,
            )
            if self._listener is not None:
                # No answer can be bound to the question; the asker treats an empty one as a wrong seal.
                self._listener.answer(ask_id, b"")
            return
        # The inbox first: an engine that publishes its last answer now may rest then, and takes nothing from the inbox any more.
        self._questions[ask_id] = question
        standing = self._board.get(str(question["hand_over_id"]))
        # An offer does not settle a question for the final ticket.
        if standing is None or (standing[1]["kind"] == "offer" and question["wants_final"]):
            return
        if self._questions.pop(ask_id, None) is None:
            return  # the machines have it, or its asker has gone
        digest, answer = standing
        if digest and not compare_digest(digest.encode(), str(question["digest"]).encode()):
            ticket = cast("Message", answer["ticket"])
            media = {"media": ticket["kv_media"]} if ticket.get("kv_media") is not None else {}
            answer = {"kind": "no", "reason": "digest-mismatch", **media}
        self._send_answer(ask_id, question, answer)

    def _on_taken_back(self, ask_id: int) -> None:
        if self._questions.pop(ask_id, None) is None:
            self._gone_askers.append(ask_id)

    def _on_answer(
        self, key: tuple[str, int], peer: tuple[str, int], question: Message, code: str, payload: bytes
    ) -> None:
        answer: Message = {"kind": "no", "reason": "unanswered"}
        if not code:
            try:
                answer = self._codec.read_answer(payload, question, self._secrets())
                self._plain_peers.pop(peer, None)
            except Exception as error:  # noqa: BLE001 - whatever a peer sends
                code = code_of(error) if payload else _UNREAD
        if code in _AGAIN:
            answer = {**answer, "code": code}
        elif code:
            answer = {"kind": "no", "reason": "not-streamed", "code": code}
            if self._plain_peers.get(peer) != code:  # logged again after the reason has changed or has been absent
                self._plain_peers[peer] = code
                if len(self._plain_peers) > _MOST_PEERS:
                    self._plain_peers.popitem(last=False)
                unable = "cannot be asked for now, and are computed here"
                what = "are computed here, not streamed" if code == _UNSUPPORTED else unable
                self._recorder.warning(code, f"prompts of %s port %d {what}: %s", *peer, code)
        self._answers.append((*key, answer))
