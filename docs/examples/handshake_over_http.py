"""The handshake over HTTP: both halves of kv-handshake's protocol, with the standard library in place of ZeroMQ.

    python docs/examples/handshake_over_http.py

A query is the body of a POST; the answer's body holds the frames of the reply, each with its length in four bytes.
"""

from __future__ import annotations

import http.client
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from kv_handshake import Codec, LocalOffer, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_handshake import AgentMetadata

    Rank = tuple[int, int]

DIALECT = 14
MOST_BYTES = 65536
"""Longest query that is read; the protocol's own limit is lower, and refuses it with a code."""


class HttpListener:
    """Serves envelopes on a port of this machine."""

    def __init__(self, payloads: Mapping[Rank, bytes]) -> None:
        core = Codec.server_core(payloads)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = self.rfile.read(min(int(self.headers.get("Content-Length") or 0), MOST_BYTES))
                frames = core.respond(query, clock_s=time.perf_counter())
                body = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it that
                """Say nothing of each request."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def fetch(
    port: int, ranks: Sequence[Rank], offer: LocalOffer, *, timeout_s: float = 5.0
) -> Mapping[Rank, AgentMetadata]:
    """Return the metadata of an engine's ranks.

    Raises:
        HandshakeError: The code that a client over ZeroMQ would give: the session is the same.
    """
    session = Codec.client_session(offer, ranks, dialect=DIALECT)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        while session.queries_left and not session.is_over:
            connection.request("POST", "/handshake", session.next_query(now_s=time.monotonic()))
            session.receive_message(split(connection.getresponse().read()), now_s=time.monotonic())
    except TimeoutError:
        session.fail(TransportError("timed-out", f"port {port} did not answer within {timeout_s} s"))
    except ConnectionRefusedError:
        session.fail(TransportError("connection-refused", f"nothing accepts connections at port {port}"))
    except (OSError, http.client.HTTPException) as error:
        session.fail(TransportError("connection-lost", f"port {port}: {error!r}"))
    finally:
        connection.close()
    if session.error is not None:
        raise session.error
    return session.peers


def split(body: bytes) -> list[bytes]:
    """Return the frames of an answer: 02000000 "ab" 01000000 "c" holds "ab" and "c"; a cut one ends with what there is."""
    frames, at = [], 0
    while at + 4 <= len(body):
        (size,) = struct.unpack_from("<I", body, at)
        frames.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return frames


def envelope(rank: int, factors: Mapping[str, object]) -> bytes:
    """Return the envelope of one of two ranks with 4 of 8 heads each."""
    metadata = {
        "engine_id": "prefill", "agent_metadata": b"the transfer library's own blob", "kv_caches_base_addr": [4096],
        "device_id": rank, "num_blocks": 100, "block_lens": [32768], "kv_cache_layout": "HND", "block_size": 16,
        "ssm_sizes": (0, 0), "attn_backend_name": "FLASH_ATTN",
    }  # fmt: skip
    return Codec().encode_envelope(metadata, factors, dialect=DIALECT, rank=(0, rank))


def main() -> int:
    """Query an engine of two ranks; be refused with another dtype, by another rank, by a port that is closed."""
    factors = {"model": "toy", "dtype": "bfloat16", "num_kv_heads": 8}
    listener = HttpListener({(0, rank): envelope(rank, factors) for rank in range(2)})
    ours = LocalOffer(factors=factors, policy="negotiated")
    peers = fetch(listener.port, [(0, 0), (0, 1)], ours)
    print("connected:", {rank: f"device {peer.device_id}, {peer.num_blocks} blocks" for rank, peer in peers.items()})
    stranger = LocalOffer(factors={**factors, "dtype": "float32"}, policy="negotiated")
    for words, rank, offer in (("another dtype", 0, stranger), ("a third rank", 2, ours)):
        try:
            fetch(listener.port, [(0, rank)], offer)
        except Exception as error:  # noqa: BLE001 - shown to the reader
            print(f"{words}: {error}")
    listener.close()
    try:
        fetch(listener.port, [(0, 0)], ours)
    except TransportError as error:
        print(f"a closed port: {error.code}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
