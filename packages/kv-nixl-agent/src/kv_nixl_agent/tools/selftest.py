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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast, final

import numpy as np

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.tools.producer import PeerProcess, page_pattern
from kv_nixl_agent.values import PeerSpec, TransferOrder

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "Bandwidth",
    "Captured",
    "ReadPath",
    "SelfTest",
    "TRANSPORT_ENVIRONMENT",
    "captured_output",
    "is_tcp",
    "measure_pages",
    "parse_json",
    "read_paths",
    "reason_in",
    "run_selftest",
]

TRANSPORT_ENVIRONMENT: Final[Mapping[str, str]] = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""Environment under which UCX prints its tables."""

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
_TIMEOUT_S: Final = 120.0


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
    paths: Sequence[ReadPath] = field(default_factory=tuple[ReadPath, ...])


def run_selftest(ucx_tls: str = "", *, page_sizes: Sequence[int] = PAGE_SIZES) -> SelfTest:
    """Run the test in a child and return what it measured; never raises.

    Args:
        ucx_tls: `UCX_TLS` of both processes; this process's own if empty.
        page_sizes: Bytes of the pages that are read, one measurement each.
    """
    ours, theirs = os.pipe()
    call = f"child({theirs}, {list(page_sizes)})"
    command = [sys.executable, "-c", f"from kv_nixl_agent.tools.selftest import child; {call}"]
    environment = {**os.environ, **TRANSPORT_ENVIRONMENT, **({"UCX_TLS": ucx_tls} if ucx_tls else {})}
    with os.fdopen(ours, errors="replace") as measured:
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
                pass_fds=[theirs],
            )
        except subprocess.TimeoutExpired:
            return SelfTest(is_ok=False, message=f"the self-test did not end within {_TIMEOUT_S:.0f} s")
        except OSError as error:
            return SelfTest(is_ok=False, message=f"the self-test cannot be started: {error}")
        finally:
            os.close(theirs)
        answer = measured.read()
    log = done.stdout + "\n" + done.stderr
    paths = read_paths(log)
    if answer:
        try:
            rows = [Bandwidth(*row) for row in cast("list[tuple[int, float, float, float]]", parse_json(answer))]
        except (TypeError, ValueError) as error:  # a child that was ended while it wrote
            return SelfTest(is_ok=False, message=f"the self-test was cut short: {error}", paths=paths)
        if len(rows) != len(page_sizes):
            message = f"the self-test was cut short: {len(rows)} of {len(page_sizes)} page sizes"
            return SelfTest(is_ok=False, message=message, bandwidth=rows, paths=paths)
        return SelfTest(is_ok=True, message=f"{len(rows)} page sizes read and compared", bandwidth=rows, paths=paths)
    return SelfTest(is_ok=False, message=reason_in(log) or f"exit code {done.returncode}", paths=paths)


def child(answer: int, page_sizes: Sequence[int]) -> None:
    """Be the child: measure every page size against a producer in yet another process; write JSON to a descriptor."""
    rows: list[tuple[int, float, float, float]] = []
    for page_bytes in page_sizes:
        producer = PeerProcess("doctor-producer", page_bytes=page_bytes, page_count=_REGION_BYTES // page_bytes)
        try:
            measured = measure_pages(producer.agent_metadata, producer.rows, producer.fence)
        finally:
            producer.close()
        rows.append((measured.page_bytes, measured.read_gb_s, measured.memcpy_gb_s, measured.fence_us))
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
            result_s, fence_s = _read(agent, TransferOrder(f"t{number}", "producer", ids, ids, fence=(0, 0)))
            spans.append(result_s)
            fences.append(fence_s)
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


def _read(agent: TransferAgent, order: TransferOrder) -> tuple[float, float]:
    began_s = time.perf_counter()
    agent.post(order)
    while True:
        agent.advance()
        for result in agent.take_results():
            if result.outcome != "done":
                message = f"a read failed: {result.code}: {result.message}"
                raise RuntimeError(message)
            return time.perf_counter() - began_s - result.fence_s, result.fence_s


_REASONS: Final = (
    re.compile(r"Failed to create UCX context [^:]*: (.+)"),
    re.compile(r"Unexpected UCX error: (.+)"),
    re.compile(r"\bAgentError: (.+)"),
    re.compile(r"\b(\w+(?:Error|Exception): .+)"),
)
"""Sentences that say why NIXL or UCX did not start, those nearest to the cause first."""


@final
@dataclass(slots=True)
class Captured:
    """Text that was written; complete once the block has been left."""

    text: str = field(default="")


@contextlib.contextmanager
def captured_output() -> Generator[Captured]:
    """Collect all that this process and its children write to standard output and standard error."""
    captured = Captured()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with tempfile.TemporaryFile() as sink:
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in saved:
                os.dup2(sink.fileno(), number)
            yield captured
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            sink.seek(0)
            captured.text = sink.read().decode(errors="replace")


def reason_in(log: str) -> str:
    """Return the sentence of a log that is nearest to the cause of a failure; its last line where none is known, "" for none."""
    for pattern in _REASONS:
        found = pattern.search(log)
        if found is not None:
            return found.group(1).strip()
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else ""


_MOST_LEVELS: Final = 32
"""A test region and ranks are described with four."""


def parse_json(text: str | bytes) -> object:
    """Return the value that a text stands for.

    Raises:
        ValueError: It is no JSON, or nested so deep that Python's own recursion would end on it.
    """
    try:
        value: object = json.loads(text)
    except RecursionError:
        value = None
        is_deep = True
    else:
        is_deep = _is_deep(value)
    if is_deep:
        raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep")
    return value


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(_MOST_LEVELS):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return True


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast("dict[object, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else []
