"""The real listener over loopback: every kind of socket, restarts, limits, address families, encryption."""

import socket
import struct
import threading
import time

import msgspec
import pytest
import zmq

from kv_handshake import Client, ConfigurationError, Listener, LocalOffer, Outcome, QueryLimits, Timing, TransportError
from kv_handshake.security import ClientSecurity, ServerSecurity, generate_keypair
from kv_handshake.sockets import RouterSocket
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.dialects import NEWEST_DIALECT, OLDEST_DIALECT, dialect_of
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_clock, decode_envelope

QUERY = encode_query((0, 3), dialect_of(14))
OLD_QUERY = encode_query((0, 3), dialect_of(4))
ENVELOPES = sample_envelopes([(0, rank) for rank in range(8)])


def code_of(frames):
    return decode_envelope(frames[0]).refusal.code


def until(condition, limit_s=20.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def check_listener(listener, ask):
    """Check that a running listener answers valid queries and survives and refuses bad ones."""
    ranks = [(0, 0), (0, 1), (1, 0)]
    envelopes = sample_envelopes(ranks)
    listener.replace(envelopes)
    for rank in ranks:
        for version in range(OLDEST_DIALECT, NEWEST_DIALECT + 1):
            dialect = dialect_of(version)
            if dialect.query_fields == 2 and rank[0]:
                continue
            frames = list(ask(encode_query(rank, dialect)))
            assert frames[0] == envelopes[rank], f"rank {rank} in version {version} got other bytes"
            assert len(frames) == 1 + dialect.has_clock_frame, f"version {version} got {len(frames)} frames"
            if dialect.has_clock_frame:
                decode_clock(frames[1])
    for query, code in (
        (encode_query((0, 9), dialect_of(14)), "unknown-rank"),
        (b"", "malformed-query"),
        (b"\xc1" * 40, "malformed-query"),
        (msgspec.msgpack.encode([b"get_meta_msg"]), "wrong-arity"),
        (msgspec.msgpack.encode([b"other", 1]), "unknown-command"),
        (b"x" * 1000, "oversized-query"),
    ):
        refusal = decode_envelope(ask(query)[0]).refusal
        assert getattr(refusal, "code", "") == code, f"{query[:40]!r} was not refused as {code}: {refusal}"
    listener.replace({})
    refusal = decode_envelope(ask(encode_query((0, 0), dialect_of(14)))[0]).refusal
    assert getattr(refusal, "code", "") == "not-ready", f"nothing to serve, but the answer is {refusal}"
    listener.replace(envelopes)
    assert ask(encode_query((0, 1), dialect_of(14)))[0] == envelopes[0, 1], "no good answer after the bad queries"
    assert listener.statistics()["answered"] > 0, "good answers are not counted"


def test_it_passes_the_checks_for_any_listener(listener, raw):
    sock = raw(zmq.DEALER, listener.port)

    def ask(query):
        sock.send_multipart([b"", query])
        return sock.recv_multipart()[1:]

    check_listener(listener, ask)


@pytest.mark.never_wrong("B16")
def test_a_req_socket_gets_no_rank_of_an_engine_with_pipeline_stages(listener, ask, client, caplog):
    """vLLM's own reader asks with one, and pairs the layers of every rank with all of its own."""
    stages = sample_envelopes([(0, 0), (1, 0)])
    listener.replace(stages)
    for query in (encode_query((1, 0), dialect_of(14)), encode_query((0, 0), dialect_of(14))):
        frames = ask(query)
        assert code_of(frames) == "pipeline-stages"
        assert decode_clock(frames[1]) > 0
    assert [code_of(ask(encode_query((0, 0), dialect_of(4))))] == ["pipeline-stages"]
    assert caplog.text.count("asks as vLLM's own connector does") == 1
    assert client.fetch(
        host="127.0.0.1", port=listener.port, ranks=[(0, 0), (1, 0)], engine_id="engine-a", dialect=14
    ).is_ok
    listener.replace({(0, 0): stages[0, 0]})
    assert ask(encode_query((0, 0), dialect_of(14)))[0] == stages[0, 0]


def test_req_socket_of_either_dialect(ask):
    payload, clock = ask(QUERY)
    assert payload == ENVELOPES[0, 3]
    assert abs(decode_clock(clock) - time.perf_counter()) < 5
    assert ask(OLD_QUERY) == [ENVELOPES[0, 3]]


def test_dealer_socket_without_delimiter(listener, raw):
    sock = raw(zmq.DEALER, listener.port)
    sock.send(QUERY)
    assert sock.recv_multipart()[0] == ENVELOPES[0, 3]


@pytest.mark.parametrize("frames", [[b"", b"a", b"b"], [b"a", QUERY], [QUERY, b""], [b""] * 50, [b"", QUERY, QUERY]])
def test_messages_that_are_no_query(listener, raw, frames):
    sock = raw(zmq.DEALER, listener.port)
    sock.send_multipart(frames)
    assert code_of(sock.recv_multipart()[1:]) == "wrong-frames"
    assert listener.statistics()["refused.wrong-frames"] == 1


def test_router_socket(listener, raw):
    sock = raw(zmq.ROUTER, listener.port)
    sock.setsockopt(zmq.CONNECT_ROUTING_ID, b"peer")
    sock.connect(f"tcp://127.0.0.1:{listener.port}")
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for _ in range(100):
        try:
            sock.send_multipart([b"peer", b"", QUERY])
            break
        except zmq.ZMQError:  # not connected yet
            time.sleep(0.02)
    assert sock.recv_multipart()[2] == ENVELOPES[0, 3]


@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.PUB, zmq.SUB, zmq.PAIR, zmq.PULL])
def test_sockets_that_do_not_fit_change_nothing(listener, raw, ask, kind):
    sock = raw(kind, listener.port)
    if kind in (zmq.PUSH, zmq.PUB, zmq.PAIR):
        sock.setsockopt(zmq.SNDTIMEO, 200)
        try:
            sock.send(QUERY)
        except zmq.Again:
            assert kind in (zmq.PUSH, zmq.PAIR)
    assert ask(QUERY)[0] == ENVELOPES[0, 3]


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, b"\xff\0\0\0\0\0\0\0\x01\x7f", b"\0" * 64]
)
def test_bare_tcp_bytes_change_nothing(listener, ask, data):
    with socket.create_connection(("127.0.0.1", listener.port)) as plain:
        plain.sendall(data)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert ask(QUERY)[0] == ENVELOPES[0, 3]
    assert listener.is_alive


