"""Questions and answers of streamed hand-overs between two schedulers: in memory, and over real ZeroMQ on loopback."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_engine import streaming
from stream_wires import InMemory, OverZeroMq

from kv_handshake import Codec
from kv_handshake.core.desk import MOST_ASKS, AskDesk
from kv_handshake.core.pacing import GatedLog
from kv_handshake.core.server import Incoming, Sender
from kv_handshake.wire.asks import encode_ask, encode_cancel
from kv_scheduler_state.streams import StreamOutcome
from vllm_adapter.observe.cause_log import CauseLog
from vllm_adapter.scheduler.streams import _AGAIN

SECRETS = (b"a fleet secret, 16+",)
TICKET = {"do_remote_prefill": True, "remote_block_ids": [[]], "remote_request_id": "p-1"}
OFFER = {"kind": "offer", "request_id": "p-1", "slot": 3, "generation": 5, "tag": 5, "ticket": TICKET}
FINAL = {"kind": "final", "request_id": "p-1", "slot": 3, "generation": 5, "ticket": TICKET}
BUSY, PLAIN = {"kind": "no", "reason": "busy"}, {"kind": "no", "reason": "not-streamed"}
UNANSWERED = {"kind": "no", "reason": "unanswered"}


@dataclass(frozen=True)
class Question:
    """A question of the consumer's machines."""

    host: str
    port: int
    request_id: str = "d-1"
    number: int = 1
    hand_over_id: str = "0f" * 16
    digest: str = "d1" * 32
    tokens: int = 100
    wants_final: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer of the producer's machines."""

    asker: str
    answer: dict[str, object]


def _taken(items: list[Any]) -> list[Any]:
    taken = items.copy()
    items.clear()
    return taken


