"""`kv-nixl serve` and `kv-nixl doctor --peer`: a test region that another host's doctor reads.

The exchange is one JSON line each way over TCP. The server describes its region, which holds a public test pattern
and nothing else; it serves until the other side closes the connection.
"""

from __future__ import annotations

import base64
import json
import socket
import sys
from typing import Final, cast

import numpy as np

from kv_nixl_agent._doctor._json_values import parse_json
from kv_nixl_agent._doctor._selftest import Bandwidth, measure_pages
from kv_nixl_agent._producer_process import PeerProcess

__all__ = ["measure_peer", "serve_peer"]

_PAGE_BYTES: Final = 65536
_PAGE_COUNT: Final = 512
_GREETING: Final = "kv-nixl-doctor-1"
_MAX_LINE_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 30.0


def serve_peer(host: str, port: int, *, sessions: int = 0) -> int:
    """Serve the test region, `sessions` times or for ever; returns the port once bound is of no more use.

    Raises:
        OSError: when nothing can be bound there.
        ValueError: when no host can have this name.
    """
    socket.getaddrinfo(host or None, port)  # a name that no host can have is refused before there is a socket to close
    with socket.create_server((host, port)) as server:
        bound: int = server.getsockname()[1]
        print(f"serving a test region on {host}:{bound}", flush=True)
        served = 0
        while not sessions or served < sessions:
            try:
                connection, _ = server.accept()
            except ConnectionError:  # gone before it was taken
                continue
            with connection:
                connection.settimeout(_TIMEOUT_S)
                _serve_one(connection)
            served += 1
    return bound


def _serve_one(connection: socket.socket) -> None:
    try:
        if _receive(connection).get("greeting") != _GREETING:
            return
        producer = PeerProcess("doctor-peer", page_bytes=_PAGE_BYTES, page_count=_PAGE_COUNT)
        try:
            described = {
                "metadata": base64.b64encode(producer.agent_metadata).decode(),
                "rows": producer.rows.tolist(),
                "fence": producer.fence,
            }
            connection.sendall(json.dumps(described).encode() + b"\n")
            connection.recv(1)  # the other side closes when it is done
        finally:
            producer.close()
    except (OSError, ValueError):
        return  # a client that talks nonsense or hangs is no reason to stop serving
    except Exception as error:  # noqa: BLE001  (nor is whatever else a client brings about)
        print(f"kv-nixl: a doctor was not served: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def measure_peer(host: str, port: int) -> Bandwidth:
    """Read another host's test region.

    Raises:
        AgentError: as `TransferAgent`.
        OSError: when the peer cannot be reached or does not answer within 30 s.
        ValueError: when it answers nonsense.
        RuntimeError: when a read fails or brings other bytes.
    """
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(json.dumps({"greeting": _GREETING}).encode() + b"\n")
        answer = _receive(connection)
        try:
            metadata = base64.b64decode(str(answer["metadata"]), validate=True)
            rows = np.array(answer["rows"], dtype=np.uint64)
            address, device, words = (int(one) for one in answer["fence"])  # type: ignore[attr-defined]
        except (KeyError, TypeError, OverflowError) as error:
            message = f"the peer's answer is not a test region: {error}"
            raise ValueError(message) from error
        if rows.shape != (1, 5) or int(rows[0, 1]) * int(rows[0, 4]) > 1 << 30:
            message = f"the peer describes {rows.shape} rows, or more than 1 GiB"
            raise ValueError(message)
        return measure_pages(metadata, rows, (address, device, words))


def _receive(connection: socket.socket) -> dict[str, object]:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(65536)
        if not piece or len(data) > _MAX_LINE_BYTES:
            message = f"no complete line within {len(data)} bytes"
            raise ValueError(message)
        data += piece
    value = parse_json(data)
    if not isinstance(value, dict):
        message = "not a JSON object"
        raise ValueError(message)  # noqa: TRY004 - callers catch one kind of nonsense
    return cast("dict[str, object]", value)
