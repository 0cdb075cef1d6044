"""H3: one anonymous query gave the place of all KV. With keys, a stranger gets nothing, not even a refusal."""

from __future__ import annotations

import contextlib
import random
import socket
import threading

from figures import Figure
from victims import Honest

from kv_handshake import Listener
from kv_handshake.security import ClientSecurity, ServerSecurity, generate_keypair
from kv_handshake.testing import sample_envelopes

CURVE_GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00CURVE" + bytes(47)


def broken_opening(rng: random.Random) -> bytes:
    """Return what follows a greeting: an unsealed HELLO, a cut one, an endless frame, a step out of turn."""
    hello = b"\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120)
    return rng.choice(
        (
            bytes([4, len(hello)]) + hello,
            bytes([4, len(hello)]) + hello[: rng.randrange(len(hello))],
            b"\x06" + (1 << 40).to_bytes(8, "big") + rng.randbytes(1000),
            b"\x04\x09\x08INITIATE",
            rng.randbytes(rng.randrange(200)),
        )
    )


def test_broken_openings_of_encrypted_connections_cost_no_honest_peer(figure: Figure) -> None:
    engine, peer = generate_keypair(), generate_keypair()
    security = ServerSecurity(*engine, {peer[0]: "decode"})
    listener = Listener("127.0.0.1", 0, payloads=sample_envelopes([(0, 0)]), security=security)
    listener.start()
    is_over, opened = threading.Event(), [0] * 8

    def attack(number: int) -> None:
        rng = random.Random(number)
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", listener.port), 2) as sock:
                sock.sendall(CURVE_GREETING + broken_opening(rng))
                sock.settimeout(0.05)
                opened[number] += 1
                while sock.recv(4096):
                    pass

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(len(opened))]
    with Honest(listener.port, ClientSecurity(*peer, engine[0])) as honest:
        before = sorted(honest.fetch(40))
        for each in threads:
            each.start()
        during = sorted(honest.fetch(60))
        is_over.set()
    for each in threads:
        each.join(10)
    restarts = listener.statistics()["restarts"]
    listener.close()
    figure(
        f"0 of {len(before) + len(during)} failed beside {sum(opened)} broken openings; median {before[20] * 1e3:.1f} ms before, "
        f"{during[30] * 1e3:.1f} during, worst {during[-1] * 1e3:.0f}"
    )
    assert sum(opened) > 100
    assert restarts == 0
    assert during[30] < 2.0
