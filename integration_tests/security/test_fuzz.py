"""Random frames against a listener and a client that honest peers use at the same time: 10^5 each way, 10^6 with --long."""

from __future__ import annotations

import os
import random
import socket
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq
from victims import Victim
from zmtp import HostileServer, frame, read_frame

from kv_handshake import Client, LocalOffer, Timing
from kv_handshake.testing import sample_envelopes

FRAMES = 1_000_000 if os.environ.get("KVDEV_LONG") == "1" else 100_000
ROUND = 500
DEADLINE_S = 5
GOOD = sample_envelopes([(0, 0)])[0, 0]
QUERY = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
Figure = Callable[[str], None]
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


def fetch(client: Client, port: int, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        outcome = client.fetch(host="127.0.0.1", port=port, ranks=[(0, 0)], dialect=14)
        assert outcome.is_ok, outcome
        seconds.append(outcome.elapsed_s)
    return seconds


@pytest.mark.full
def test_a_listener_survives_random_messages(victim: Start, figure: Figure) -> None:
    rng = random.Random(14)
    server = victim("listener")
    honest = Client(LocalOffer(policy="off"), timing=Timing(deadline_s=30, attempt_s=20))
    before = fetch(honest, server.port, 300)
    before_mb = server.resident_mb()
    during: list[float] = []
    with zmq.Context() as context:
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
                    during += fetch(honest, server.port, 5)
            for sock in socks:
                sock.close(0)
    after = fetch(honest, server.port, 300)
    found = server.call("statistics")
    growth_mb = server.resident_mb() - before_mb
    honest.close()
    figure(
        f"{FRAMES} messages: honest p99 {p99_ms(before):.1f} ms before, {p99_ms(during):.1f} during, {p99_ms(after):.1f} "
        f"after; 0 of {len(during) + 600} failed; {growth_mb:.0f} MB; restarts {found['restarts']}"
    )
    assert found["alive"]
    assert found["restarts"] == 0
    assert growth_mb < 64
    assert p99_ms(during) < max(3 * p99_ms(before), 20), "an honest client waits"


@pytest.mark.full
@pytest.mark.timeout(3600 if FRAMES > 100_000 else 300)
def test_a_client_survives_random_replies(victim: Start, figure: Figure) -> None:
    """Every handshake ends with a code, honest ones beside them succeed in time, and the process does not grow."""
    lock, sent = threading.Lock(), [0]
    seeds = iter(range(1 << 30))

    def act(sock: socket.socket) -> None:
        with lock:
            rng = random.Random(next(seeds))
        while True:
            flags, _ = read_frame(sock)
            if flags & 1:
                continue
            frames = [mutated(rng, GOOD) for _ in range(rng.choice((1, 1, 2, 2, 3, 40)))]
            with lock:
                sent[0] += len(frames)
            sock.sendall(
                b"".join([frame(b"", more=True), *(frame(each, more=each is not frames[-1]) for each in frames)])
            )

    server, honest = HostileServer(act), victim("listener")
    asker = victim("client", deadline_s=DEADLINE_S)
    storm = {"hostile": server.port, "honest": honest.port, "at_once": 2, "honest_every": 8}
    asker.call("storm", **{**storm, "times": 400, "engine": "first-", "honest_every": 1})
    calm = {**storm, "times": 300, "hostile": honest.port, "engine": "", "at_once": 1, "honest_every": 1}
    asker.call("storm", **calm)
    before: list[float] = []
    before_mb, sent[0] = asker.resident_mb(), 0
    codes: Counter[str] = Counter()
    during: list[float] = []
    lost: list[str] = []
    found: dict[str, Any] = {}
    rounds = 0
    while sent[0] < FRAMES and rounds * ROUND < FRAMES:
        # By turns, since other programs on the machine come and go.
        before += asker.call("storm", **{**calm, "times": 50})["honest_s"]
        found = asker.call("storm", **storm, times=ROUND, engine=f"round-{rounds}-")
        codes.update(found["codes"])
        during += found["honest_s"]
        lost += found["honest_lost"]
        rounds += 1
    after = asker.call("storm", **calm)["honest_s"]
    growth_mb = asker.resident_mb() - before_mb
    server.close()
    figure(
        f"{sent[0]} frames in {rounds * ROUND} handshakes: {dict(codes)}; honest p99 {p99_ms(before):.1f} ms before, "
        f"{p99_ms(during):.1f} during, {p99_ms(after):.1f} after; {len(lost)} of {len(during) + 600} failed; {growth_mb:.0f} MB"
    )
    assert sent[0] >= FRAMES
    assert not lost
    assert sum(codes.values()) == rounds * ROUND, "a handshake without an end"
    assert not {"", "transport-failed"} & codes.keys()
    assert found["restarts"] == 0
    assert growth_mb < 64
    assert p99_ms(during) < max(3 * p99_ms(before), 20), "an honest client waits"
