"""Exchanges over loopback between the Go program and our listener, our client, and plain sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import zmq
from gopher import Gopher
from wire_values import FACTORS, METADATA, asker, envelope, fetch

from kv_handshake import Codec, Listener, LocalOffer
from kv_nixl_agent.memory.peers import add_checksum

DIALECTS = (2, 4, 5, 9, 13, 15)
RANKS = [(0, 0), (0, 1)]


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    """A listener of ours that serves two ranks in the dialect of the parameter."""
    dialect = getattr(request, "param", 15)
    made = Listener("127.0.0.1", 0, payloads={rank: envelope(dialect, rank) for rank in RANKS})
    made.start()
    yield made
    made.close()


def address(listener: Listener) -> str:
    return f"127.0.0.1:{listener.port}"


def offer(**changes: object) -> dict[str, object]:
    return {"factors": FACTORS, **changes}


@pytest.mark.parametrize(("listener", "dialect"), [(each, each) for each in DIALECTS], indirect=["listener"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_go_asks_our_listener(gopher: Gopher, listener: Listener, dialect: int, is_exact: bool) -> None:
    before = time.monotonic()
    first, second = gopher.ok("ask", address=address(listener), dialect=dialect, ranks=RANKS, **offer(exact=is_exact))
    for (_, tp), reply in zip(RANKS, (first, second), strict=True):
        metadata = reply["metadata"]
        assert metadata["engine_id"] == METADATA["engine_id"]
        assert metadata["kv_caches_base_addr"] == [4096 + tp, 1 << 40]
        assert reply["is_agent_sound"] is True
        assert bytes.fromhex(metadata["agent_metadata"]) == add_checksum(b"nixlSerDes|blob|")
        assert metadata["kvh_fence"] == [8192, 0, 64]
        assert (before <= reply["clock"] <= time.monotonic()) is (dialect >= 5)


def test_go_is_refused_what_is_not_served(gopher: Gopher, listener: Listener) -> None:
    for dialect, rank in ((15, (0, 7)), (4, (0, 7)), (15, (0, 65536))):
        refused = gopher.ask(do="ask", address=address(listener), dialect=dialect, ranks=[rank], **offer())
        assert refused["code"] == "refused"
        assert "unknown-rank" in refused["message"]


@pytest.mark.parametrize(
    ("ours", "code"),
    [
        ({"exact": True, "factors": {**FACTORS, "dtype": "torch.float16"}}, "hash-mismatch"),
        ({"factors": {**FACTORS, "dtype": "torch.float16"}}, "factors-differ"),
        ({"factors": {**FACTORS, "vllm_version": "0.33.9"}}, ""),
        ({"factors": {**FACTORS, "vllm_version": "0.34.0"}}, "factors-differ"),
        ({"factors": {**FACTORS, "attn_backend_name": "OTHER", "block_size": 32}}, ""),
        ({"factors": {**FACTORS, "rope": 2}}, "factors-differ"),
        ({"factors": {**FACTORS, "model_weights": "ab"}}, ""),
        ({"capabilities": {"not-there": "required"}}, "capability-missing"),
    ],
)
def test_go_and_python_compare_alike(gopher: Gopher, listener: Listener, ours: dict[str, Any], code: str) -> None:
    request = {**offer(), **ours}
    assert gopher.code("ask", address=address(listener), dialect=15, ranks=RANKS, **request) == code
    policy: Literal["exact", "negotiated"] = "exact" if ours.get("exact") else "negotiated"
    offered = LocalOffer(factors=request["factors"], policy=policy, capabilities=ours.get("capabilities", {}))
    assert fetch(listener.port, RANKS, offer=offered).code == code


def listen(gopher: Gopher, dialect: int = 15) -> int:
    """Start a listener in Go that serves two ranks; return its port."""
    serve = {f"{pp},{tp}": envelope(dialect, (pp, tp)).hex() for pp, tp in RANKS}
    return gopher.ok("listen", serve=serve)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_our_client_asks_go(gopher: Gopher, dialect: int) -> None:
    port = listen(gopher, dialect)
    outcome, missing = (fetch(port, ranks, dialect) for ranks in (RANKS, [(0, 9)]))
    assert outcome.is_ok, outcome.message
    assert outcome.peers[0, 1].kv_caches_base_addr == (4097, 1 << 40)
    assert missing.code == "refused"
    assert "unknown-rank" in missing.message


def test_go_answers_a_req_socket_and_a_dealer_without_an_empty_frame(gopher: Gopher) -> None:
    port = listen(gopher)
    query = bytes.fromhex(gopher.ok("make-query", dialect=15, pp=0, tp=1))
    for kind in (zmq.REQ, zmq.DEALER):
        with asker(port, kind) as sock:
            sock.send(query)
            frames = sock.recv_multipart()
            assert len(frames) == 2
            assert Codec.decode_metadata(Codec.decode_envelope(frames[0])).engine_id == "p0"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"", b"x" * 300], "oversized-query"),
        ([b"", b"\xc1"], "malformed-query"),
        ([b"", b"a", b"b"], "wrong-frames"),
        ([b"", bytes.fromhex("92a0c3")], "unknown-command"),
        ([b"", bytes.fromhex("93c40c6765745f6d6574615f6d7367ff00")], "wrong-type"),
    ],
)
@pytest.mark.parametrize("is_go", [True, False])
def test_both_listeners_refuse_bad_queries_by_code(
    gopher: Gopher, listener: Listener, frames: list[bytes], code: str, is_go: bool
) -> None:
    port = listen(gopher) if is_go else listener.port
    with asker(port) as sock:
        sock.send_multipart(frames)
        answer = sock.recv_multipart()
    refusal = Codec.decode_envelope(answer[1]).refusal
    assert len(answer) == 2, "a query that cannot be read gets no clock frame"
    assert refusal
    assert refusal.code == code


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
        b"\xff" + bytes(7) + b"\x01\x7f\x02\x00NULL" + bytes(48) + b"\x04\x06\x05READY",
    ],
    ids=["nothing", "HTTP", "ZMTP 2"],
)
def test_go_refuses_a_server_that_speaks_no_zmtp_3(gopher: Gopher, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        code = gopher.code("ask", address=f"127.0.0.1:{port}", dialect=15, ranks=RANKS, **offer())
        thread.join(60)
    assert code == "authentication-refused"
