"""Processes with few descriptors left: libzmq ends none of them, errors have a code, and a listener goes on later."""

import resource
import subprocess
import sys

import pytest

from kv_handshake import Timing
from kv_handshake.sockets.tcp import most_connections

COMMON = """
import os, resource, socket, sys, time
from kv_handshake import Client, HandshakeError, Listener, LocalOffer, Timing
from kv_handshake.security import ServerSecurity, generate_keypair
from kv_handshake.testing import sample_envelopes

ENVELOPES = sample_envelopes([(0, 0)])
KEYED = ServerSecurity(*generate_keypair(), admits_any_client=True)


def leave(free):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    eaten = []
    try:
        while True:
            eaten.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(free):
            os.close(eaten.pop())
    return eaten


def fetch(client, port):
    return client.fetch(host="127.0.0.1", port=port, ranks=[(0, 0)], dialect=14)
"""
BEGINNINGS = """
def client(free):
    made = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=0.3, attempt_s=0.2))
    fetch(made, 9)
    made.close()


def listener(free, security=None):
    made = Listener("127.0.0.1", 0, payloads=ENVELOPES, security=security)
    made.start()
    made.close()


def keyed(free):
    listener(free, KEYED)


begin = {"client": client, "listener": listener, "keyed": keyed}[sys.argv[1]]
for free in range(41):
    child = os.fork()
    if not child:
        code = "ok"
        leave(free)
        try:
            begin(free)
        except HandshakeError as error:
            code = error.code
        sys.stdout.write(f"{free} {code}\\n")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.stdout.write(f"{free} status {status}\\n")
"""
RESTART = """
listener = Listener("127.0.0.1", 0, payloads=ENVELOPES)
listener.start()
client = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=0.5, attempt_s=0.4, hold_first_s=0.01, hold_most_s=0.02))
end_s = time.monotonic() + 120


def until_answered():
    while (code := fetch(client, listener.port).code) and time.monotonic() < end_s:
        time.sleep(0.05)
    return code


codes = [until_answered()]
real, failures = listener._core.respond, iter([RuntimeError("broken")])


def respond(query, **facts):
    for failure in failures:
        eaten.extend(leave(int(sys.argv[1])))
        raise failure
    return real(query, **facts)


eaten = []
opened = listener._open_socket


def open_socket(port):
    eaten.extend(leave(int(sys.argv[1])))
    return opened(port)


listener._core.respond, listener._open_socket = respond, open_socket
fetch(client, listener.port)
while listener.statistics()["restarts"] < 3 and time.monotonic() < end_s:
    time.sleep(0.01)
listener._open_socket = opened
while eaten:
    os.close(eaten.pop())
codes.append(until_answered())
sys.stdout.write(f"{codes[0]!r} {codes[-1]!r} {listener.statistics()['restarts'] >= 3}\\n")
client.close()
listener.close()
"""


def run(script, *words):
    done = subprocess.run(
        [sys.executable, "-c", COMMON + script, *words], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["client", "listener", "keyed"])
def test_few_descriptors_end_no_process(kind):
    ends = dict(line.split(" ", 1) for line in run(BEGINNINGS, kind))
    assert list(ends) == [str(free) for free in range(41)]
    assert set(ends.values()) == {"ok", "transport-failed" if kind == "client" else "bind-failed"}
    assert ends["40"] == "ok"


@pytest.mark.parametrize("free", ["0", "8", "20"])
def test_a_listener_that_restarts_without_descriptors_serves_once_there_are_some(free):
    assert run(RESTART, free) == ["'' '' True"]


@pytest.mark.parametrize(("files", "most"), [(64, 8), (1024, 128), (1 << 20, 512)])
def test_connections_of_a_client_leave_half_of_the_descriptors(monkeypatch, files, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert most_connections(Timing().connections, share=8) == most


def test_connections_have_no_limit_where_files_have_none(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert most_connections(10_000, share=8) == 10_000
