"""The limits on connections: distinguished by both ends, kept whatever happens, and without work at rest."""

import contextlib
import os
import socket
import time
from functools import partial

import pytest
from handshake_helpers import failing_first, request, until

from kv_handshake import Listener, Timing
from kv_handshake.sockets.tcp import Grip
from kv_handshake.testing import sample_envelopes


@pytest.mark.parametrize(
    ("family", "host", "callers"),
    [
        (socket.AF_INET, "127.0.0.1", ["127.0.0.1", "127.0.0.9"]),
        (socket.AF_INET6, "::1", ["::1", "::1"]),
        (socket.AF_INET6, "::", ["::ffff:127.0.0.1", "::ffff:127.0.0.9"]),
    ],
)
def test_both_ends_of_every_kind_of_connection_are_read_right(family, host, callers):
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    grip = Grip()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::"))
        port = server.getsockname()[1]
        for caller in callers:
            plain = caller.removeprefix("::ffff:")
            target = "127.0.0.1" if "." in caller else "::1"
            client = stack.enter_context(socket.create_connection((target, port), source_address=(plain, 0)))
            accepted, peer = server.accept()
            stack.enter_context(accepted)
            ends = grip.ends(accepted.fileno())
            assert ends is not None
            for _ in range(3):
                assert grip.ends(accepted.fileno()) == ends
                assert ends[0][1] == port
                assert ends[1] == (peer[0], client.getsockname()[1])
                assert ends[1][0] == caller
            client.sendall(b"12345")
            until(partial(lambda number: grip.received_bytes(number) == 5, accepted.fileno()))
            assert grip.hang_up(accepted.fileno(), ends)
    grip.close()


def test_a_number_that_became_another_file_is_nobody():
    grip = Grip()
    one, two = socket.socketpair()
    pipe = os.pipe()
    for descriptor in (one.fileno(), pipe[0], 10_000):
        assert grip.ends(descriptor) is None
        assert grip.received_bytes(descriptor) == 0
        assert not grip.hang_up(descriptor, (("127.0.0.1", 1), ("127.0.0.1", 2)))
    one.sendall(b"still open")
    assert two.recv(100) == b"still open"
    for each in (one, two):
        each.close()
    for number in pipe:
        os.close(number)
    grip.close()


def test_a_listener_closes_after_a_flood_of_short_connections():
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)]))
    listener.start()
    for _ in range(2400):
        with socket.create_connection(("127.0.0.1", listener.port)):
            pass
    listener.close()
    assert not listener.is_alive


def test_requests_that_get_no_place_cost_nothing_while_they_wait(connect):
    client = connect(timing=Timing(connections=16, deadline_s=20, attempt_s=20))
    turns = 0
    turn = client._loop._turn

    def counted():
        nonlocal turns
        turns += 1
        turn()

    client._loop._turn = counted
    with socket.create_server(("127.0.0.1", 0), backlog=64) as mute:
        for _ in range(24):
            request(client, mute.getsockname()[1], print)
        time.sleep(0.5)
        before, began_s = turns, time.monotonic()
        time.sleep(1.0)
        assert turns - before < 200 * (time.monotonic() - began_s)


def test_a_request_whose_connection_cannot_be_made_ends_alone(listener, client, monkeypatch):
    ends = []
    errors = IndexError("half written"), OSError("no descriptor is left"), RuntimeError("no thread can be made")
    monkeypatch.setattr(client._loop._hub, "open", failing_first(client._loop._hub.open, *errors))
    for _ in range(4):
        request(client, listener.port, ends.append)
    until(lambda: len(ends) == 4)
    assert client.statistics()["restarts"] == 0
    assert client._loop._places == {}
