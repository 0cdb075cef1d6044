"""Questions and answers of streamed hand-overs between two schedulers, in memory."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_engine import streaming
from stream_wires import InMemory

from kv_handshake import Codec
from kv_handshake.core.desk import MOST_ASKS
from kv_scheduler_state.streams import StreamAnswer, StreamOutcome, StreamQuestion, StreamStanding
from vllm_adapter.scheduler.streams import _AGAIN

HAND_OVER, DIGEST = "0f" * 16, "d1" * 32
SECRETS = (b"a fleet secret, 16+",)
TICKET = {"do_remote_prefill": True, "remote_block_ids": [[]], "remote_request_id": "p-1"}
OFFER = {"kind": "offer", "request_id": "p-1", "slot": 3, "generation": 5, "tag": 5, "ticket": TICKET}
FINAL = {"kind": "final", "request_id": "p-1", "slot": 3, "generation": 5, "ticket": TICKET}
BUSY, PLAIN = {"kind": "no", "reason": "busy"}, {"kind": "no", "reason": "not-streamed"}
UNANSWERED = {"kind": "no", "reason": "unanswered"}


QUESTION = StreamQuestion("d-1", 1, "127.0.0.1", 0, HAND_OVER, DIGEST, 100, wants_final=False)


def _taken(items: list[Any]) -> list[Any]:
    taken = items.copy()
    items.clear()
    return taken


@dataclass
class Machines:
    """Both halves of the request machines, as far as a channel sees them."""

    questions: list[StreamQuestion] = field(default_factory=list)
    cancels: list[tuple[str, int]] = field(default_factory=list)
    answers: list[StreamAnswer] = field(default_factory=list)
    standings: list[Any] = field(default_factory=list)
    outcomes: list[Any] = field(default_factory=list)
    asked: dict[str, Mapping[str, object]] = field(default_factory=dict)
    gone: list[tuple[str, str]] = field(default_factory=list)
    answers_given: list[tuple[str, int, dict[str, object]]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def produced(self) -> Machines:
        return self

    @property
    def consumed(self) -> Machines:
        return self

    def ask(self, asker: str, question: Mapping[str, object]) -> None:
        if self.error is not None:
            raise self.error
        self.asked[asker] = question

    def cancel(self, asker: str, hand_over_id: str) -> None:
        self.gone.append((asker, hand_over_id))

    def __getattr__(self, name: str) -> Any:
        """Return what takes the items of a kind: `take_answers` and its like."""
        return partial(_taken, self.__dict__[name.removeprefix("take_")])

    def answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        self.answers_given.append((request_id, number, dict(answer)))
        return True


class Pair:
    """A producer and a consumer with a channel each."""

    def __init__(self, ours: Sequence[bytes] = (), theirs: Sequence[bytes] = ()) -> None:
        self.wire = wire = InMemory()
        self.producer: Any = Machines()
        self.consumer: Any = Machines()
        self.there = streaming(self.producer, listener=wire, secrets=theirs)
        self.here = streaming(self.consumer, client=wire, secrets=ours)

    def ask(self, **changes: Any) -> None:
        self.consumer.questions.append(QUESTION._replace(**{"port": self.wire.port, **changes}))
        self.turn()

    def turn(self) -> None:
        for channel in (self.here, self.there, self.here):
            channel.receive(0.0)
            channel.send()

    def asker(self, count: int = 1) -> str:
        """Return the asker of the latest of so many questions."""
        assert len(self.producer.asked) == count
        return list(self.producer.asked)[-1]

    def answered(self) -> tuple[str, int, dict[str, object]]:
        self.turn()
        return self.consumer.answers_given.pop(0)


@pytest.mark.parametrize("secrets", [(), SECRETS])
@pytest.mark.parametrize("answer", [OFFER, FINAL, {"kind": "no", "reason": "digest-mismatch"}])
def test_a_question_is_answered_with_a_later_step(secrets: Sequence[bytes], answer: dict[str, Any]) -> None:
    pair = Pair(secrets, secrets)
    pair.ask()
    asker = pair.asker()
    asked = dict(pair.producer.asked[asker])
    assert len(str(asked.pop("nonce"))) == 32
    assert asked == {"hand_over_id": HAND_OVER, "number": 1, "digest": DIGEST, "tokens": 100, "wants_final": False}
    assert not pair.consumer.answers_given
    pair.producer.answers.append(StreamAnswer(asker, 1, answer))
    request_id, number, read = pair.answered()
    assert (request_id, number, {key: read[key] for key in answer}) == ("d-1", 1, answer)


def test_a_question_that_is_taken_back_is_forgotten_by_the_peer() -> None:
    pair = Pair()
    pair.ask()
    asker = pair.asker()
    pair.consumer.cancels.append(("d-1", 1))
    pair.turn()
    assert pair.producer.gone == [(asker, "0f" * 16)]
    pair.producer.answers.append(StreamAnswer(asker, 1, OFFER))  # crosses with the end of the question
    pair.ask(number=2)
    pair.producer.answers.append(StreamAnswer(pair.asker(2), 1, FINAL))
    assert pair.answered()[1] == 2


@pytest.mark.parametrize(("ours", "theirs"), [((), SECRETS), (SECRETS, ()), (SECRETS, (b"the secret of others",))])
def test_engines_of_different_secrets_hand_over_whole_and_say_so_once(
    ours: Sequence[bytes], theirs: Sequence[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(ours, theirs)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            pair.ask(number=number)
            if not theirs:  # it opens every question, and its answer has no seal
                pair.producer.answers.append(StreamAnswer(pair.asker(number), 1, OFFER))
            assert pair.answered() == ("d-1", number, {**PLAIN, "code": "hand-over-seal"})
    assert len(pair.producer.asked) == (0 if theirs else 2)
    (line,) = [each for each in caplog.messages if "are computed here" in each]
    assert line.endswith(": hand-over-seal"), "also where the peer could not read the question"
    assert not any(secret.decode() in each for each in caplog.messages for secret in (*SECRETS, *theirs))


def test_a_reason_is_said_again_once_it_is_another_one_or_was_gone_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    pair, peer = Pair(), ("127.0.0.1", 5600)
    channel: Any = pair.here
    question = {"wants_final": False}

    def reported(code: str, payload: bytes = b"") -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            channel._on_answer(("d-1", 1), peer, question, code, payload)
        return len(caplog.messages)

    assert [reported(code) for code in ("connection-refused", "connection-refused", "ask-unsupported")] == [1, 0, 1]
    channel._codec = SimpleNamespace(read_answer=lambda *_: {"kind": "no", "reason": "busy"})
    assert reported("", b"an answer") == 0
    assert reported("ask-unsupported") == 1


def test_what_the_machines_refuse_is_answered_with_a_no() -> None:
    pair = Pair()
    pair.producer.error = RuntimeError("a mistake of ours")
    pair.ask()
    assert pair.answered()[2]["reason"] == "withdrawn"


def test_an_answer_that_cannot_be_sent_is_a_no() -> None:
    pair = Pair()
    pair.ask()
    pair.producer.answers.append(StreamAnswer(pair.asker(), 1, {**OFFER, "ticket": {"ids": [7] * 600_000}}))
    assert pair.answered()[2]["reason"] == "withdrawn"


def test_a_question_that_cannot_be_asked_makes_its_hand_over_plain() -> None:
    pair = Pair()
    pair.ask(digest="")
    assert pair.answered() == ("d-1", 1, PLAIN)


@pytest.mark.parametrize("code", sorted(_AGAIN))
def test_no_answer_is_not_taken_for_a_peers_word(code: str) -> None:
    """Its word that the prompt is on its way makes the machines wait for longer."""
    pair = Pair()
    pair.here._on_answer(("d-1", 1), ("127.0.0.1", 5600), {"wants_final": False}, code, b"")
    pair.turn()
    assert pair.consumer.answers_given == [("d-1", 1, {**UNANSWERED, "code": code})]
    pair.ask()
    pair.producer.answers.append(StreamAnswer(pair.asker(), 1, {**BUSY}))
    pair.consumer.answers_given.clear()
    assert pair.answered()[2]["reason"] == "busy"


@pytest.mark.parametrize("result", ["read-whole", "computed-here", "given-up"])
def test_a_prompt_that_is_not_streamed_is_counted_and_said_with_its_peer_and_reason(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair()
    words = {"read-whole": "read once it is finished", "computed-here": "computed here", "given-up": "policy fail: "}
    with caplog.at_level(logging.WARNING):
        pair.consumer.outcomes.append(StreamOutcome("d-1", "unknown-id", result, "10.0.0.1", 5600, "0f" * 16))
        pair.turn()
        (line,) = caplog.messages
        assert all(part in line for part in ("d-1", "0f0f0f0f ", "10.0.0.1 port 5600", "unknown-id", words[result]))
        # A reason that was said of the peer as a whole is counted alone.
        pair.here._on_answer(("d-2", 1), ("10.0.0.1", 5600), {"wants_final": False}, "ask-unsupported", b"")
        pair.consumer.outcomes.append(StreamOutcome("d-2", "ask-unsupported", result, "10.0.0.1", 5600, "0e" * 16))
        pair.turn()
    assert (pair.here._recorder.take() or {})["num_unstreamed_prompts"] == ["unknown-id", "ask-unsupported"]
    assert len(caplog.messages) == 2


# Answers that stand: the listener's thread gives them by itself, also while the engine is in a step or at rest.


def test_an_offer_is_given_while_a_step_runs_but_not_to_who_wants_the_final_ticket() -> None:
    pair = Pair()
    pair.producer.standings.append(StreamStanding(HAND_OVER, DIGEST, OFFER))
    pair.turn()
    pair.ask()
    assert [answer["kind"] for *_, answer in pair.consumer.answers_given] == ["offer"]
    assert not pair.producer.asked, "no step was needed"
    pair.ask(number=2, wants_final=True)
    assert len(pair.consumer.answers_given) == 1
    assert [question["wants_final"] for question in pair.producer.asked.values()] == [True]


def test_the_board_of_answers_has_a_bound() -> None:
    pair = Pair()
    pair.producer.standings.extend(StreamStanding(f"{number:032x}", DIGEST, FINAL) for number in range(5000))
    pair.turn()
    assert len(pair.there._board) == 4096
    assert f"{4999:032x}" in pair.there._board


class _PublishedMeanwhile(dict[int, Any]):
    """An inbox during whose use an answer is published."""

    def __init__(self, board: dict[str, Any]) -> None:
        self._board = board

    def __setitem__(self, key: int, question: Any) -> None:
        self._board[HAND_OVER] = "", FINAL
        super().__setitem__(key, question)


def test_an_answer_that_is_published_while_a_question_arrives_reaches_it_without_a_further_step() -> None:
    """The engine rests from then on: nobody would take the question out of the inbox."""
    pair = Pair()
    channel: Any = pair.there
    channel._questions = _PublishedMeanwhile(channel._board)
    pair.consumer.questions.append(QUESTION._replace(port=pair.wire.port))
    pair.here.send()
    pair.here.receive(0.0)
    assert [answer["kind"] for *_, answer in pair.consumer.answers_given] == ["final"]
    assert not channel._questions


# Questions that wait


@pytest.mark.parametrize("cancels", [1.0, 0.5, 0.0])
def test_what_waits_for_an_engine_at_rest_is_bounded(cancels: float) -> None:
    """Strangers ask without end: what they take back, or what the listener's desk lets expire, leaves nothing behind."""
    machines: Any = Machines()
    wire: Any = InMemory()
    codec, open_ids = Codec(), deque[int]()
    channel = streaming(machines, listener=wire, wait_s=30.0)
    draw = random.Random(1)
    for number in range(1, 8_001):
        reported = {"hand_over_id": f"{number:032x}", "number": number, "nonce": "0" * 32, "digest": "d" * 64}
        wire._on_ask(number, codec.question_payload({**reported, "tokens": 100, "wants_final": False}, ()))
        open_ids.append(number)
        if draw.random() < cancels or len(open_ids) > MOST_ASKS:
            wire._on_gone(open_ids.popleft())
        if number == 1_000:
            channel.receive(0.0)  # the last step before it rests
        assert len(channel._questions) + len(channel._gone_askers) <= 2 * MOST_ASKS, number
    while open_ids:
        wire._on_gone(open_ids.popleft())
    channel.receive(0.0)
    assert (channel._questions, list(channel._gone_askers)) == ({}, [])
