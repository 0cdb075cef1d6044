"""Thousands of mutated frames: Go and Python give the same answer or the same code, and neither dies.

A difference is a gap of docs/wire: each one found so far became a sentence there.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import zmq
from gopher import Gopher
from test_live import listen
from wire_values import asker, envelope

from kv_handshake import Codec, HandshakeError
from kv_handshake.testing import load_vectors
from kv_handshake.wire.asks import is_ask, parse_answer, parse_ask
from kv_handshake.wire.queries import parse_query
from kv_handshake.wire.replies import decode_clock

VECTORS = load_vectors()
FRAMES_OF_A_KIND = 1500
INTERESTING = bytes.fromhex("00 01 7f 80 90 a0 c0 c1 c2 c4 c6 cb cf d3 d9 dd df ff")


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes after one to three changes: a bit, a byte, a cut, a repeat, or bytes put in."""
    made = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(len(made) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = draw.choice(INTERESTING)
        elif kind == 2:
            del made[at : at + draw.choice([1, 1, 4, 64])]
        elif kind == 3:
            made[at:at] = made[at : at + draw.choice([1, 8, 32])]
        else:
            made[at:at] = bytes(draw.choices(INTERESTING, k=draw.choice([1, 2, 8])))
    return bytes(made)


def frames_of(kinds: set[str], seed: int) -> list[bytes]:
    draw = random.Random(seed)
    sources = [each.data for each in VECTORS if each.kind in kinds]
    return [mutated(draw.choice(sources), draw) for _ in range(FRAMES_OF_A_KIND)]


def code_of(read: Callable[[bytes], object], frame: bytes) -> str:
    try:
        read(frame)
    except HandshakeError as error:
        return error.code
    return ""


def differences(
    gopher: Gopher, do: str, frames: list[bytes], read: Callable[[bytes], object]
) -> list[tuple[str, str, str]]:
    """Return (frame, Go's code, Python's code) where the two differ; metadata with several faults has several codes."""
    found = [(frame.hex(), gopher.code(do, hex=frame.hex(), dialect=15), code_of(read, frame)) for frame in frames]
    assert len({ours for _, _, ours in found}) > 1, "some are read, some refused"
    return [each for each in found if each[1] != each[2] and {*each[1:]} != {"malformed-metadata", "invalid-metadata"}]


def test_queries(gopher: Gopher) -> None:
    assert differences(gopher, "query", frames_of({"query", "refused-query"}, 1), parse_query) == []


def test_envelopes(gopher: Gopher) -> None:
    def read(frame: bytes) -> None:
        found = Codec.decode_envelope(frame)
        if found.refusal is None:
            Codec.decode_metadata(found)

    assert differences(gopher, "envelope", frames_of({"envelope", "refusal", "refused-envelope"}, 2), read) == []


def test_asks(gopher: Gopher) -> None:
    frames = [frame for frame in frames_of({"ask", "refused-ask"}, 9) if is_ask(frame)]
    assert len(frames) > 0.5 * FRAMES_OF_A_KIND
    assert differences(gopher, "ask-query", frames, parse_ask) == []


def test_answers(gopher: Gopher) -> None:
    assert differences(gopher, "answer", frames_of({"answer", "refused-answer"}, 10), parse_answer) == []


def test_clocks(gopher: Gopher) -> None:
    assert differences(gopher, "clock", frames_of({"clock", "refused-clock"}, 3), decode_clock) == []


def test_notifications(gopher: Gopher) -> None:
    for frame in frames_of({"notification"}, 5):
        read: dict[str, Any] = gopher.ok("notification", hex=frame.hex())["notification"]
        ours = Codec().parse_notification(frame)
        assert (read["kind"], read["reason"]) == (ours.kind, ours.reason), frame
        assert tuple(read["request_ids"] or ()) == ours.request_ids, frame


def test_heartbeats_of_too_many_requests(gopher: Gopher) -> None:
    pairs = [f'["{number}","n"]' for number in range(20_000)]
    for count in (8191, 8192, 8193, 8194, 20_000):
        plain = "HB:" + ",".join(map(str, range(count)))
        ours = f"HB:,KVH:[{','.join(pairs[:count])}]"
        for text in (plain, ours, "x" + plain + ":1", "PUSH_REG:" + plain):
            parsed = Codec().parse_notification(text.encode())
            read = gopher.ok("notification", hex=text.encode().hex())["notification"]
            assert (read["reason"], read.get("surplus", 0)) == (parsed.reason, parsed.surplus), text[:20]
            assert tuple(read["request_ids"] or ()) == parsed.request_ids, text[:20]


def test_a_go_listener_outlives_mutated_queries_and_connections(gopher: Gopher) -> None:
    port = listen(gopher)
    draw = random.Random(6)
    with asker(port) as sock:
        for frame in frames_of({"query", "refused-query"}, 7):
            sock.send_multipart([b"", frame])
            answer = sock.recv_multipart()
            assert answer[0] == b""
            assert len(answer) in {2, 3}
        for _ in range(200):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                opening = b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL" + bytes(48)
                raw.sendall(
                    mutated(opening + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x00\x03abc", draw)
                )
        sock.send_multipart([b"", bytes.fromhex(gopher.ok("make-query", dialect=15, pp=0, tp=0))])
        assert sock.recv_multipart()[1] == envelope(15, (0, 0))


def test_a_go_client_outlives_mutated_replies(gopher: Gopher) -> None:
    draw = random.Random(8)
    seen: set[str] = set()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(300):
            frames = [b"", mutated(envelope(15, (0, 0)), draw), mutated(b"\xcb\x40\xc8\x1c\xd0\x00\x00\x00\x00", draw)]
            seen.add(_answered(gopher, server, port, frames[: draw.choice([1, 2, 3, 3, 3])]))
    assert {"malformed-envelope", "checksum-mismatch", "unexpected-reply"} <= seen


def _answered(gopher: Gopher, server: Any, port: int, frames: list[bytes]) -> str:
    """Return the code with which the Go client ends when a server answers its query with these frames."""

    def serve() -> None:
        sender, *_ = server.recv_multipart()
        server.send_multipart([sender, *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    code = gopher.code("ask", address=f"127.0.0.1:{port}", dialect=15, ranks=[(0, 0)], factors={})
    thread.join(10)
    return code
