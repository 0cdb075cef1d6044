"""Peers that choose their own ZeroMQ identities, near those that libzmq hands out: they end no process and answer for nobody."""

import contextlib
import subprocess
import sys

import pytest
import zmq

from kv_handshake import Client, LocalOffer, Timing
from kv_handshake.security import ClientSecurity, generate_keypair

VICTIM = """
import sys
from kv_handshake import Listener
from kv_handshake.security import ServerSecurity
from kv_handshake.testing import sample_envelopes

security = ServerSecurity(*sys.argv[1:], admits_any_client=True) if sys.argv[1:] else None
listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)]), security=security)
listener.start()
print(listener.port, flush=True)
sys.stdin.read()
listener.close()
"""
FIRST = 0x6B8B4567
"""The first `rand()` of a process that seeds none, where libzmq 4.3.5 begins to count."""

NEAR = range(FIRST - 50, FIRST + 250)


@contextlib.contextmanager
def victim(*keys):
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, *keys], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, int(process.stdout.readline())
        process.communicate(timeout=20)
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.ROUTER])
def test_chosen_identities_end_no_process(is_keyed, kind):
    server, own = (generate_keypair(), generate_keypair()) if is_keyed else (("", ""), ("", ""))
    security = ClientSecurity(*own, server[0]) if is_keyed else None
    with victim(*(server if is_keyed else ())) as (process, port), contextlib.ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)

        def connect(identity):
            sock = context.socket(kind)
            stack.callback(sock.close, 0)
            if identity:
                sock.setsockopt(zmq.IDENTITY, identity)
            if is_keyed:
                sock.curve_publickey, sock.curve_secretkey = (key.encode() for key in own)
                sock.curve_serverkey = server[0].encode()
            sock.connect(f"tcp://127.0.0.1:{port}")

        def is_served():
            client = Client(LocalOffer(policy="off"), security=security, timing=Timing(deadline_s=20, attempt_s=15))
            outcome = client.fetch(host="127.0.0.1", port=port, ranks=[(0, 0)], dialect=14)
            client.close()
            return outcome.is_ok

        for number in NEAR:
            connect(b"\0" + number.to_bytes(4, "big"))
        assert is_served()
        for _ in range(50):
            connect(b"")
        assert is_served()
    assert process.returncode == 0, "the listener's process was aborted"
