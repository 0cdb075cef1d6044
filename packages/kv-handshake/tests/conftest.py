"""Shared fixtures: free ports, and a listener, a client and raw questions over loopback TCP."""

import contextlib
import secrets
import socket
import sys
from pathlib import Path

import pytest
import zmq

from kv_handshake import Client, Listener, LocalOffer, QueryLimits, Timing
from kv_handshake.testing import sample_envelopes

sys.path.insert(0, str(Path(__file__).parent))  # for `handshake_helpers`

PATIENT = Timing(
    deadline_s=30, attempt_s=20, retry_first_s=0.02, retry_most_s=0.1, hold_first_s=0.001, hold_most_s=0.001
)
"""Against peers that answer: no machine is so busy that these times matter."""

HASTY = Timing(deadline_s=1.0, attempt_s=0.3, retry_first_s=0.02, retry_most_s=0.1, hold_first_s=60, hold_most_s=60)
"""Against peers that never will; a failure is remembered until the test moves the clock."""


@pytest.fixture
def free_port():
    """A free port below those that Linux gives out by itself, which another process could take."""
    while True:
        port = 22000 + secrets.randbelow(10000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


from handshake_helpers import FACTORS, RANKS  # noqa: E402 - found by the line above

ENVELOPES = sample_envelopes(RANKS)


@pytest.fixture
def serve():
    """A factory of started listeners, closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(host="127.0.0.1", port=0, *, payloads=ENVELOPES, **options):
            made = Listener(host, port, payloads=payloads, **options)
            made.start()
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def connect():
    """A factory of clients, closed at the end; without an offer they accept every engine."""
    with contextlib.ExitStack() as stack:

        def make(offer=None, *, timing=PATIENT, **options):
            made = Client(offer or LocalOffer(policy="off"), timing=timing, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def listener(serve):
    return serve(limits=QueryLimits(queries_per_s=0))


@pytest.fixture
def client(connect):
    return connect(LocalOffer(factors=FACTORS), seed=1)


@pytest.fixture
def hasty(connect):
    return connect(LocalOffer(factors=FACTORS), timing=HASTY, seed=1)


@pytest.fixture
def raw():
    """A factory of plain ZeroMQ sockets, closed at the end."""
    context = zmq.Context()
    opened = []

    def connect(kind, port, host="127.0.0.1"):
        sock = context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 60_000)
        sock.connect(f"tcp://{host}:{port}")
        opened.append(sock)
        return sock

    yield connect
    context.destroy(linger=0)


@pytest.fixture
def ask(listener, raw):
    """Send one query as a REQ socket does; return the reply's frames."""
    sock = raw(zmq.REQ, listener.port)

    def send(query):
        sock.send(query)
        return sock.recv_multipart()

    return send
