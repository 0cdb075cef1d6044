"""Reads between two real processes, with the transports that carried them and the bandwidth beside memcpy's.

The work runs in a child process, because UCX's log level is read at start and its tables go to standard output. They are cut
wherever its buffer is full, so what was measured comes through a pipe of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, final

import numpy as np

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.tools.producer import PeerProcess, page_pattern
from kv_nixl_agent.values import PeerSpec, TransferOrder, TransferResult

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "Bandwidth",
    "PAGE_SIZES",
    "ReadPath",
    "SelfTest",
    "TRANSPORT_ENVIRONMENT",
    "is_tcp",
    "measure_pages",
    "read_paths",
    "reason_in",
    "read_once",
    "run_child",
    "run_selftest",
    "silenced",
]

TRANSPORT_ENVIRONMENT: Final = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "ERROR"}
"""Environment under which UCX prints its tables, and NIXL why it fails."""

_CELLS: Final = re.compile(r"\|([^|]*(?:\|[^|]*)*)\|\s*$")
_READ: Final = re.compile(r"remote memory read by ucp_get\S* into (\S+)(?: memory)?(?: from (\S+))?")


@final
@dataclass(frozen=True, slots=True)
class ReadPath:
    """How reads of a size range travel.

    Attributes:
        into: UCX's name of the local memory, for example `host` or `cuda`.
        source: UCX's name of the peer's memory.
        sizes: Range of bytes, as UCX prints it.
        method: For example `zero-copy`.
        config: Transport and device, for example `cma/memory` or `tcp/lo`.
    """

    into: str
    source: str
    sizes: str
    method: str
    config: str


def read_paths(log: str) -> Sequence[ReadPath]:
    """Return the paths of one-sided reads in UCX's log, in the order in which UCX printed them, without repetition."""
    paths: dict[ReadPath, None] = {}
    current: tuple[str, str] | None = None
    for line in log.splitlines():
        found = _CELLS.search(line)
        if found is None:
            continue
        cells = [cell.strip() for cell in found.group(1).split("|")]
        if len(cells) == 1:
            heading = _READ.search(cells[0])
            if heading is not None:
                current = (heading.group(1), heading.group(2) or "unknown")
            elif "cfg#" not in cells[0]:
                current = None
        elif current is not None and len(cells) == 3 and ".." in cells[0]:
            paths[ReadPath(*current, cells[0], cells[1], cells[2])] = None
    return list(paths)


def is_tcp(path: ReadPath) -> bool:
    """Whether a path goes over TCP, or is emulated by messages that may."""
    return "tcp" in path.config.lower() or "software emulation" in path.method.lower()


PAGE_SIZES: Final = (4096, 16384, 65536, 1 << 20)
_REGION_BYTES: Final = 16 << 20
_TIMEOUT_S: Final = 240.0


