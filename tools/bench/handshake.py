"""Speed of kv-handshake against bare ZeroMQ that moves the same bytes.

Every number is a ratio of medians; ours and the baseline take turns within the run, so that a busy machine hits both.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any

import zmq
from _rows import by_turns, row

from kv_handshake import Client, Listener, LocalOffer, QueryLimits, Timing
from kv_handshake.testing import sample_envelopes
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query

DIALECT = dialect_of(14)
FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}
RANKS = [(0, rank) for rank in range(8)]
ASKED: dict[str, Any] = {"host": "127.0.0.1", "ranks": RANKS, "engine_id": "engine-a", "dialect": 14}
QUERIES = 4000
WINDOW = 32
ROUNDS = 150
PAUSE_S = 0.005
"""Between two handshakes: each side closes its sockets after it, and must not do so in the other's time."""


def run() -> Iterator[dict[str, object]]:
    """Measure everything and return one mapping per number."""
    envelopes = sample_envelopes(RANKS, regions=128)
    for measure in (_responses, _handshake, _dead_peers):
        yield measure(envelopes)


# Server responses per second -----------------------------------------------------------------------------------------


def _responses(envelopes: Mapping[tuple[int, int], bytes]) -> dict[str, object]:
    """Count replies per second to a client with `WINDOW` queries under way; servers in processes of their own."""
    with _served(_serve_ours, envelopes) as our_port, _served(_serve_bare, envelopes) as bare_port:
        calls = (partial(_flood, our_port), partial(_flood, bare_port))
        ours, bare = (1e6 * QUERIES / us for us in by_turns(9, *calls, clock=time.perf_counter))
    return row("server responses", "1/s", ours, bare, ">= 0.7")


def _flood(port: int) -> None:
    query = encode_query((0, 3), DIALECT)
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{port}")
        for number in range(QUERIES + WINDOW):
            if number < QUERIES:
                sock.send_multipart((b"", query))
            if number >= WINDOW:
                sock.recv_multipart()


@contextlib.contextmanager
def _served(target: Callable[..., None], envelopes: Mapping[tuple[int, int], bytes]) -> Iterator[int]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    stop = spawn.Event()
    process = spawn.Process(target=target, args=(dict(envelopes), theirs.send, stop), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        stop.set()
        process.join(5)
        if process.is_alive():
            process.kill()


def _serve_ours(envelopes: Mapping[tuple[int, int], bytes], tell: Callable[[int], None], stop: ProcessEvent) -> None:
    # The limiter works as always; it is only set so high that it lets everything through.
    limits = QueryLimits(queries_per_s=1e6, burst=1e6)
    with Listener("127.0.0.1", 0, payloads=envelopes, limits=limits) as listener:
        tell(listener.port)
        stop.wait()


def _serve_bare(envelopes: Mapping[tuple[int, int], bytes], tell: Callable[[int], None], stop: ProcessEvent) -> None:
    payload, clock = envelopes[0, 3], b"\xcb" + bytes(8)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 500)
        tell(sock.bind_to_random_port("tcp://127.0.0.1"))
        while not stop.is_set():
            with contextlib.suppress(zmq.Again):
                identity, empty, _ = sock.recv_multipart()
                sock.send_multipart((identity, empty, payload, clock))


# Single handshake ----------------------------------------------------------------------------------------------------


def _handshake(envelopes: Mapping[tuple[int, int], bytes]) -> dict[str, object]:
    """Time one handshake of 8 ranks, connection included, against one bare REQ socket that fetches the same bytes.

    Both sides keep what a program keeps between two handshakes: ours its client, the bare one its context.
    """

    def fetch() -> None:
        outcome = client.fetch(port=our_port, **ASKED)
        if not outcome.is_ok:
            raise RuntimeError(outcome.message)

    with (
        _served(_serve_ours, envelopes) as our_port,
        _served(_serve_bare, envelopes) as bare_port,
        zmq.Context() as context,
        Client(LocalOffer(factors=FACTORS)) as client,
    ):
        calls = (fetch, partial(_fetch_bare, context, bare_port))
        ours, bare = (us / 1e6 for us in by_turns(ROUNDS, *calls, clock=time.perf_counter, pause_s=PAUSE_S))
    return row("handshake of 8 ranks x 128 regions", "s", ours, bare, "<= 1.5")


def _fetch_bare(context: zmq.Context[zmq.Socket[bytes]], port: int) -> None:
    with context.socket(zmq.REQ) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.connect(f"tcp://127.0.0.1:{port}")
        for rank in RANKS:
            sock.send(encode_query(rank, DIALECT))
            sock.recv_multipart()


# Dead peers ----------------------------------------------------------------------------------------------------------


def _dead_peers(envelopes: Mapping[tuple[int, int], bytes]) -> dict[str, object]:
    """Time 48 healthy peers, asked together with 16 dead ones and without them. Half of the dead hang, half refuse."""
    with_dead, without = [], []
    with (
        _served(_serve_ours, envelopes) as port,
        socket.create_server(("127.0.0.1", 0), backlog=256) as mute,
        socket.socket() as closed,
    ):
        closed.bind(("127.0.0.1", 0))
        dead = [mute.getsockname()[1], closed.getsockname()[1]] * 8
        mixed = [port if index % 4 else dead[index // 4] for index in range(64)]
        for _ in range(9):
            without.append(_time_healthy([port] * 48, port))
            with_dead.append(_time_healthy(mixed, port))
    median, baseline = statistics.median(with_dead), statistics.median(without)
    return row("healthy peers beside dead ones", "s", median, baseline, "<= 2")


def _time_healthy(ports: Sequence[int], healthy: int) -> float:
    """Return the time until every healthy peer is ready, with a fresh client."""
    left = threading.Semaphore(0)
    with Client(LocalOffer(factors=FACTORS), timing=Timing(deadline_s=30, attempt_s=10)) as client:
        began = time.perf_counter()
        for port in ports:
            client.request(port=port, on_done=lambda outcome: left.release() if outcome.is_ok else None, **ASKED)
        for _ in range(ports.count(healthy)):
            if not left.acquire(timeout=20):
                raise RuntimeError("a healthy peer was not ready in 20 s")
        return time.perf_counter() - began
