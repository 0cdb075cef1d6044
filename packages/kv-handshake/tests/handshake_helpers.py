"""Waiting for a condition, one fetch, and hostile bytes: mutated frames and queries that are wrong in one way or another."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import zmq

from kv_handshake import Client, Outcome

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}
RANKS = [(0, rank) for rank in range(8)]


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def failing_first(real: Callable[..., Any], *errors: BaseException) -> Callable[..., Any]:
    """Return a function that raises each error once, and then is the real one."""
    left = iter(errors)

    def call(*values: Any, **options: Any) -> Any:
        for error in left:
            raise error
        return real(*values, **options)

    return call


ARGUMENTS: dict[str, Any] = {"host": "127.0.0.1", "ranks": RANKS, "engine_id": "engine-a", "dialect": 14}


def fetch(client: Client, port: int, **changes: Any) -> Outcome:
    return client.fetch(**{**ARGUMENTS, "port": port, **changes})


def request(client: Client, port: int, on_done: Callable[[Outcome], object], **changes: Any) -> None:
    client.request(**{**ARGUMENTS, "port": port, "on_done": on_done, **changes})


@contextlib.contextmanager
def puppet(script: Callable[[bytes], Iterable[list[bytes]]]) -> Iterator[int]:
    """Listen at the port that is given, and answer each query with the messages that `script` returns for it."""
    stop = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.linger = 0
        port = sock.bind_to_random_port("tcp://127.0.0.1")

        def run() -> None:
            while not stop.is_set():
                if sock.poll(50):
                    identity, _, query = sock.recv_multipart()
                    for frames in script(query):
                        sock.send_multipart([identity, b"", *frames])

        thread = threading.Thread(target=run)
        thread.start()
        yield port
        stop.set()
        thread.join()


def mutate(rng: random.Random, frame: bytes) -> bytes:
    """Return a frame with one thing wrong: a bit, a byte, its end, a repeated or a missing part, or a bad length."""
    data = bytearray(frame)
    kind = rng.randrange(7)
    spot = rng.randrange(len(data)) if data else 0
    if not data or kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:
        data[spot] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[spot] = rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xD4, 0xDD, 0xDF, 0xFF))
    elif kind == 3:
        del data[spot:]
    elif kind == 4:
        data[spot:spot] = data[spot : spot + rng.randrange(16)]
    elif kind == 5:
        del data[spot : spot + 1 + rng.randrange(4)]
    else:
        data[spot:spot] = rng.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 80)
        )
    return bytes(data)