def test_oversized_messages(listener, raw, ask):
    sock = raw(zmq.REQ, listener.port)
    sock.send(b"x" * 100_000)
    assert code_of(sock.recv_multipart()) == "oversized-query"
    flood = raw(zmq.DEALER, listener.port)
    flood.send(b"x" * 2_000_000)  # beyond what is read at all: the connection is closed
    flood.setsockopt(zmq.RCVTIMEO, 200)
    with pytest.raises(zmq.Again):
        flood.recv()
    assert ask(QUERY)[0] == ENVELOPES[0, 3]


def test_a_peer_that_never_reads_blocks_nobody(raw):
    big = {(0, 3): ENVELOPES[0, 3] + bytes(500_000)}
    listener = Listener("127.0.0.1", 0, payloads=big, limits=QueryLimits(queries_per_s=0))
    listener.start()
    greedy = raw(zmq.DEALER, listener.port)
    greedy.setsockopt(zmq.RCVHWM, 1)
    for _ in range(900):
        greedy.send_multipart([b"", QUERY])
    sock = raw(zmq.REQ, listener.port)
    sock.send(QUERY)
    assert sock.recv_multipart()[0] == big[0, 3]
    until(lambda: listener.statistics()["unsent"] > 0)
    listener.close()


def test_rate_limit_is_per_address_and_refuses_with_a_time(raw):
    client = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=30, attempt_s=20, retry_first_s=0.05))

    def clock():
        """Stand still until the client tries a second time."""
        return 110.0 if client.statistics()["attempts"] > 1 else 100.0

    limits = QueryLimits(queries_per_s=5, burst=3)
    listener = Listener("127.0.0.1", 0, payloads=ENVELOPES, limits=limits, clock=clock)
    listener.start()
    codes = []
    refusal = None
    for _ in range(6):
        sock = raw(zmq.REQ, listener.port)
        sock.send(QUERY)
        refusal = decode_envelope(sock.recv_multipart()[0]).refusal
        codes.append(refusal.code if refusal else "")
    assert codes == ["", "", "", "rate-limited", "rate-limited", "rate-limited"]
    assert refusal.retry_after_s == pytest.approx(0.2)
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14)
    assert (outcome.code, outcome.attempts) == ("", 2)
    assert outcome.elapsed_s >= 0.2, "our own client waits as long as it is told"
    client.close()
    listener.close()


