"""The real client over loopback, against good, dead, silent, slow and lying peers."""

import socket
import threading
import time

import pytest
import zmq
from handshake_helpers import FACTORS, RANKS, failing_first, fetch, puppet, request, until

from kv_handshake import Client, ConfigurationError, Listener, LocalOffer, Outcome, Timing, TransportError
from kv_handshake.core.handshake import Handshake
from kv_handshake.net import loop
from kv_handshake.sockets.connections import Connection, Hub
from kv_handshake.testing import sample_envelopes

PATIENT_S = 30.0
"""The deadline of the fixture `client`."""


def test_all_ranks_over_one_connection(client, listener):
    outcome = fetch(client, listener.port)
    assert outcome.is_ok, outcome
    assert [outcome.peers[rank].device_id for rank in RANKS] == list(range(8))
    assert (outcome.attempts, outcome.code, outcome.message) == (1, "", "")
    assert 0 < outcome.rtt_s <= outcome.elapsed_s
    assert outcome.clock_offset_s is not None
    assert abs(outcome.clock_offset_s) <= outcome.rtt_s, "the same process has no clock offset"
    assert client.statistics()["succeeded"] == 1


def test_more_ranks_than_the_pipeline_holds(serve, connect):
    ranks = [(0, rank) for rank in range(100)]
    listener = serve(payloads=sample_envelopes(ranks))
    client = connect(timing=Timing(pipeline=3, deadline_s=30, attempt_s=20))
    assert list(fetch(client, listener.port, ranks=ranks).peers) == ranks


def test_a_name_is_looked_up(client, listener):
    assert fetch(client, listener.port, host="localhost").is_ok


def test_a_name_without_address(hasty):
    outcome = fetch(hasty, 5600, host="no-such-host.invalid")
    assert outcome.code == "name-unresolved"
    assert outcome.message.startswith("the name 'no-such-host.invalid' has no address")


class MovedClock:
    """The time module as the client sees it, some seconds ahead."""

    ahead_s = 0.0
    perf_counter = staticmethod(time.perf_counter)
    sleep = staticmethod(time.sleep)

    def monotonic(self):
        return time.monotonic() + self.ahead_s


@pytest.mark.never_wrong("B4")
def test_a_refused_connection_is_an_answer(client, free_port):
    """A single attempt and no retry within the request, however long its deadline is."""
    outcome = fetch(client, free_port)
    assert (outcome.code, outcome.attempts) == ("connection-refused", 1)
    assert f"127.0.0.1 port {free_port}" in outcome.message
    assert "keys" not in outcome.message
    assert outcome.is_retry_safe


