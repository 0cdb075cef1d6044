"""The real listener over loopback: every kind of socket, restarts, limits, address families, encryption."""

import threading
import time

import pytest
import zmq
from handshake_helpers import failing_first, fetch, request, until

from kv_handshake import ConfigurationError, Listener, Outcome, QueryLimits, Timing, TransportError
from kv_handshake.security import ClientSecurity, ServerSecurity, generate_keypair
from kv_handshake.sockets.router import RouterSocket
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_clock, decode_envelope

QUERY = encode_query((0, 3), dialect_of(14))
OLD_QUERY = encode_query((0, 3), dialect_of(4))
ENVELOPES = sample_envelopes([(0, rank) for rank in range(8)])


def code_of(frames):
    return decode_envelope(frames[0]).refusal.code


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


def test_a_req_socket_gets_no_rank_whose_blocks_are_dealt_out_in_parts(raw, client, caplog):
    with Listener("127.0.0.1", 0, payloads=ENVELOPES, splits_blocks=True) as listener:
        sock = raw(zmq.REQ, listener.port)
        sock.send(QUERY)
        assert code_of(sock.recv_multipart()) == "context-turns"
        assert "context ranks here hold parts of blocks" in caplog.text
        assert client.fetch(
            host="127.0.0.1", port=listener.port, ranks=[(0, 3)], engine_id="engine-a", dialect=14
        ).is_ok


def test_req_socket_of_either_dialect(ask):
    began_s = time.perf_counter()
    payload, clock = ask(QUERY)
    assert payload == ENVELOPES[0, 3]
    assert began_s <= decode_clock(clock) <= time.perf_counter()
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


def test_rate_limit_is_per_address_and_refuses_with_a_time(raw, serve, connect):
    client = connect(timing=Timing(deadline_s=30, attempt_s=20, retry_first_s=0.05))

    def clock():
        """Stand still until the client tries a second time."""
        return 110.0 if client.statistics()["attempts"] > 1 else 100.0

    listener = serve(limits=QueryLimits(queries_per_s=5, burst=3), clock=clock)
    codes, refusal = [], None
    for _ in range(6):
        sock = raw(zmq.REQ, listener.port)
        sock.send(QUERY)
        refusal = decode_envelope(sock.recv_multipart()[0]).refusal
        codes.append(refusal.code if refusal else "")
    assert codes == ["", "", "", "rate-limited", "rate-limited", "rate-limited"]
    assert refusal.retry_after_s == pytest.approx(0.2)
    outcome = client.fetch(host="127.0.0.1", port=listener.port, ranks=[(0, 0)], dialect=14)
    assert (outcome.code, outcome.attempts) == ("", 2)
    assert outcome.elapsed_s >= 0.2, "our own client waits as long as the answer says"


def test_taken_port_is_reported_at_once(listener):
    second = Listener("127.0.0.1", listener.port)
    with pytest.raises(TransportError) as caught:
        second.start()
    assert caught.value.code == "bind-failed"
    assert caught.value.context["port"] == listener.port
    assert str(listener.port) in str(caught.value)


def test_lifecycle(free_port, monkeypatch):
    monkeypatch.setattr("kv_handshake.sockets.router._RECEIVE_TIMEOUT_MS", 60_000)  # so close must wake the thread
    listener = Listener("127.0.0.1", free_port, payloads=ENVELOPES)
    listener.close()
    with pytest.raises(ConfigurationError):
        listener.start()
    for _ in range(3):
        listener = Listener("127.0.0.1", free_port, payloads=ENVELOPES)
        listener.start()
        with pytest.raises(ConfigurationError):
            listener.start()
        assert listener.is_alive
        listener.close()
        listener.close()
        assert not listener.is_alive


def test_whatever_breaks_is_restarted_and_counted(listener, raw, monkeypatch):
    errors = RuntimeError("first"), zmq.ZMQError(zmq.ETERM), MemoryError()
    monkeypatch.setattr(listener._core, "respond", failing_first(listener._core.respond, *errors))

    def is_answered():
        sock = raw(zmq.REQ, listener.port)
        sock.setsockopt(zmq.RCVTIMEO, 500)
        sock.send(QUERY)
        try:
            return sock.recv_multipart()[0] == ENVELOPES[0, 3]
        except zmq.Again:
            return False  # lost with the socket that broke: whoever asks does so again

    until(is_answered)
    assert listener.statistics()["restarts"] == 3
    assert listener.is_alive


@pytest.mark.parametrize(("host", "asked"), [("::1", "::1"), ("0.0.0.0", ""), ("*", ""), ("::", "")])
def test_address_families_and_wildcards(host, asked, client, serve):
    assert fetch(client, serve(host).port, host=asked or "127.0.0.1").is_ok


@pytest.fixture
def keys():
    return {name: generate_keypair() for name in ("server", "friend", "stranger")}


def keys_of(keys, name, *, server="server"):
    public, secret = keys[name]
    return ClientSecurity(public, secret, keys[server][0])


def test_encrypted_channel_lets_friends_in_and_names_strangers(keys, serve, connect):
    listener = serve(security=ServerSecurity(keys["server"][0], keys["server"][1], {keys["friend"][0]: "friend"}))
    assert fetch(connect(security=keys_of(keys, "friend")), listener.port, ranks=[(0, 3)]).is_ok
    refused = fetch(connect(security=keys_of(keys, "stranger")), listener.port)
    assert refused.code == "authentication-refused"
    counts = listener.statistics()
    assert counts["clients_refused"] >= 1
    assert counts[f"clients_refused.127.0.0.1 {keys['stranger'][0]}"] == counts["clients_refused"]
    assert counts["answered"] == 1


def test_plain_client_and_wrong_server_key_get_nothing(keys, serve, connect):
    listener = serve(security=ServerSecurity(keys["server"][0], keys["server"][1], admits_any_client=True))
    for security in (None, keys_of(keys, "friend", server="stranger")):
        outcome = fetch(connect(security=security), listener.port)
        assert (outcome.code, outcome.attempts) == ("authentication-refused", 1)
    assert listener.statistics()["answered"] == 0


def test_a_restart_refuses_no_connection(listener, connect, monkeypatch):
    """The port stays open: a client that comes between two sockets waits for the second one."""
    gate = threading.Event()

    def made_later(port, **options):
        assert gate.wait(60)
        return router_socket(port, **options)

    router_socket = RouterSocket
    monkeypatch.setattr("kv_handshake.net.listener.RouterSocket", made_later)
    monkeypatch.setattr(listener._core, "respond", failing_first(listener._core.respond, RuntimeError("broken")))
    client = connect(timing=Timing(deadline_s=60, attempt_s=30, retry_first_s=0.01))
    ends: list[Outcome] = []

    request(client, listener.port, ends.append)
    until(lambda: listener.statistics()["restarts"] == 1)
    request(client, listener.port, ends.append)
    time.sleep(0.1)
    assert ends == []
    gate.set()
    until(lambda: len(ends) == 2)
    assert [outcome.code for outcome in ends] == ["", ""]
