"""The asking side of one peer and the listener's desk, without sockets: what a peer can say that is of no use."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kv_handshake import Codec, Timing, WireError
from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.pacing import GatedLog
from kv_handshake.errors import CODES
from kv_handshake.stream.asker import Asker, _Peer
from kv_handshake.stream.desk import AskDesk, AskLimits, Parking
from kv_handshake.stream.messages import encode_answer, encode_ask_refusal, encode_cancel, parse_answer
from kv_handshake.stream.session import AskSession, OpenAsk
from kv_handshake.testing import sample_metadata
from kv_handshake.wire.limits import MAX_ASK_REPLY_BYTES
from kv_handshake.wire.replies import encode_refusal

NOTHING: Any = SimpleNamespace()
ENVELOPE = Codec(capabilities={"ask": "supported"}).encode_envelope(
    sample_metadata(), {"model": "sample"}, dialect=14, rank=(0, 0)
)


def greeted():
    session = AskSession(NOTHING)
    session.add(OpenAsk(1, b"question", lambda *_: None, time.monotonic() + 1))
    session.connected()
    session.receive([ENVELOPE])
    assert (session.error, session.is_greeted) == (None, True)
    return session


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([encode_answer(1, b"a"), b"more"], "unexpected-reply"),
        ([], "unexpected-reply"),
        ([ENVELOPE], "unexpected-reply"),
        ([encode_refusal("rate-limited", "later")], "unexpected-reply"),
        ([encode_refusal("unknown-command", "what is this")], "ask-unsupported"),
        ([b"\x93rubbish"], "malformed-answer"),
    ],
)
def test_a_reply_that_answers_no_ask_is_a_fault_of_the_peer(frames, code):
    session = greeted()
    assert session.receive(frames) is None
    assert session.error is not None
    assert session.error.code == code
    assert list(session.open) == [1], "its asks are not lost"


def test_answers_that_nobody_waits_for_are_a_fault_of_the_peer():
    session = greeted()
    assert session.receive([encode_answer(2, b"a")]) is None
    assert session.error is not None
    assert session.error.code == "unexpected-reply"


def test_an_answer_and_a_refusal_may_follow_an_ask_that_was_taken_back():
    session = greeted()
    session.cancel(1)
    for _ in range(2):
        assert session.receive([encode_answer(1, b"late")]) is None
        assert session.error is None
    session.receive([encode_answer(1, b"once too often")])
    assert session.error is not None
    assert session.error.code == "unexpected-reply"


def test_a_peer_that_refuses_the_greeting_is_no_peer_to_ask():
    session = AskSession(NOTHING)
    session.connected()
    assert session.receive([encode_refusal("rate-limited", "too many", retry_after_s=2.0)]) is None
    assert session.error is not None
    assert session.error.code == "refused"
    assert "rate-limited" in str(session.error)


def test_an_answer_to_an_ask_that_is_over_is_nothing():
    session = greeted()
    session.cancel(1)
    assert session.receive([encode_answer(1, b"late")]) is None
    assert session.error is None


@pytest.mark.parametrize(
    "frame", [b"\xc0" * (MAX_ASK_REPLY_BYTES + 100), msgspec.msgpack.encode(7), msgspec.msgpack.encode({"ask": 1})]
)
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


def test_a_desk_knows_only_connections_and_asks_of_its_own():
    told: list[object] = []
    desk = AskDesk(lambda *ask: told.append(ask), told.append, limits=AskLimits(), log=NOTHING)
    assert desk.connection_ended(12345) is False
    incoming: Any = SimpleNamespace(envelope=[b"peer"], sender=SimpleNamespace(descriptor=3))
    (frame,) = desk.receive(incoming, encode_cancel(7), time.monotonic())
    assert parse_answer(frame).code == "ask-cancelled"
    assert (told, desk.statistics()["asks_cancelled"]) == ([], 0)


def test_budgets_in_all_and_in_bytes():
    parking = Parking(AskLimits(per_connection=2, in_all=3, bytes_in_all=100))

    def park(connection, number, size_bytes=1):
        found = parking.park((connection,), number, size_bytes, address=connection.decode(), descriptor=1, now_s=0.0)
        return found if isinstance(found, str) else ""

    assert [park(b"a", 1), park(b"a", 2), park(b"a", 3)] == ["", "", "ask-busy"]
    assert park(b"b", 1, size_bytes=99) == "ask-busy"
    assert [park(b"b", 1, size_bytes=98), park(b"c", 1)] == ["", "ask-busy"]
    assert park(b"a", 1) == "ask-repeated"
    assert len(parking.take_of(1)) == 3
    assert (len(parking), parking._held_by_address, parking._bytes_by_address) == (0, {}, {})
    assert park(b"c", 1, size_bytes=100) == ""
    assert [each.number for each in parking.take_expired(5.0)] == [1]
    assert park(b"c", 1, size_bytes=100) == ""


def test_an_address_leaves_others_half():
    parking = Parking(AskLimits(per_connection=1000, in_all=64, bytes_in_all=6400))

    def most(address, size_bytes):
        count = 0
        while not isinstance(
            parking.park((address, b""), count, size_bytes, address=address.decode(), descriptor=1, now_s=0.0), str
        ):
            count += 1
        return count

    assert [most(b"a", 1), most(b"b", 1), most(b"c", 1)] == [32, 16, 8]
    parking.take_all()
    assert [most(b"a", 100), most(b"b", 100), most(b"c", 100)] == [32, 16, 8]


class Endless:
    """A connection whose peer repeats one answer."""

    count = 0

    def send(self, query):
        pass

    def receive(self):
        self.count += 1
        assert self.count < 10_000, "nobody else had a turn"
        return [encode_answer(1, b"late")]


def test_answers_of_one_peer_are_read_a_few_at_a_time():
    asker = Asker(Timing(), GatedLog(), security=None, seed=1)
    asker.close()
    peer, endless = _Peer(endpoint_of("10.0.0.1", 5600)), Endless()
    untyped: Any = endless
    peer.session, peer.connection = greeted(), untyped
    peer.session._late_replies = 20_000
    asker._by_connection[untyped] = peer
    assert asker._read(untyped)
    assert endless.count == 64