def test_log_is_no_flood(listener, raw, caplog):
    sock = raw(zmq.DEALER, listener.port)
    for _ in range(300):
        sock.send_multipart([b"", b"a", b"b"])
        sock.recv_multipart()
    assert len(caplog.records) == 1
    assert listener.statistics()["log_lines_held_back"] == 299


def test_taken_port_is_reported_at_once(listener):
    second = Listener("127.0.0.1", listener.port)
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        second.start()
    assert time.monotonic() - began < 5
    assert caught.value.code == "bind-failed"
    assert caught.value.context["port"] == listener.port
    assert str(listener.port) in str(caught.value)


def test_address_of_another_machine_is_reported_at_once():
    with pytest.raises(TransportError, match=r"192\.0\.2\.1"):
        Listener("192.0.2.1", 0).start()


def test_lifecycle(free_port):
    listener = Listener("127.0.0.1", free_port, payloads=ENVELOPES)
    listener.close()
    with pytest.raises(ConfigurationError):
        listener.start()
    closings_s = []
    for _ in range(3):
        listener = Listener("127.0.0.1", free_port, payloads=ENVELOPES)
        listener.start()
        with pytest.raises(ConfigurationError):
            listener.start()
        assert listener.is_alive
        began = time.monotonic()
        listener.close()
        listener.close()
        closings_s.append(time.monotonic() - began)
        assert not listener.is_alive
    assert min(closings_s) < 0.9, "close waits for a time-out instead of waking the thread"


def test_whatever_breaks_is_restarted_and_counted(listener, raw, monkeypatch):
    real = listener._core.respond
    failures = iter([RuntimeError("first"), zmq.ZMQError(zmq.ETERM), MemoryError()])

    def respond(query, **facts):
        for failure in failures:
            raise failure
        return real(query, **facts)

    monkeypatch.setattr(listener._core, "respond", respond)

    def is_answered():
        sock = raw(zmq.REQ, listener.port)
        sock.setsockopt(zmq.RCVTIMEO, 500)
        sock.send(QUERY)
        try:
            return sock.recv_multipart()[0] == ENVELOPES[0, 3]
        except zmq.Again:
            return False  # lost with the socket that broke: whoever asks does so again

    until(is_answered, 60)
    assert listener.statistics()["restarts"] == 3
    assert listener.is_alive


def test_replacing_while_serving(listener, ask):
    stop = threading.Event()
    versions = [{(0, 3): b"a" * 3000}, {(0, 3): b"b" * 3000}]

    def swap():
        while not stop.is_set():
            for version in versions:
                listener.replace(version)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = {ask(QUERY)[0] for _ in range(500)} - {ENVELOPES[0, 3]}
    stop.set()
    swapper.join()
    assert seen <= {b"a" * 3000, b"b" * 3000}


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6(client):
    listener = Listener("::1", 0, payloads=ENVELOPES)
    listener.start()
    outcome = client.fetch(host="::1", port=listener.port, ranks=[(0, 3)], dialect=14)
    listener.close()
    assert outcome.is_ok, outcome


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::"])
def test_a_wildcard_serves_every_interface(host, client):
    listener = Listener(host, 0, payloads=ENVELOPES)
    listener.start()
    assert client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14).is_ok
    listener.close()


@pytest.fixture
def keys():
    return {name: generate_keypair() for name in ("server", "friend", "stranger")}


def secure_client(keys, name, *, server="server"):
    return Client(
        LocalOffer(policy="off"),
        security=ClientSecurity(keys[name][0], keys[name][1], keys[server][0]),
        timing=Timing(deadline_s=30, attempt_s=20),
    )


def test_encrypted_channel_lets_friends_in_and_names_strangers(keys):
    security = ServerSecurity(keys["server"][0], keys["server"][1], {keys["friend"][0]: "friend"})
    listener = Listener("127.0.0.1", 0, payloads=ENVELOPES, security=security)
    listener.start()
    friend, stranger = secure_client(keys, "friend"), secure_client(keys, "stranger")
    assert friend.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14).is_ok
    refused = stranger.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14)
    assert refused.code == "authentication-refused"
    counts = listener.statistics()
    assert counts["clients_refused"] >= 1
    assert counts[f"clients_refused.127.0.0.1 {keys['stranger'][0]}"] == counts["clients_refused"]
    assert counts["answered"] == 1
    for each in (friend, stranger, listener):
        each.close()


