"""Random frames against a listener and a client that honest peers use at the same time: 10^5 each way, 10^6 with --long."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable

import msgspec
import pytest
import zmq
from figures import Figure
from victims import Honest, Victim

from kv_handshake.testing import sample_envelopes

FRAMES = 1_000_000 if os.environ.get("KVDEV_LONG") == "1" else 100_000
GOOD = sample_envelopes([(0, 0)])[0, 0]
QUERY = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
Start = Callable[..., Victim]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return the data with a few bytes changed, cut, doubled or made at random."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    at = rng.randrange(len(data))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data + data[:at]
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def p99_ms(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98] * 1000


@pytest.mark.full
def test_a_listener_survives_random_messages(victim: Start, figure: Figure) -> None:
    rng = random.Random(14)
    server = victim("listener")
    during: list[float] = []
    with Honest(server.port) as honest, zmq.Context() as context:
        before = honest.fetch(300)
        before_mb = server.resident_mb()
        for _ in range(FRAMES // 10_000):
            socks = [context.socket(zmq.DEALER) for _ in range(10)]
            for sock in socks:
                sock.setsockopt(zmq.LINGER, 0)
                sock.setsockopt(zmq.RCVTIMEO, 20_000)
                sock.connect(f"tcp://127.0.0.1:{server.port}")
            for number in range(10_000):
                surplus = [b""] * rng.randrange(6) if rng.random() < 0.1 else []
                sock = socks[number % 10]
                sock.send_multipart([b"", mutated(rng, QUERY), *surplus])
                if number % 500 == 499:
                    for each in socks:
                        while each.poll(0):
                            each.recv_multipart()
                    during += honest.fetch(5)
            for sock in socks:
                sock.close(0)
        after = honest.fetch(300)
    found = server.call("statistics")
    growth_mb = server.resident_mb() - before_mb
    figure(
        f"{FRAMES} messages: honest p99 {p99_ms(before):.1f} ms before, {p99_ms(during):.1f} during, {p99_ms(after):.1f} "
        f"after; 0 of {len(during) + 600} failed; {growth_mb:.0f} MB; restarts {found['restarts']}"
    )
    assert found["alive"]
    assert found["restarts"] == 0
    assert growth_mb < 64
    usual_ms = [1e3 * statistics.median(seconds) for seconds in (before, during)]
    assert usual_ms[1] < max(3 * usual_ms[0], 20), "an honest client waits"
