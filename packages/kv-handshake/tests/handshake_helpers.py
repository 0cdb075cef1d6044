"""Waiting for a condition, one fetch, and hostile bytes: mutated frames and queries that are wrong in one way or another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kv_handshake.wire.asks import encode_ask, encode_cancel
from kv_handshake.wire.dialects import dialect_of
from kv_handshake.wire.queries import encode_query

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from kv_handshake import Client, Outcome

__all__ = ["FACTORS", "RANKS", "fetch", "hostile_queries", "mutate", "until"]

FACTORS = {"model": "sample", "dtype": "torch.bfloat16", "num_kv_heads": 8}
RANKS = [(0, rank) for rank in range(8)]


def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.005)


def fetch(client: Client, port: int, **changes: object) -> Outcome:
    arguments = {"host": "127.0.0.1", "port": port, "ranks": RANKS, "engine_id": "engine-a", "dialect": 14}
    return client.fetch(**{**arguments, **changes})  # type: ignore[arg-type]


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


def hostile_queries(rng: random.Random) -> Iterator[bytes]:
    """Yield endless queries that are wrong in one way or another; now and then one of them is valid all the same."""
    good = [encode_query((0, tp), dialect_of(version)) for version in (2, 14) for tp in (0, 1, 200, 60_000)]
    good += [encode_ask(1, b""), encode_ask(70_000, b"question"), encode_cancel(70_000)]
    wild: list[object] = [None, True, -1, 0.5, "0", b"0", 2**63, [], {}, [[0]], {"a": 1}, b"get_meta_msg"]
    while True:
        kind = rng.randrange(4)
        if kind == 0:
            yield rng.randbytes(rng.randrange(300))
        elif kind == 1:
            fields = [rng.choice((b"get_meta_msg", b"ask", "get_meta_msg", rng.choice(wild)))]
            yield msgspec.msgpack.encode(fields + [rng.choice(wild) for _ in range(rng.randrange(5))])
        else:
            frame = rng.choice(good)
            for _ in range(rng.randrange(1, 4)):
                frame = mutate(rng, frame)
            yield frame