def test_a_name_with_a_refusing_address_is_reached_at_its_next_one(client, listener, monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.77", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    outcome = fetch(client, listener.port, host="two-addresses.test")
    assert (outcome.code, outcome.attempts) == ("", 1), outcome.message


@pytest.mark.never_wrong("B4")
def test_a_failed_peer_is_asked_again_in_the_background(free_port, serve, connect):
    """Requests fail at once all the while; the first one after the peer has answered succeeds."""
    client = connect(timing=Timing(deadline_s=30, attempt_s=20, hold_first_s=0.02, hold_most_s=0.05), seed=1)
    assert fetch(client, free_port).code == "connection-refused"
    until(lambda: client.statistics()["background_attempts"] > 2)
    outcome = fetch(client, free_port)
    assert (outcome.code, outcome.attempts) == ("recently-failed", 0)
    assert outcome.context["last_code"] == "connection-refused"
    assert isinstance(outcome.context["failures"], int)
    assert outcome.context["failures"] > 2
    assert outcome.message.startswith(f"cannot connect to 127.0.0.1 port {free_port} ")
    assert "connection-refused" not in outcome.message, "the code stands behind the sentence, once"
    serve(port=free_port)
    until(lambda: client.statistics()["remembered_failures"] == 0)
    assert fetch(client, free_port).is_ok
    assert client.statistics()["requests"] == 3


@pytest.mark.never_wrong("B4")
def test_a_silent_peer_makes_one_request_wait_and_no_other(connect):
    """While the one background attempt hangs, every request fails at once."""
    client = connect(timing=Timing(deadline_s=1, attempt_s=0.5, hold_first_s=0.01), seed=1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        assert fetch(client, port).code == "timed-out"
        attempts = client.statistics()["attempts"]
        until(lambda: client.statistics()["attempts"] > attempts)
        outcomes = [fetch(client, port) for _ in range(20)]
        assert {outcome.code for outcome in outcomes} == {"recently-failed"}
        assert {outcome.attempts for outcome in outcomes} == {0}


def test_a_peer_that_nobody_wants_is_forgotten(free_port, connect):
    timing = Timing(deadline_s=30, attempt_s=20, hold_first_s=0.02, hold_most_s=0.02, forget_s=1.0)
    client = connect(timing=timing, seed=1)
    assert fetch(client, free_port).code == "connection-refused"
    until(lambda: client.statistics()["remembered_failures"] == 0)
    assert client.statistics()["background_attempts"]
    assert fetch(client, free_port).code == "connection-refused"


def test_without_a_place_for_background_attempts_a_request_asks_itself(free_port, connect, monkeypatch):
    timing = Timing(deadline_s=30, attempt_s=20, hold_first_s=60, hold_most_s=60, connections=7)
    client = connect(timing=timing, seed=1)
    clock = MovedClock()
    monkeypatch.setattr("kv_handshake.net.client.time", clock)
    monkeypatch.setattr("kv_handshake.net.loop.time", clock)
    assert [fetch(client, free_port).code for _ in range(2)] == ["connection-refused", "recently-failed"]
    clock.ahead_s = 60
    assert fetch(client, free_port).code == "connection-refused"
    assert client.statistics()["background_attempts"] == 0


def test_a_peer_is_remembered_if_the_deadline_comes_before_the_next_attempt(hasty, monkeypatch):
    """As on a busy machine, where the thread wakes when both are past."""
    clock = MovedClock()
    monkeypatch.setattr("kv_handshake.net.client.time", clock)
    monkeypatch.setattr("kv_handshake.net.loop.time", clock)
    real = Handshake.plan_retry

    def plan_retry(task, now_s, chance):
        assert real(task, now_s, chance)
        task.next_attempt_s = task._deadline_s
        clock.ahead_s = 2.0
        return True

    monkeypatch.setattr(Handshake, "plan_retry", plan_retry)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert fetch(hasty, mute.getsockname()[1]).code == "timed-out"
        assert fetch(hasty, mute.getsockname()[1]).code == "recently-failed"


def test_silent_peer_times_out_with_all_that_is_known(hasty):
    with puppet(lambda _: []) as port:
        outcome = fetch(hasty, port)
    assert outcome.code == "timed-out"
    for part in ("127.0.0.1", str(port), "(0, 0)", " s,", "attempt"):
        assert part in outcome.message
    assert outcome.context["missing_ranks"] == tuple(RANKS)
    assert 0.9 < outcome.elapsed_s < PATIENT_S, "about its deadline"


def test_a_reply_before_the_end_of_the_connection_counts():
    """Also if the end is noticed first; and the reason of the end stays."""
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    hub = Hub()
    connection = hub.open("127.0.0.1", port)
    connection.send(b"query")
    identity, _, _ = sock.recv_multipart()
    sock.send_multipart([identity, b"", b"reply", b"clock"])
    assert connection.fault() == ""
    until(lambda: hub.poll(0.1)[0])
    sock.close(linger=1000)
    until(lambda: connection.fault() == "connection-lost")
    assert connection.receive() == [b"reply", b"clock"]
    assert (connection.receive(), connection.fault()) == (None, "connection-lost")
    hub.close()
    context.destroy(linger=0)


def test_a_lying_peer_is_asked_once(client):
    with puppet(lambda _: [[b"\xc1" * 100]]) as port:
        outcome = fetch(client, port)
    assert (outcome.code, outcome.attempts) == ("malformed-envelope", 1), "what will not change is not tried again"
    assert f"127.0.0.1 port {port}" in outcome.message


def test_a_peer_that_restarts_in_the_middle_is_asked_again(connect, free_port, monkeypatch):
    """The first life answers three ranks and dies; the outcome holds eight ranks of the second."""
    answered: list[bytes] = []
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.bind(f"tcp://127.0.0.1:{free_port}")

    def first_life():
        while len(answered) < 3:
            identity, _, query = sock.recv_multipart()
            answered.append(query)
            rank = (0, query[-1])
            sock.send_multipart([identity, b"", sample_envelopes([rank])[rank], b"\x01"])
        context.destroy(linger=0)
        second.start()

    first = threading.Thread(target=first_life)
    second = Listener("127.0.0.1", free_port, payloads=sample_envelopes(RANKS))
    client = connect(timing=Timing(deadline_s=60, attempt_s=20))
    opened = client._loop._hub.open
    monkeypatch.setattr(client._loop._hub, "open", lambda *values: (answered and first.join(60), opened(*values))[1])
    first.start()
    outcome = fetch(client, free_port)
    assert outcome.is_ok, outcome
    assert list(outcome.peers) == RANKS
    assert outcome.attempts > 1
    second.close()


def test_no_place_within_the_deadline(monkeypatch):
    client = Client(LocalOffer(factors=FACTORS), timing=Timing(connections=1, deadline_s=30, attempt_s=20))
    ends: list[Outcome] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for deadline_s in (30, 0.5):
            monkeypatch.setattr(client, "_timing", Timing(connections=1, deadline_s=deadline_s, attempt_s=20))
            request(client, mute.getsockname()[1], ends.append)
        until(lambda: ends)
        client.close()
    assert [(outcome.code, outcome.attempts) for outcome in ends] == [("too-many-peers", 0), ("closed", 1)]
    assert ends[0].message.startswith("no place in this process for a connection to 127.0.0.1 port ")


def test_callback_that_raises_ends_nothing(client, listener, caplog):
    def explode(_):
        raise RuntimeError("caller's mistake")

    request(client, listener.port, explode)
    assert fetch(client, listener.port).is_ok
    until(lambda: client.statistics()["callback_errors"] == 1)
    assert "caller's mistake" in caplog.text


def test_a_failure_that_nobody_foresaw_ends_one_request_and_not_the_client(client, listener, monkeypatch, caplog):
    receive = failing_first(Connection.receive, RuntimeError("unforeseen"), MemoryError())
    monkeypatch.setattr(Connection, "receive", receive)
    for _ in range(2):
        outcome = fetch(client, listener.port)
        assert outcome.code == "transport-failed"
    assert fetch(client, listener.port).is_ok
    assert client.statistics()["restarts"] == 2
    assert "unforeseen" in caplog.text


def test_a_query_that_cannot_be_sent_fails_its_request(client, listener, monkeypatch):
    def send(self, query):
        raise TransportError("transport-failed", "the queue is full")

    monkeypatch.setattr(Connection, "send", send)
    assert fetch(client, listener.port).code == "transport-failed"
    monkeypatch.undo()
    assert client.statistics()["restarts"] == 0


def test_close_ends_what_is_under_way_exactly_once():
    client = Client(LocalOffer(factors=FACTORS))
    ends: list[Outcome] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for _ in range(3):
            request(client, mute.getsockname()[1], ends.append)
        time.sleep(0.1)
        client.close()
        client.close()
    assert [outcome.code for outcome in ends] == ["closed"] * 3
    with pytest.raises(ConfigurationError, match="closed"):
        fetch(client, 1)


def test_close_from_a_callback(listener):
    client = Client(LocalOffer(factors=FACTORS))
    done = threading.Event()

    def close(_):
        client.close()
        done.set()

    request(client, listener.port, close)
    assert done.wait(60)
    client.close()


@pytest.mark.parametrize(
    "changes", [{"host": "a b"}, {"port": 0}, {"ranks": []}, {"ranks": [(1, 0)], "dialect": 4}, {"dialect": 99}]
)
def test_bad_requests_raise_at_once(client, changes):
    with pytest.raises(ConfigurationError):
        fetch(client, **{"port": 1, **changes})
    assert client.statistics()["requests"] == 0


def test_accepted_with_differences_is_logged(listener, caplog):
    client = Client(LocalOffer(factors={**FACTORS, "dtype": "torch.float16"}, policy="off"))
    assert fetch(client, listener.port).is_ok
    client.close()
    assert "dtype" in caplog.text


@pytest.mark.full
def test_hosts_that_answer_keep_their_places(monkeypatch, serve, connect):
    """Only silence costs a place: hosts that answer steadily end what they began, while others wait for places."""
    monkeypatch.setattr(loop, "_PATIENCE_S", 2.0)
    ranks = [(0, rank) for rank in range(6)]
    ends = []

    def slowly(respond):
        def answer(query, **facts):
            time.sleep(0.5)
            return respond(query, **facts)

        return answer

    client = connect(timing=Timing(connections=2, deadline_s=40, attempt_s=20, pipeline=1))
    for host in (f"127.0.0.{number}" for number in range(2, 6)):
        listener = serve(host)
        monkeypatch.setattr(listener._core, "respond", slowly(listener._core.respond))
        request(client, listener.port, ends.append, host=host, ranks=ranks)
    until(lambda: len(ends) == 4)
    assert [(outcome.code, outcome.attempts) for outcome in ends] == [("", 1)] * 4
