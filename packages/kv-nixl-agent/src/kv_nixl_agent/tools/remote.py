"""Reads from other processes and hosts: `measure_ranks`, `kv-nixl serve` and `kv-nixl doctor --peer`.

`measure_ranks` reads the probe pages of live ranks, compares and times them, and reports the transport. The work runs in a child
process, because UCX reads its log level and its choice of transports when it starts. The ranks' other memory is not read.

`serve` and `doctor --peer` exchange one JSON line each way over TCP. The server describes its region, which holds a public test
pattern and nothing else; it serves until the other side closes the connection.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import sys
import zlib
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast, final

import numpy as np

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.fences import PROBE_PAGE_BYTES, PROBE_PAGES, probe_pattern, probe_rows
from kv_nixl_agent.tools.producer import PeerProcess
from kv_nixl_agent.tools.selftest import (
    Bandwidth,
    ReadPath,
    is_tcp,
    measure_pages,
    read_once,
    read_paths,
    reason_in,
    run_child,
)
from kv_nixl_agent.values import PeerSpec, TransferOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


__all__ = ["LiveRank", "Measurement", "RankRead", "measure_peer", "measure_ranks", "read_rank", "serve_peer"]

_BATCH_PAGES: Final = 256
_LEAST_READS: Final = 3
_START_S: Final = 30.0
"""Time for the child to load NIXL."""


@final
@dataclass(frozen=True, slots=True)
class LiveRank:
    """A rank to read from.

    Attributes:
        name: Its name in the result.
        agent_metadata: Metadata of its agent, which readers connect with.
        fence: (address, device, word count) of its fence array.
    """

    name: str
    agent_metadata: bytes
    fence: tuple[int, int, int]


@final
@dataclass(frozen=True, slots=True)
class RankRead:
    """Result for one rank.

    Attributes:
        name: The rank.
        code: Empty if its pages came as they should; else the reason, for example `timed-out`, `bytes-differ`.
        message: The reason in words.
        checksum: CRC-32 of the probe pages as they came.
        word_us: Shortest read of one word, microseconds.
        read_gb_s: Fastest of the batches, 1e9 bytes per second.
        moved_bytes: Bytes read in all.
    """

    name: str
    code: str = ""
    message: str = ""
    checksum: int = 0
    word_us: float = 0.0
    read_gb_s: float = 0.0
    moved_bytes: int = 0


@final
@dataclass(frozen=True, slots=True)
class Measurement:
    """Results of all ranks, and the transports that UCX chose for the reads.

    Attributes:
        ranks: In the order of the question.
        paths: Each with its sizes, method and transport; empty if UCX did not tell.
        error: Reason for which nothing was measured; empty if something was.
    """

    ranks: Sequence[RankRead]
    paths: Sequence[ReadPath] = ()
    error: str = ""

    @property
    def is_tcp(self) -> bool:
        """Whether some reads go over TCP."""
        return any(is_tcp(path) for path in self.paths)


def measure_ranks(ranks: Sequence[LiveRank], *, most_bytes: int, timeout_s: float) -> Measurement:
    """Read from each rank in a child process and return the results; never raises.

    Args:
        ranks: The ranks.
        most_bytes: Bytes to read from each rank, at most.
        timeout_s: Longest wait for each read.
    """
    given = [{**asdict(rank), "agent_metadata": base64.b64encode(rank.agent_metadata).decode()} for rank in ranks]
    call, limit_s = f"remote:child({{answer}}, {most_bytes}, {timeout_s})", _START_S + len(ranks) * 4 * timeout_s
    try:
        answer, log = run_child(call, timeout_s=limit_s, given=json.dumps(given))
        read = [RankRead(**entry) for entry in cast("list[dict[str, Any]]", answer or [])]
    except (TypeError, ValueError) as error:
        return Measurement([], error=str(error))
    paths, missing = read_paths(log), len(ranks) - len(read)
    if answer is None:
        return Measurement([], paths, reason_in(log))
    return Measurement(read, paths, f"the reads were cut short: {missing} ranks are missing" if missing else "")


def child(answer: int, most_bytes: int, timeout_s: float) -> None:
    """Be the child: read the ranks that standard input describes; write JSON to a descriptor."""
    ranks = [
        LiveRank(given["name"], base64.b64decode(given["agent_metadata"]), tuple(given["fence"]))
        for given in json.load(sys.stdin)
    ]
    memory = np.zeros((_BATCH_PAGES, PROBE_PAGE_BYTES), dtype=np.uint8)
    agent = TransferAgent(f"preflight-{secrets.token_hex(4)}", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")])
    try:
        results = [asdict(read_rank(agent, memory, rank, most_bytes, timeout_s)) for rank in ranks]
    finally:
        agent.close()
    with os.fdopen(answer, "w") as file:
        json.dump(results, file)


def read_rank(
    agent: TransferAgent, memory: npt.NDArray[np.uint8], rank: LiveRank, most_bytes: int, timeout_s: float
) -> RankRead:
    """Read a rank's probe pages once to compare them, one word, and batches of all pages; return the result.

    Example: 16 MiB a batch and at most 64 MiB are four batches; one that takes longer than a second is the last.

    Args:
        agent: The agent that reads.
        memory: Its registered pages, uint8 (batch, PROBE_PAGE_BYTES).
        rank: The rank.
        most_bytes: Bytes to read in batches, at most.
        timeout_s: Longest wait for each read.
    """
    batch_pages = len(memory)
    numbers = count()

    def read(pages: int) -> float:
        """Read so many pages, 0 for one word, and return the seconds that it took."""
        local = np.arange(pages, dtype=np.int32)
        order = TransferOrder(
            f"{rank.name} {next(numbers)}",
            rank.name,
            local,
            local % PROBE_PAGES,
            deadline_s=timeout_s,
            operation="read" if pages else "probe",
        )
        result, span_s = read_once(agent, order)
        if result.outcome != "done":
            raise AgentError(result.code, result.message)
        return span_s

    rows = np.array([[memory.ctypes.data, PROBE_PAGE_BYTES, 0, PROBE_PAGE_BYTES, batch_pages]], dtype=np.uint64)
    wanted = probe_pattern().tobytes()
    moved, best_s = 0, float("inf")
    try:
        agent.add_peer(PeerSpec(rank.name, rank.agent_metadata, rows, probe_rows(rank.fence), fence=rank.fence))
        memory[:] = 0
        read(PROBE_PAGES)
        arrived = memory[:PROBE_PAGES].tobytes()
        if arrived != wanted:
            message = f"the probe pages came with checksum {zlib.crc32(arrived):08x}, their content has {zlib.crc32(wanted):08x}"
            return RankRead(rank.name, "bytes-differ", message)
        word_us = min(read(0) for _ in range(_LEAST_READS)) * 1e6
        while moved + memory.nbytes <= most_bytes:
            took_s = read(batch_pages)
            moved += memory.nbytes
            best_s = min(best_s, took_s)
            if took_s > 1.0:
                break
    except AgentError as error:
        return RankRead(rank.name, error.code, error.message)
    return RankRead(rank.name, "", "", zlib.crc32(arrived), word_us, memory.nbytes / best_s / 1e9, moved)


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
        return  # a client that sends something invalid or hangs is no reason to stop serving
    except Exception as error:  # noqa: BLE001  (nor is whatever else a client brings about)
        print(f"kv-nixl: a doctor was not served: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def measure_peer(host: str, port: int) -> Bandwidth:
    """Read another host's test region.

    Raises:
        AgentError: as `TransferAgent`.
        OSError: when the peer cannot be reached or does not answer within 30 s.
        ValueError: when its answer is invalid.
        RuntimeError: when a read fails or brings other bytes.
    """
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(json.dumps({"greeting": _GREETING}).encode() + b"\n")
        answer = _receive(connection)
        try:
            metadata = base64.b64decode(str(answer["metadata"]), validate=True)
            rows = np.array(answer["rows"], dtype=np.uint64)
            address, device, words = (int(number) for number in answer["fence"])
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the peer's answer is not a test region: {error}") from error
        if rows.shape != (1, 5) or int(rows[0, 1]) * int(rows[0, 4]) > 1 << 30:
            raise ValueError(f"the peer describes {rows.shape} rows, or more than 1 GiB")
        return measure_pages(metadata, rows, (address, device, words))


def _receive(connection: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        piece = connection.recv(65536)
        if not piece or len(data) > _MAX_LINE_BYTES:
            raise ValueError(f"no complete line within {len(data)} bytes")
        data += piece
    try:
        value = json.loads(data)
    except RecursionError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - callers catch one kind of error
    return cast("dict[str, Any]", value)
