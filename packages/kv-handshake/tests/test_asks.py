"""Asks over loopback: open for a while, answered in any order and from any thread, within a budget, beside other queries."""

import contextlib
import queue
import threading
import time

import pytest
import zmq
from handshake_helpers import puppet, until

from kv_handshake import Client, Codec, ConfigurationError, Listener, LocalOffer, QueryLimits, Timing
from kv_handshake.testing import sample_metadata
from kv_handshake.wire.asks import encode_answer, encode_ask, parse_answer
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_envelope

FACTORS = {"model": "sample"}
HASTY = Timing(hold_first_s=60, hold_most_s=60)
QUERY = encode_query((0, 0), dialect_of(14))


class Engine:
    """An engine behind a listener: it keeps what it is asked, and the asks that went away."""

    def __init__(self, port=0, *, ask_wait_s=5.0, on_ask=None):
        self.asked = queue.Queue()
        self.gone = queue.Queue()
        codec = Codec(capabilities={"ask": "supported"})
        self.envelope = codec.encode_envelope(sample_metadata(), FACTORS, dialect=14, rank=(0, 0))
        limits = QueryLimits(queries_per_s=0)
        self.listener = Listener("0.0.0.0", port, payloads={(0, 0): self.envelope}, limits=limits)
        self.listener.take_asks(on_ask or (lambda *ask: self.asked.put(ask)), self.gone.put, wait_s=ask_wait_s)
        self.listener.start()

    def next_ask(self):
        return self.asked.get(timeout=60)

    def count(self, name):
        return self.listener.statistics().get(name, 0)

    def close(self):
        self.listener.close()


class Asking:
    """A client, and what its asks came to."""

    def __init__(self, timing=None):
        self.client = Client(LocalOffer(factors=FACTORS), timing=timing or Timing(attempt_s=20), seed=1)
        self.replies = queue.Queue()

    def ask(self, port, payload=b"question", deadline_s=20.0, name="", host="127.0.0.1"):
        def keep(code, answer):
            self.replies.put((name, code, answer) if name else (code, answer))

        return self.client.ask(host=host, port=port, payload=payload, on_reply=keep, deadline_s=deadline_s)

    def reply(self):
        return self.replies.get(timeout=60)

    def count(self, name):
        return self.client.statistics()[name]

    def close(self):
        self.client.close()


