"""The real client against TCP servers that do not speak ZeroMQ 4."""

import contextlib
import socket
import struct
import threading

import pytest
from handshake_helpers import fetch

from kv_handshake.sockets import connections

WEB = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"


def close_at_once(accepted, words):
    accepted.sendall(words)


def close_after_the_greeting(accepted, words):
    accepted.recv(64)
    accepted.sendall(words)


def close_when_the_client_does(accepted, words):
    accepted.sendall(words)
    accepted.shutdown(socket.SHUT_WR)
    while accepted.recv(4096):
        pass


def stay(accepted, words):
    accepted.sendall(words)
    while accepted.recv(4096):
        pass


@pytest.mark.parametrize("behaviour", [close_at_once, close_after_the_greeting, close_when_the_client_does, stay])
@pytest.mark.parametrize("words", [WEB, WEB * 20, b"SSH-2.0-OpenSSH_9.2\r\n", b"\x01\x00\x05\x00hello" * 20])
def test_tcp_server_that_speaks_something_else(client, behaviour, words):
    """Some of these are frames of the ZeroMQ of before 2011; none may be taken for a reply, however the server ends."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def serve():
            while True:
                try:
                    accepted, _ = foreign.accept()
                except OSError:
                    return
                with accepted, contextlib.suppress(OSError):
                    behaviour(accepted, words)

        server = threading.Thread(target=serve)
        server.start()
        outcome = fetch(client, foreign.getsockname()[1])
        foreign.shutdown(socket.SHUT_RDWR)
        server.join()
    assert (outcome.code, outcome.attempts) == ("authentication-refused", 1), outcome.message
    assert "no side channel listens there" in outcome.message


def test_a_peer_that_is_too_busy_to_open_the_connection_is_tried_again(hasty, monkeypatch):
    monkeypatch.setattr(connections, "_OPENING_MS", 100)
    with socket.create_server(("127.0.0.1", 0)) as busy:
        outcome = fetch(hasty, busy.getsockname()[1])
    assert outcome.code in ("connection-lost", "timed-out")
    assert outcome.attempts > 1
    assert outcome.is_retry_safe


@pytest.mark.never_wrong("B4")
def test_a_connection_reset_before_it_opens_is_refused_at_once(client):
    """As by a process that is being killed: its system accepts, and resets when the process is gone."""
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def hang_up():
            accepted, _ = foreign.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()

        server = threading.Thread(target=hang_up)
        server.start()
        outcome = fetch(client, foreign.getsockname()[1])
        server.join()
    assert (outcome.code, outcome.attempts) == ("connection-refused", 1)
    assert "keys" not in outcome.message