@final
@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Best of a few reads of random pages."""

    page_bytes: int
    read_gb_s: float
    memcpy_gb_s: float
    fence_us: float


@final
@dataclass(frozen=True, slots=True)
class SelfTest:
    """Outcome of the two-process self-test."""

    is_ok: bool
    message: str
    bandwidth: Sequence[Bandwidth] = ()
    paths: Sequence[ReadPath] = ()


def run_child(
    call: str, *, timeout_s: float, given: str = "", environment: Mapping[str, str] | None = None
) -> tuple[object, str]:
    """Run a function of this package in a child process; return what it wrote to its descriptor, parsed, and its log.

    The value is None where the child wrote nothing.

    Args:
        call: `module:function(arguments)`, where `{answer}` stands for the descriptor.
        timeout_s: Time after which the child is ended.
        given: Its standard input.
        environment: Variables beyond this process's and those under which UCX prints its tables.

    Raises:
        ValueError: The child cannot be started, is too slow, or was ended while it wrote.
    """
    module, _, function = call.partition(":")
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:  # a pipe may fill up
        answer = file.fileno()
        code = f"from kv_nixl_agent.tools import {module}; {module}.{function.replace('{answer}', str(answer))}"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                input=given,
                env={**os.environ, **TRANSPORT_ENVIRONMENT, **(environment or {})},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                pass_fds=[answer],
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the reads did not end within {timeout_s:.0f} s") from None
        except OSError as error:
            raise ValueError(f"the reads cannot be started: {error}") from error
        file.seek(0)
        written = file.read()
    log = f"{done.stdout}\n{done.stderr}"
    if not written:
        return None, log if reason_in(log) else f"exit code {done.returncode}"
    try:
        return json.loads(written), log
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reads were cut short: {error}") from error


def run_selftest(ucx_tls: str = "", *, page_sizes: Sequence[int] = PAGE_SIZES) -> SelfTest:
    """Run the test in a child and return what it measured; never raises.

    Args:
        ucx_tls: `UCX_TLS` of both processes; this process's own if empty.
        page_sizes: Bytes of the pages that are read, one measurement each.
    """
    environment = {"UCX_TLS": ucx_tls} if ucx_tls else {}
    call = f"selftest:child({{answer}}, {list(page_sizes)})"
    try:
        answer, log = run_child(call, timeout_s=_TIMEOUT_S, environment=environment)
        rows = [Bandwidth(*row) for row in cast("list[tuple[int, float, float, float]]", answer or [])]
    except (TypeError, ValueError) as error:
        return SelfTest(is_ok=False, message=str(error))
    paths = read_paths(log)
    if answer is None:
        return SelfTest(is_ok=False, message=reason_in(log), paths=paths)
    if len(rows) != len(page_sizes):
        message = f"the reads were cut short: {len(rows)} of {len(page_sizes)} page sizes"
        return SelfTest(is_ok=False, message=message, bandwidth=rows, paths=paths)
    return SelfTest(is_ok=True, message=f"{len(rows)} page sizes read and compared", bandwidth=rows, paths=paths)


def child(answer: int, page_sizes: Sequence[int]) -> None:
    """Be the child: measure every page size against a producer in yet another process; write JSON to a descriptor."""
    rows: list[tuple[object, ...]] = []
    for page_bytes in page_sizes:
        producer = PeerProcess("doctor-producer", page_bytes=page_bytes, page_count=_REGION_BYTES // page_bytes)
        try:
            rows.append(astuple(measure_pages(producer.agent_metadata, producer.rows, producer.fence)))
        finally:
            producer.close()
    with os.fdopen(answer, "w") as file:
        json.dump(rows, file)


def measure_pages(
    metadata: bytes, rows: npt.NDArray[np.uint64], fence: tuple[int, int, int], *, repeats: int = 5
) -> Bandwidth:
    """Read all pages of a producer that shows `page_pattern(0, ...)`, compare them, and time it.

    Raises:
        AgentError: as `TransferAgent`.
        RuntimeError: when a read fails or brings other bytes.
    """
    _, page_bytes, _, _, count = rows[0].tolist()
    memory = np.zeros((count, page_bytes), dtype=np.uint8)
    agent = TransferAgent("doctor", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")])
    try:
        local = np.array([[memory.ctypes.data, page_bytes, 0, page_bytes, count]], dtype=np.uint64)
        agent.add_peer(PeerSpec("producer", metadata, local, rows, fence=fence))
        ids = np.random.default_rng(0).permutation(count).astype(np.int32)
        spans: list[float] = []
        fences: list[float] = []
        for number in range(repeats):
            result, span_s = read_once(agent, TransferOrder(f"t{number}", "producer", ids, ids, fence=(0, 0)))
            if result.outcome != "done":
                message = f"a read failed: {result.code}: {result.message}"
                raise RuntimeError(message)
            spans.append(span_s - result.fence_s)
            fences.append(result.fence_s)
        if not np.array_equal(memory, page_pattern(0, count, page_bytes)):
            message = f"pages of {page_bytes} bytes arrived with other content"
            raise RuntimeError(message)
        copy = np.empty_like(memory)
        copies: list[float] = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            np.copyto(copy, memory)
            copies.append(time.perf_counter() - began_s)
        total = memory.nbytes / 1e9
        return Bandwidth(page_bytes, total / min(spans), total / min(copies), min(fences) * 1e6)
    finally:
        agent.close()


def read_once(agent: TransferAgent, order: TransferOrder) -> tuple[TransferResult, float]:
    """Post an order and wait for its end; return its result and the seconds that it took."""
    began_s = time.perf_counter()
    agent.post(order)
    while True:
        agent.advance()
        for result in agent.take_results():
            return result, time.perf_counter() - began_s


_REASONS: Final = (
    re.compile(r"Failed to create UCX context [^:]*: (.+)"),
    re.compile(r"Unexpected UCX error: (.+)"),
    re.compile(r"\bAgentError: (.+)"),
    re.compile(r"\b(\w+(?:Error|Exception): .+)"),
)
"""Sentences that say why NIXL or UCX did not start, those nearest to the cause first."""


@contextlib.contextmanager
def silenced() -> Generator[None]:
    """Drop all that this process and its children write to standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        with Path(os.devnull).open("w") as sink:
            for number, _ in saved:
                os.dup2(sink.fileno(), number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)


def reason_in(log: str) -> str:
    """Return the sentence of a log that is nearest to the cause of a failure; its last line where none is known, "" for none."""
    for pattern in _REASONS:
        found = pattern.search(log)
        if found is not None:
            return found.group(1).strip()
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""