@dataclass
class Machines:
    """Both halves of the request machines, as far as a channel sees them."""

    questions: list[Question] = field(default_factory=list)
    cancels: list[tuple[str, int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
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

    def take_answers(self) -> Sequence[Answer]:
        return _taken(self.answers)

    def take_standings(self) -> Sequence[Any]:
        return _taken(self.standings)

    def take_questions(self) -> Sequence[Question]:
        return _taken(self.questions)

    def take_outcomes(self) -> Sequence[Any]:
        return _taken(self.outcomes)

    def take_cancels(self) -> Sequence[tuple[str, int]]:
        return _taken(self.cancels)

    def answered(self, request_id: str, number: int, answer: Mapping[str, object], *, now_s: float) -> bool:
        self.answers_given.append((request_id, number, dict(answer)))
        return True


class Pair:
    """A producer and a consumer with a channel each."""

    def __init__(self, wire: Any, ours: Sequence[bytes] = (), theirs: Sequence[bytes] = ()) -> None:
        self.wire = wire
        self.producer: Any = Machines()
        self.consumer: Any = Machines()
        log = CauseLog(time.monotonic)
        self.there = streaming(self.producer, listener=wire.listener(), log=log, secrets=theirs)
        self.here = streaming(self.consumer, client=wire.client(), log=log, secrets=ours)
        wire.start()

    def ask(self, **changes: Any) -> None:
        self.consumer.questions.append(Question(**{"host": "127.0.0.1", "port": self.wire.port, **changes}))
        self.turn()

    def turn(self) -> None:
        for channel in (self.here, self.there, self.here):
            channel.receive(0.0)
            channel.send()

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + 8
        while not condition():
            assert time.monotonic() < end_s, "it did not happen in time"
            self.turn()
            time.sleep(0.001)

    def asker(self, count: int = 1) -> str:
        """Return the latest question's asker, once so many have come."""
        self.until(lambda: len(self.producer.asked) >= count)
        return list(self.producer.asked)[-1]

    def answered(self) -> tuple[str, int, dict[str, object]]:
        self.until(lambda: self.consumer.answers_given)
        return self.consumer.answers_given.pop(0)


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=[InMemory, OverZeroMq])
def wire(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.param()
    yield made
    made.close()


@pytest.mark.parametrize("secrets", [(), SECRETS])
@pytest.mark.parametrize("answer", [OFFER, FINAL, {"kind": "no", "reason": "digest-mismatch"}])
def test_a_question_is_answered_with_a_later_step(wire: Any, secrets: Sequence[bytes], answer: dict[str, Any]) -> None:
    pair = Pair(wire, secrets, secrets)
    pair.ask()
    asker = pair.asker()
    asked = dict(pair.producer.asked[asker])
    assert len(str(asked.pop("nonce"))) == 32
    assert asked == {
        "hand_over_id": "0f" * 16,
        "number": 1,
        "digest": "d1" * 32,
        "tokens": 100,
        "wants_final": False,
    }
    assert not pair.consumer.answers_given
    pair.producer.answers.append(Answer(asker, answer))
    request_id, number, read = pair.answered()
    assert (request_id, number, {key: read[key] for key in answer}) == ("d-1", 1, answer)


def test_many_questions_are_open_at_once_and_answered_in_any_order(wire: Any) -> None:
    pair = Pair(wire)
    for number in range(1, 31):
        pair.ask(number=number, request_id=f"d-{number}")
    pair.asker(30)
    numbers = {asker: question["number"] for asker, question in pair.producer.asked.items()}
    for asker in reversed(numbers):
        pair.producer.answers.append(Answer(asker, {**OFFER, "slot": numbers[asker]}))
    pair.until(lambda: len(pair.consumer.answers_given) == 30)
    assert {(f"d-{read['slot']}", read["slot"]) for *_, read in pair.consumer.answers_given} == {
        (request_id, number) for request_id, number, _ in pair.consumer.answers_given
    }


def test_a_question_that_is_taken_back_is_forgotten_by_the_peer(wire: Any) -> None:
    pair = Pair(wire)
    pair.ask()
    asker = pair.asker()
    pair.consumer.cancels.append(("d-1", 1))
    pair.until(lambda: pair.producer.gone)
    assert pair.producer.gone == [(asker, "0f" * 16)]
    pair.producer.answers.append(Answer(asker, OFFER))  # crosses with the end of the question
    pair.ask(number=2)
    pair.producer.answers.append(Answer(pair.asker(2), FINAL))
    assert pair.answered()[1] == 2


@pytest.mark.parametrize(("ours", "theirs"), [((), SECRETS), (SECRETS, ()), (SECRETS, (b"the secret of others",))])
def test_engines_of_different_secrets_hand_over_whole_and_say_so_once(
    wire: Any, ours: Sequence[bytes], theirs: Sequence[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(wire, ours, theirs)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            pair.ask(number=number)
            if not theirs:  # it opens every question, and its answer has no seal
                pair.producer.answers.append(Answer(pair.asker(number), OFFER))
            assert pair.answered() == ("d-1", number, {**PLAIN, "code": "hand-over-seal"})
    assert len(pair.producer.asked) == (0 if theirs else 2)
    (line,) = [each for each in caplog.messages if "are computed here" in each]
    assert line.endswith(": hand-over-seal"), "also where the peer could not read the question"
    assert not any(secret.decode() in each for each in caplog.messages for secret in (*SECRETS, *theirs))


def test_a_peer_that_is_not_there_is_not_asked_again(wire: Any, free_port: int) -> None:
    pair = Pair(wire)
    pair.ask(port=free_port)
    assert pair.answered() == ("d-1", 1, {**PLAIN, "code": "connection-refused"})


def test_a_reason_is_said_again_once_it_is_another_one_or_was_gone_meanwhile(
    wire: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pair, peer = Pair(wire), ("127.0.0.1", 5600)
    channel: Any = pair.here
    question = {"wants_final": False}

    def told(code: str, payload: bytes = b"") -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            channel._on_answer(("d-1", 1), peer, question, code, payload)
        return len(caplog.messages)

    assert [told(code) for code in ("connection-refused", "connection-refused", "ask-unsupported")] == [1, 0, 1]
    codec = SimpleNamespace(read_answer=lambda *_: {"kind": "no", "reason": "busy"})
    channel._asks = replace(channel._asks, codec=codec)
    assert told("", b"an answer") == 0
    assert told("ask-unsupported") == 1


def test_what_the_machines_refuse_is_answered_with_a_no(wire: Any) -> None:
    pair = Pair(wire)
    pair.producer.error = RuntimeError("a mistake of ours")
    pair.ask()
    assert pair.answered()[2]["reason"] == "withdrawn"


def test_an_answer_that_cannot_be_sent_is_a_no(wire: Any) -> None:
    pair = Pair(wire)
    pair.ask()
    pair.producer.answers.append(Answer(pair.asker(), {**OFFER, "ticket": {"ids": [7] * 600_000}}))
    assert pair.answered()[2]["reason"] == "withdrawn"


def test_a_question_that_cannot_be_asked_makes_its_hand_over_plain(wire: Any) -> None:
    pair = Pair(wire)
    pair.ask(digest="")
    assert pair.answered() == ("d-1", 1, PLAIN)


def test_after_the_end_nothing_is_asked_or_answered(wire: Any) -> None:
    pair = Pair(wire)
    pair.ask()
    asker = pair.asker()
    pair.there.close()
    pair.producer.answers.append(Answer(asker, OFFER))
    pair.there.receive(0.0)
    pair.there.send()
    pair.here.close()
    pair.here.close()
    assert pair.answered() == ("d-1", 1, {**UNANSWERED, "code": "closed"})


@pytest.mark.parametrize("code", sorted(_AGAIN))
def test_no_answer_is_not_taken_for_a_peers_word(code: str) -> None:
    """Its word that the prompt is on its way makes the machines wait for longer."""
    pair = Pair(InMemory())
    pair.here._on_answer(("d-1", 1), ("127.0.0.1", 5600), {"wants_final": False}, code, b"")
    pair.turn()
    assert pair.consumer.answers_given == [("d-1", 1, {**UNANSWERED, "code": code})]
    pair.ask()
    pair.producer.answers.append(Answer(pair.asker(), {**BUSY}))
    pair.consumer.answers_given.clear()
    assert pair.answered()[2]["reason"] == "busy"


@pytest.mark.parametrize("result", ["read-whole", "computed-here", "given-up"])
def test_a_prompt_that_is_not_streamed_is_counted_and_said_with_its_peer_and_reason(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(InMemory())
    words = {"read-whole": "read once it is finished", "computed-here": "computed here", "given-up": "policy decides"}
    with caplog.at_level(logging.WARNING):
        pair.consumer.outcomes.append(StreamOutcome("d-1", "unknown-id", result, "10.0.0.1", 5600, "0f" * 16))
        pair.turn()
        (line,) = caplog.messages
        assert all(part in line for part in ("d-1", "0f0f0f0f ", "10.0.0.1 port 5600", "unknown-id", words[result]))
        # A reason that was said of the peer as a whole is counted alone.
        pair.here._on_answer(("d-2", 1), ("10.0.0.1", 5600), {"wants_final": False}, "ask-unsupported", b"")
        pair.consumer.outcomes.append(StreamOutcome("d-2", "ask-unsupported", result, "10.0.0.1", 5600, "0e" * 16))
        pair.turn()
    assert (pair.here._recorder.take() or {})["unstreamed_codes"] == ["unknown-id", "ask-unsupported"]
    assert len(caplog.messages) == 2


def test_a_hook_waits_for_nothing(wire: Any, free_port: int) -> None:
    """A step with a hundred questions to a peer that is not there, and as many to one that is silent for a while."""
    pair = Pair(wire)
    for number in range(1, 101):
        pair.consumer.questions.append(Question("127.0.0.1", pair.wire.port, number=number))
    began_s = time.perf_counter()
    pair.here.receive(0.0)
    pair.here.send()
    assert time.perf_counter() - began_s < 1.0
    pair.asker(100)


class Desk:
    """A listener without sockets: the real desk, and connections that ask, take back and wait until their asks expire."""

    def __init__(self) -> None:
        self._log = GatedLog()
        self.now_s = 0.0
        self.desk: AskDesk | None = None

    def take_asks(self, on_ask: Any, on_gone: Any, *, wait_s: float) -> None:
        self.desk = AskDesk(on_ask, on_gone, wait_s=wait_s, log=self._log, counts=Counter())

    def answer(self, ask_id: int, payload: bytes) -> None:
        assert self.desk is not None
        self.desk.put(ask_id, payload)

    def send(self, connection: int, query: bytes) -> None:
        assert self.desk is not None
        sender = Sender(f"10.0.{connection}.9", connection)
        self.desk.receive(Incoming((b"\0%d" % connection, b""), b"", sender), query, self.now_s)
        self.desk.take_replies(self.now_s)


@pytest.mark.parametrize("cancels", [1.0, 0.5, 0.0])
def test_what_waits_for_an_engine_at_rest_is_bounded(cancels: float) -> None:
    """Strangers ask without end: what they take back or wait for too long leaves nothing behind."""
    machines: Any = Machines()
    listener: Any = Desk()
    codec = Codec()
    channel = streaming(machines, listener=listener, wait_s=30.0)
    draw = random.Random(1)
    for number in range(1, 8_001):
        told = {"hand_over_id": f"{number:032x}", "number": number, "nonce": "0" * 32, "digest": "d" * 64}
        payload = codec.question_payload({**told, "tokens": 100, "wants_final": False}, ())
        connection = draw.randrange(8)
        listener.send(connection, encode_ask(number, payload))
        if draw.random() < cancels:
            listener.send(connection, encode_cancel(number))
        listener.now_s += 0.01
        if number == 1_000:
            channel.receive(0.0)  # the last step before it rests
        waiting = len(channel._questions) + len(channel._gone_askers)
        assert waiting <= 2 * MOST_ASKS, number
    channel.receive(0.0)
    assert (channel._questions, list(channel._gone_askers)) == ({}, [])
