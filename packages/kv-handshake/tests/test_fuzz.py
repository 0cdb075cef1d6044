"""Hostile frames against a real listener in a process of its own.

KV_HANDSHAKE_FUZZ_FRAMES sets how many frames (default 200 000; ten million for a night), KV_HANDSHAKE_FUZZ_SEED which.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import zmq
from hostile import hostile_queries

from kv_handshake.errors import CODES
from kv_handshake.stream.messages import parse_answer
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query
from kv_handshake.wire.replies import decode_envelope

FRAMES = int(os.environ.get("KV_HANDSHAKE_FUZZ_FRAMES", "200000"))
SEED = int(os.environ.get("KV_HANDSHAKE_FUZZ_SEED", "1"))
BATCH = 100

SERVER = """
import json, sys
from kv_handshake import Listener, QueryLimits
from kv_handshake.testing import sample_envelopes
payloads = sample_envelopes([(0, rank) for rank in range(8)])
listener = Listener("127.0.0.1", 0, payloads=payloads, limits=QueryLimits(queries_per_s=0))
listener.take_asks(listener.answer, lambda ask_id: None)
listener.start()
print(listener.port, flush=True)
for line in sys.stdin:
    print(json.dumps(dict(listener.statistics()) | {"alive": listener.is_alive}), flush=True)
listener.close()
"""


class ServerProcess:
    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._process.stdout.readline())

    def statistics(self):
        self._process.stdin.write("statistics\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def resident_bytes(self):
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


@lru_cache(maxsize=10_000)
def code_of(payload):
    if payload[:1] in (b"\x93", b"\x94"):
        return parse_answer(payload).code
    refusal = decode_envelope(payload).refusal
    return refusal.code if refusal else ""


def shaped(rng, query):
    """Return the frames in which some socket would send the query; some of them are no query at all."""
    kind = rng.randrange(10)
    if kind < 6:
        return [b"", query]
    if kind < 8 or not query:
        return [query]
    if kind == 8:
        return [query, b"", query]
    return [b""] * rng.randrange(3, 40)


@pytest.mark.full
@pytest.mark.timeout(max(300, FRAMES // 1000))
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_every_frame_is_answered_or_refused(raw):
    rng = random.Random(SEED)
    stream = hostile_queries(rng)
    good = encode_query((0, 3), dialect_of(14))
    expected = sample_envelopes([(0, 3)])[0, 3]
    memory, codes = [], set()
    with contextlib.closing(ServerProcess()) as server:
        sock, calm = raw(zmq.DEALER, server.port), raw(zmq.REQ, server.port)
        for sent in range(BATCH, FRAMES + BATCH, BATCH):
            for _ in range(BATCH):
                sock.send_multipart(shaped(rng, next(stream)))
            for _ in range(BATCH):
                reply = sock.recv_multipart()  # raises if a frame was left without an answer
                codes.add(code_of(reply[1] if len(reply) > 1 and not reply[0] else reply[0]))
            if sent % 1000 == 0:
                calm.send(good)
                assert calm.recv_multipart()[0] == expected
            if sent % (FRAMES // 10) == 0:
                memory.append(server.resident_bytes())
        statistics = server.statistics()
    assert codes <= {"", *CODES}
    assert codes >= {
        "malformed-query",
        "wrong-arity",
        "unknown-command",
        "unknown-rank",
        "oversized-query",
        "wrong-frames",
        "wrong-type",
        "ask-cancelled",
    }
    assert statistics["asks"] == statistics["asks_answered"] > 0
    counted = sum(
        count for name, count in statistics.items() if name.endswith("answered") or name.startswith("refused.")
    )
    assert counted == FRAMES + FRAMES // 1000, "every frame is counted, and so is every good request"
    assert (statistics["restarts"], statistics["unsent"], statistics["alive"]) == (0, 0, True)
    growth = max(memory) - memory[1]
    assert growth < 4 * 1024 * 1024, f"memory grew by {growth} bytes over {FRAMES} frames"


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_many_short_lives(listener, raw, kind):
    """Each hostile frame on a connection of its own."""
    rng = random.Random(SEED)
    stream = hostile_queries(rng)
    for _ in range(100):
        sock = raw(kind, listener.port)
        sock.send(next(stream))
        if rng.random() < 0.5:
            sock.recv_multipart()
        sock.close(0)
    assert listener.is_alive
    assert listener.statistics()["restarts"] == 0