@pytest.fixture
def make():
    """A factory of engines and askers, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, *values, **options: stack.enter_context(contextlib.closing(kind(*values, **options)))


@pytest.fixture
def engine(make):
    return make(Engine)


@pytest.fixture
def asking(make):
    return make(Asking)


def test_answers_come_in_any_order_over_one_connection(engine, asking):
    for number in range(40):
        asking.ask(engine.listener.port, f"q{number}".encode(), name=f"q{number}")
    asks = [engine.next_ask() for _ in range(40)]
    threads = [
        threading.Thread(target=engine.listener.answer, args=(ask_id, payload[::-1]))
        for ask_id, payload in reversed(asks)
    ]
    for thread in threads:
        thread.start()
    replies = {asking.reply() for _ in range(40)}
    assert replies == {(f"q{number}", "", f"q{number}".encode()[::-1]) for number in range(40)}
    assert (asking.count("attempts"), asking.count("asks_answered")) == (1, 40)
    assert (engine.count("asks_answered"), engine.count("asks_open")) == (40, 0)


def test_an_open_ask_delays_no_other_query_of_its_connection(engine, raw):
    sock = raw(zmq.DEALER, engine.listener.port)
    sock.send_multipart([b"", encode_ask(7, b"later")])
    sock.send_multipart([b"", QUERY])
    assert sock.recv_multipart()[1] == engine.envelope
    ask_id, payload = engine.next_ask()
    engine.listener.answer(ask_id, payload.upper())
    answer = parse_answer(sock.recv_multipart()[1])
    assert (answer.number, answer.payload, answer.code) == (7, b"LATER", "")


def test_an_engine_may_answer_at_once(make, asking):
    def answer(ask_id, payload):
        served.listener.answer(ask_id, payload + b"!")

    served = make(Engine, on_ask=answer)
    asking.ask(served.listener.port, b"now")
    assert asking.reply() == ("", b"now!")


def test_an_ask_that_nobody_answers_is_refused_and_counted(make, asking):
    engine = make(Engine, ask_wait_s=0.1)
    asking.ask(engine.listener.port)
    ask_id, _ = engine.next_ask()
    assert asking.reply() == ("ask-expired", b"")
    assert engine.gone.get(timeout=60) == ask_id
    engine.listener.answer(ask_id, b"too late")
    engine.listener._desk._wait_s = 20.0
    asking.ask(engine.listener.port, b"second")
    engine.listener.answer(engine.next_ask()[0], b"in time")
    assert asking.reply() == ("", b"in time")
    assert (engine.count("asks_lost"), engine.count("refused.ask-expired")) == (1, 1)


def test_a_cancelled_ask_is_forgotten_on_both_sides(engine, asking):
    cancel = asking.ask(engine.listener.port)
    ask_id, _ = engine.next_ask()
    cancel()
    assert engine.gone.get(timeout=60) == ask_id
    engine.listener.answer(ask_id, b"nobody hears it")
    asking.ask(engine.listener.port, b"next")
    engine.listener.answer(engine.next_ask()[0], b"heard")
    assert asking.reply() == ("", b"heard")
    assert asking.replies.empty()
    assert (engine.count("asks_cancelled"), engine.count("asks_open")) == (1, 0)


def test_asks_of_a_connection_that_ends_are_dropped(make, asking):
    engine = make(Engine, ask_wait_s=30.0)
    asking.ask(engine.listener.port)
    ask_id, _ = engine.next_ask()
    asking.client.close()
    assert asking.reply() == ("closed", b"")
    assert engine.gone.get(timeout=20) == ask_id  # the listener's own time is 30 s
    assert engine.count("asks_open") == 0


def test_asks_of_a_listener_that_closes_are_dropped(engine, asking):
    asking.ask(engine.listener.port)
    ask_id, _ = engine.next_ask()
    engine.listener.close()
    assert engine.gone.get(timeout=60) == ask_id
    assert asking.reply()[0] in {"connection-refused", "connection-lost"}


def test_an_open_ask_goes_over_to_the_next_connection(asking):
    """The listener takes a new socket, and so cuts the first connection behind the question; the port stays."""
    codec = Codec(capabilities={"ask": "supported"})
    envelope = codec.encode_envelope(sample_metadata(), FACTORS, dialect=14, rank=(0, 0))
    asked = queue.Queue()
    with Listener("127.0.0.1", 0, payloads={(0, 0): envelope}) as listener:
        listener.take_asks(lambda *ask: asked.put(ask), lambda _: None)
        asking.ask(listener.port, b"again")
        asked.get(timeout=60)
        listener._socket.is_outdated = True  # as after a change of keys
        listener._socket.wake()
        ask_id, payload = asked.get(timeout=60)
        listener.answer(ask_id, payload)
        assert asking.reply() == ("", b"again")
    assert asking.count("attempts") == 2


def test_asks_count_towards_the_rate_of_their_address(raw):
    listener = Listener("127.0.0.1", 0, limits=QueryLimits(queries_per_s=0.5, burst=16), clock=lambda: 100.0)
    listener.take_asks(lambda *_: None, lambda _: None)
    listener.start()
    sock = raw(zmq.DEALER, listener.port)
    for number in range(1, 30):  # two are free, sixteen are a burst
        sock.send_multipart([b"", encode_ask(number, b"")])
    refused = parse_answer(sock.recv_multipart()[1])
    assert (refused.number, refused.code, refused.retry_after_s > 0) == (19, "rate-limited", True)
    listener.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (encode_ask(1, b"x" * 4096) + b"x", "malformed-query"),
        (b"\x93\xc4\x03ask\x01" + b"x" * 5000, "oversized-query"),
        (b"\x92\xc4\x0acancel_ask\xff", "wrong-type"),
    ],
)
def test_asks_that_cannot_be_read_are_refused_as_queries(engine, raw, frame, code):
    sock = raw(zmq.DEALER, engine.listener.port)
    sock.send_multipart([b"", frame])
    refusal = decode_envelope(sock.recv_multipart()[1]).refusal
    assert refusal.code == code
    assert engine.asked.empty()


def test_a_listener_without_asks_refuses_them_as_an_older_release_does(listener, ask):
    assert decode_envelope(ask(encode_ask(1, b"x"))[0]).refusal.code == "unknown-command"
    assert decode_envelope(ask(encode_ask(1, b"x" * 300))[0]).refusal.code == "oversized-query"


def test_a_peer_that_is_not_there_fails_its_asks_at_once_and_is_left_alone(make, free_port):
    asking = make(Asking, HASTY)
    asking.ask(free_port)
    assert asking.reply() == ("connection-refused", b"")
    for _ in range(3):
        asking.ask(free_port)
        assert asking.reply() == ("connection-refused", b""), (
            "nobody listens there: that is an answer, for each of them"
        )
    assert asking.count("attempts") == 1


def test_a_peer_that_has_come_back_is_asked_again(make, free_port):
    asking = make(Asking, Timing(hold_first_s=0.01, hold_most_s=0.01))
    asking.ask(free_port)
    assert asking.reply() == ("connection-refused", b"")
    until(lambda: asking.count("remembered_failures"))
    engine = make(Engine, free_port)
    time.sleep(0.02)  # longer than it is remembered
    asking.ask(free_port)
    engine.listener.answer(engine.next_ask()[0], b"back")
    assert asking.reply() == ("", b"back")


def test_a_silent_peer_costs_its_own_asks_only(engine, asking):
    with puppet(lambda _: []) as port:
        asking.ask(port, deadline_s=0.2, name="silent")
        asking.ask(engine.listener.port, name="good")
        engine.listener.answer(engine.next_ask()[0], b"yes")
        assert {asking.reply(), asking.reply()} == {("good", "", b"yes"), ("silent", "timed-out", b"")}


def test_a_peer_without_asks_gives_its_place_up(make, engine):
    crowded, other = make(Asking, Timing(connections=1)), make(Engine)
    for each in (engine, other, engine):
        crowded.ask(each.listener.port, name=str(each.listener.port))
        each.listener.answer(each.next_ask()[0], b"answer")
        assert crowded.reply() == (str(each.listener.port), "", b"answer")
    assert crowded.count("attempts") == 3


def test_a_peer_that_answers_without_end_keeps_no_other_waiting(engine, asking):
    """It repeats answers as fast as it can; its connection ends with the first that nobody waits for."""

    def script(query):
        if query == QUERY:
            return [[engine.envelope]]
        return [[encode_answer(1_000 + number, b"nonsense")] for number in range(5_000)]

    with puppet(script) as port:
        asking.ask(port, name="flooded")
        asking.ask(engine.listener.port, name="honest")
        engine.listener.answer(engine.next_ask()[0], b"answer")
        replies = {asking.reply(), asking.reply()}
        asking.ask(port, name="flooded")
        assert asking.reply()[1] == "unexpected-reply", "until it is asked again, the code is that of its failure"
    assert replies == {("honest", "", b"answer"), ("flooded", "unexpected-reply", b"")}


def test_arguments_that_cannot_be_asked(asking):
    with pytest.raises(ConfigurationError):
        asking.ask(5600, b"x" * 4097)
    with pytest.raises(ConfigurationError):
        asking.client.ask(host="tcp://x", port=1, payload=b"", on_reply=print, deadline_s=1)
    asking.client.close()
    with pytest.raises(ConfigurationError):
        asking.ask(5600)
    with pytest.raises(ConfigurationError):
        Listener("127.0.0.1", 0).take_asks(print, print, wait_s=31.0)


def test_an_answer_that_is_too_long_is_the_callers_mistake(engine, asking):
    asking.ask(engine.listener.port)
    ask_id, _ = engine.next_ask()
    with pytest.raises(ConfigurationError):
        engine.listener.answer(ask_id, bytes(1024 * 1024 + 1))
    engine.listener.answer(ask_id, bytes(1024 * 1024))
    assert asking.reply() == ("", bytes(1024 * 1024))


def test_callbacks_that_raise_end_nothing(make, asking):
    def raises(*_):
        raise RuntimeError("a caller's mistake")

    engine = make(Engine, on_ask=raises, ask_wait_s=0.1)
    asking.client.ask(host="127.0.0.1", port=engine.listener.port, payload=b"", on_reply=raises, deadline_s=20.0)
    until(lambda: engine.count("callback_errors") == 1)
    until(lambda: asking.count("asks_failed") == 1)
    assert engine.listener.is_alive
