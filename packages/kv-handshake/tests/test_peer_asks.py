"""The asks at one peer and the listener's open asks, without sockets: limits in time, and replies of no use."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kv_handshake import Codec, TransportError, WireError
from kv_handshake.core import desk as desks
from kv_handshake.core.asks import OpenAsk, PeerAsks
from kv_handshake.core.desk import AskDesk
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.pacing import GatedLog
from kv_handshake.errors import CODES
from kv_handshake.testing import sample_metadata
from kv_handshake.wire.asks import encode_answer, encode_ask, encode_ask_refusal, encode_cancel, parse_answer
from kv_handshake.wire.limits import MAX_ASK_REPLY_BYTES
from kv_handshake.wire.replies import encode_refusal

LOG = GatedLog()
ENVELOPE = Codec(capabilities={"ask": "supported"}).encode_envelope(
    sample_metadata(), {"model": "sample"}, dialect=14, rank=(0, 0)
)


class Peer:
    """A peer with one open ask until 110 s, and the ends of its asks and of the peer."""

    def __init__(self):
        self.replies, self.ends = [], []
        self.asks = PeerAsks(endpoint_of("host", 5600), self.ends.append, attempt_s=5.0, start_s=100.0)
        self.add(1)

    def add(self, number, deadline_s=110.0):
        self.asks.add(OpenAsk(number, b"question", lambda *reply: self.replies.append(reply), deadline_s), 100.0)

    def sent(self):
        return list(iter(lambda: self.asks.next_query(100.0), None))

    def greeted(self):
        self.asks.begin_attempt(100.0)
        assert len(self.sent()) == 1
        self.asks.receive([ENVELOPE], 100.0)
        assert self.sent() == [encode_ask(number, b"question") for number in self.asks.open]
        return self


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([encode_answer(1, b"a"), b"more"], "unexpected-reply"),
        ([], "unexpected-reply"),
        ([ENVELOPE], "unexpected-reply"),
        ([encode_refusal("rate-limited", "later")], "unexpected-reply"),
        ([encode_refusal("unknown-command", "what is this")], "ask-unsupported"),
        ([b"\x93rubbish"], "malformed-answer"),
        ([encode_answer(2, b"an answer to another ask")], "unexpected-reply"),
    ],
)
def test_a_reply_that_answers_no_ask_is_a_fault_of_the_peer(frames, code):
    peer = Peer().greeted()
    peer.asks.receive(frames, 101.0)
    assert (peer.asks.is_over, peer.asks.error.code, peer.replies) == (True, code, [])
    assert not peer.asks.plan_retry(101.0, 0.0)
    peer.asks.end(101.0)
    assert (peer.replies, [error.code for error in peer.ends]) == ([(code, b"")], [code])


def test_an_answer_and_a_refusal_may_follow_an_ask_that_was_cancelled():
    peer = Peer().greeted()
    peer.asks.cancel(1)
    assert peer.sent() == [encode_cancel(1)]
    for _ in range(2):
        peer.asks.receive([encode_answer(1, b"late")], 101.0)
        assert not peer.asks.is_over
    peer.asks.receive([encode_answer(1, b"once too often")], 101.0)
    assert peer.asks.error.code == "unexpected-reply"


@pytest.mark.parametrize(
    ("greeting", "code"),
    [
        ([encode_refusal("rate-limited", "too many", retry_after_s=2.0)], "refused"),
        ([Codec().encode_envelope(sample_metadata(), {}, dialect=14)], "ask-unsupported"),
        ([], "malformed-envelope"),
    ],
)
def test_a_peer_that_does_not_announce_asks_is_sent_none(greeting, code):
    peer = Peer()
    peer.asks.begin_attempt(100.0)
    peer.sent()
    peer.asks.receive(greeting, 100.0)
    assert (peer.asks.error.code, peer.sent()) == (code, [])


def test_asks_end_with_their_time_and_a_silent_peer_with_its_own():
    peer = Peer()
    peer.add(2, deadline_s=101.0)
    peer.asks.begin_attempt(100.0)
    assert peer.asks.due_s == 101.0
    peer.asks.check_time(101.0)
    assert (peer.replies, peer.asks.is_over, peer.asks.due_s) == ([("timed-out", b"")], False, 105.0)
    peer.asks.check_time(105.0)
    assert peer.asks.error.code == "timed-out"
    patient = Peer().greeted()
    assert patient.asks.due_s == 110.0
    patient.asks.check_time(110.0)
    assert (patient.replies, patient.asks.is_idle, patient.asks.due_s) == ([("timed-out", b"")], True, 130.0)
    patient.asks.check_time(130.0)
    assert (patient.asks.is_over, patient.asks.error) == (True, None)
    patient.asks.end(130.0)
    assert patient.ends == [None]


def test_asks_without_a_place_end_with_their_time():
    peer = Peer()
    assert peer.asks.due_s == 110.0
    peer.asks.check_time(110.0)
    assert (peer.replies, peer.asks.is_over) == ([("too-many-peers", b"")], True)


def test_an_ask_moves_to_another_connection_once():
    peer = Peer().greeted()
    peer.asks.fail("connection-lost", "cut", 101.0)
    assert peer.asks.plan_retry(101.0, 0.0)
    assert (peer.asks.next_attempt_s, peer.asks.error) == (101.0, None)
    peer.add(7, deadline_s=200.0)  # between two connections: it has not been sent yet
    assert peer.asks.open[7].sendings == 0
    peer.greeted().asks.fail("connection-lost", "cut again", 102.0)
    peer.asks.fail_with(TransportError("timed-out", "the first reason stays"))
    assert peer.asks.plan_retry(102.0, 0.0), "the later one has another connection left"
    assert peer.replies == [("connection-lost", b"")]


@pytest.mark.parametrize("frame", [b"\xc0" * (MAX_ASK_REPLY_BYTES + 100), b"\x07"])
def test_what_is_no_answer_is_refused(frame):
    with pytest.raises(WireError) as refused:
        parse_answer(frame)
    assert refused.value.code == "malformed-answer"


@pytest.mark.parametrize("code", ["\n2026 ERROR", "\x1b[2J", "x" * 64, "of-a-later-release", "timed-out\0"])
def test_a_code_that_is_not_known_is_no_text_of_the_peers(code):
    frame = msgspec.msgpack.encode((b"ask", 1, code, 0.5))
    reply = parse_answer(frame)
    assert (reply.code, reply.retry_after_s) == ("refused", 0.5)


@pytest.mark.parametrize("code", CODES)
def test_a_code_that_is_known_arrives(code):
    assert parse_answer(encode_ask_refusal(1, code)).code == code


class Desk:
    """A desk, its asks and those whose askers have gone; asks come from connections named by descriptor and address."""

    def __init__(self):
        self.gone, self.counts = [], Counter()
        self.desk = AskDesk(lambda *_: None, self.gone.append, wait_s=5.0, log=LOG, counts=self.counts)

    def put(self, descriptor, address, number, size_bytes=1, query=None):
        sender = SimpleNamespace(descriptor=descriptor, address=address)
        incoming: Any = SimpleNamespace(envelope=(b"peer",), sender=sender)
        frames = self.desk.receive(incoming, query or encode_ask(number, bytes(size_bytes)), 0.0)
        return parse_answer(frames[0]).code if frames else ""

    def most(self, address, size_bytes):
        """Ask until it is refused."""
        number = 1
        while not self.put(hash(address), address, number, size_bytes):
            number += 1
        return number - 1


def test_a_desk_knows_only_connections_and_asks_of_its_own():
    made = Desk()
    assert made.desk.connection_ended(12345) is False
    assert made.put(3, "a", 7, query=encode_cancel(7)) == "ask-cancelled"
    assert (made.gone, made.counts["asks_cancelled"]) == ([], 0)


def limit(monkeypatch, per_connection, in_all, bytes_in_all):
    monkeypatch.setattr(desks, "ASKS_PER_CONNECTION", per_connection)
    monkeypatch.setattr(desks, "MOST_ASKS", in_all)
    monkeypatch.setattr(desks, "MOST_ASKED_BYTES", bytes_in_all)


def test_budgets_of_a_connection_in_all_and_in_bytes(monkeypatch):
    limit(monkeypatch, per_connection=2, in_all=4, bytes_in_all=100)
    made = Desk()
    assert [made.put(1, "a", 1), made.put(1, "a", 1), made.put(1, "a", 2), made.put(1, "a", 3)] == [
        "",
        "ask-repeated",
        "",
        "ask-busy",
    ]
    assert made.put(2, "b", 1, size_bytes=99) == "ask-busy"
    assert [made.put(2, "b", 1, size_bytes=97), made.put(3, "c", 1, 2)] == ["", "ask-busy"]
    assert made.desk.connection_ended(1)
    assert len(made.desk.take_replies(1.0)) == 2
    assert (made.gone, made.counts["asks_lost"]) == ([1, 2], 2)
    assert made.put(3, "c", 1, size_bytes=3) == ""
    assert len(made.desk.take_replies(5.0)) == 2, "their time is over"
    made.put(1, "a", 1)
    made.desk.drop_all()
    assert made.desk.asks_open == 0


def test_an_address_leaves_others_half(monkeypatch):
    limit(monkeypatch, per_connection=1000, in_all=64, bytes_in_all=6400)
    for size_bytes in (1, 100):
        made = Desk()
        assert [made.most(address, size_bytes) for address in "abc"] == [32, 16, 8]