def test_encrypted_channel_lets_every_key_in_if_told_so(keys):
    listener = Listener(
        "127.0.0.1",
        0,
        payloads=ENVELOPES,
        security=ServerSecurity(keys["server"][0], keys["server"][1], admits_any_client=True),
    )
    listener.start()
    stranger = secure_client(keys, "stranger")
    assert stranger.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14).is_ok
    stranger.close()
    listener.close()


def test_plain_client_and_wrong_server_key_get_nothing(keys):
    listener = Listener(
        "127.0.0.1",
        0,
        payloads=ENVELOPES,
        security=ServerSecurity(keys["server"][0], keys["server"][1], admits_any_client=True),
    )
    listener.start()
    plain = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=30, attempt_s=20))
    wrong = secure_client(keys, "friend", server="stranger")
    for each in (plain, wrong):
        outcome = each.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14)
        assert (outcome.code, outcome.attempts) == ("authentication-refused", 1)
        each.close()
    assert listener.statistics()["answered"] == 0
    listener.close()


def test_a_message_of_endless_frames_stops_nobody(listener, raw):
    """It has more frames than may come in: its connection or the socket is dropped, and the next client is answered."""
    flood = raw(zmq.DEALER, listener.port)
    flood.send_multipart([b""] * 500_000)
    until(lambda: listener.statistics().get("refused.wrong-frames", 0) >= 1)
    client = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=30, attempt_s=20))
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 3)], dialect=14)
    assert outcome.is_ok, outcome
    assert listener.statistics()["restarts"] == 0
    assert listener.is_alive
    client.close()


@pytest.mark.parametrize(("frames", "messages"), [(70, 8), (5_000, 8), (135_000, 2)])
def test_messages_of_many_frames_end_no_connection(listener, raw, frames, messages):
    neighbour = raw(zmq.DEALER, listener.port)
    for _ in range(messages):
        raw(zmq.DEALER, listener.port).send_multipart([b""] * frames)
        neighbour.send_multipart([b"", QUERY])
        assert decode_envelope(neighbour.recv_multipart()[1]).refusal is None
    until(lambda: listener.statistics().get("refused.wrong-frames", 0) >= 1)
    neighbour.send_multipart([b"", QUERY])
    assert decode_envelope(neighbour.recv_multipart()[1]).refusal is None
    assert (listener.statistics()["restarts"], listener.statistics()["answered"]) == (0, messages + 1)


def test_peers_write_no_log_lines_of_their_own(caplog):
    """Neither a line break nor an escape sequence nor a long text of a peer reaches the log; topics are few."""
    factors = {"model": "a\nb\x1b[31m" + "x" * 100_000}
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)], factors=factors))
    listener.start()
    client = Client(LocalOffer(factors={"model": "other"}, policy="off"), timing=Timing(deadline_s=30, attempt_s=20))
    for engine_id in ("engine-a", ""):
        for _ in range(10):
            outcome = client.fetch(
                host="127.0.0.1", port=listener.port, ranks=[(0, 0)], engine_id=engine_id, dialect=14
            )
            assert outcome.is_ok
    (text,) = [record.getMessage() for record in caplog.records]
    assert len(text) < 1200
    assert text.isprintable()
    assert client.statistics()["log_lines_held_back"] == 19
    client.close()
    listener.close()


def test_a_restart_refuses_no_connection(listener, monkeypatch):
    """The port stays open: a client that comes between two sockets waits for the second one."""
    gate = threading.Event()
    real, failures = listener._core.respond, iter([RuntimeError("broken")])

    def respond(query, **facts):
        for failure in failures:
            raise failure
        return real(query, **facts)

    def made_later(port, **options):
        assert gate.wait(20)
        return router_socket(port, **options)

    router_socket = RouterSocket
    monkeypatch.setattr("kv_handshake.net.listener.RouterSocket", made_later)
    monkeypatch.setattr(listener._core, "respond", respond)
    timing = Timing(deadline_s=60, attempt_s=30, retry_first_s=0.01)
    client = Client(LocalOffer(policy="off"), timing=timing)
    ends: list[Outcome] = []

    def ask():
        client.request(
            host="127.0.0.1", port=listener.port, ranks=[(0, 3)], engine_id="", dialect=14, on_done=ends.append
        )

    ask()
    until(lambda: listener.statistics()["restarts"] == 1)
    ask()
    time.sleep(0.1)
    assert ends == []
    gate.set()
    until(lambda: len(ends) == 2)
    assert [outcome.code for outcome in ends] == ["", ""]
    client.close()
