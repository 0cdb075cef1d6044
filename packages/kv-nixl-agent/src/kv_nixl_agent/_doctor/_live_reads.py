"""`kv-nixl measure`: reads from the probe pages of live ranks, compared, timed, and with the transport that carried them.

The work runs in a child process, because UCX reads its log level and its choice of transports when it starts. What the ranks'
memory holds beside their probe pages is not read.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast, final

import numpy as np

from kv_nixl_agent._agent import TransferAgent
from kv_nixl_agent._doctor._json_values import parse_json
from kv_nixl_agent._doctor._transports import TRANSPORT_ENVIRONMENT, ReadPath, is_tcp, read_paths
from kv_nixl_agent._errors import AgentError
from kv_nixl_agent._fences import probe_pattern
from kv_nixl_agent._probe_pages import PROBE_PAGE_BYTES, PROBE_PAGES, probe_rows
from kv_nixl_agent._values import PeerSpec, TransferOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kv_nixl_agent._values import TransferResult

__all__ = ["LiveRank", "Measurement", "RankRead", "measure_ranks", "read_ranks"]

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

    @property
    def is_good(self) -> bool:
        """Whether all pages came as they should."""
        return not self.error and all(not rank.code for rank in self.ranks)

    def as_json(self) -> dict[str, object]:
        """Return plain values for `--json`."""
        return {
            "error": self.error,
            "is_tcp": self.is_tcp,
            "paths": [asdict(path) for path in self.paths],
            "ranks": [asdict(rank) for rank in self.ranks],
        }


def read_ranks(text: str) -> list[LiveRank]:
    """Return the ranks that JSON describes: a list of objects with name, agent_metadata (Base64) and fence.

    Raises:
        ValueError: It does not.
    """
    described = parse_json(text)
    if not isinstance(described, list):
        raise ValueError(f"not a list of ranks: {type(described).__name__}")  # noqa: TRY004 - callers catch one kind
    try:
        return [_read_rank(entry) for entry in cast("list[dict[str, Any]]", described)]
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a list of ranks: {type(error).__name__} {error}") from error


def _read_rank(entry: dict[str, Any]) -> LiveRank:
    address, device, words = (int(number) for number in entry["fence"])
    if min(address, device, words) < 0 or words > 1 << 32 or device > 1 << 32 or address > (1 << 63):
        raise ValueError(
            f"rank {entry['name']}: fence is {entry['fence']}, must be an address, a device and a number of words"
        )
    metadata = base64.b64decode(str(entry["agent_metadata"]), validate=True)
    name = str(entry["name"])
    if not name.isprintable():
        raise ValueError(f"name {name!r} must be printable")
    return LiveRank(name, metadata, (address, device, words))


def measure_ranks(ranks: Sequence[LiveRank], *, most_bytes: int, timeout_s: float) -> Measurement:
    """Read from each rank in a child process and return the results; never raises.

    Args:
        ranks: The ranks.
        most_bytes: Bytes to read from each rank, at most.
        timeout_s: Longest wait for each read.
    """
    with tempfile.TemporaryFile(
        "w+", encoding="utf-8", errors="replace"
    ) as answers:  # a pipe would be full before the child has ended
        theirs = answers.fileno()
        command = [
            sys.executable,
            "-c",
            f"from kv_nixl_agent._doctor._live_reads import child; child({theirs}, {most_bytes}, {timeout_s})",
        ]
        try:
            done = subprocess.run(
                command,
                input=_as_text(ranks),
                env={**os.environ, **TRANSPORT_ENVIRONMENT},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_START_S + len(ranks) * 4 * timeout_s,
                check=False,
                pass_fds=[theirs],
            )
        except subprocess.TimeoutExpired as expired:
            return Measurement([], error=f"the reads did not end within {expired.timeout:.0f} s")
        except OSError as error:
            return Measurement([], error=f"the reads cannot be started: {error}")
        answers.seek(0)
        answer = answers.read()
    paths = read_paths(done.stdout + "\n" + done.stderr)
    if not answer:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Measurement([], paths, lines[-1] if lines else f"exit code {done.returncode}")
    try:
        read = [RankRead(**entry) for entry in cast("list[dict[str, Any]]", parse_json(answer))]
    except (TypeError, ValueError) as error:  # a child that was ended while it wrote
        return Measurement([], paths, f"the reads were cut short: {error}")
    missing = len(ranks) - len(read)
    return Measurement(read, paths, f"the reads were cut short: {missing} ranks are missing" if missing else "")


def _as_text(ranks: Sequence[LiveRank]) -> str:
    return json.dumps(
        [
            {
                "name": rank.name,
                "agent_metadata": base64.b64encode(rank.agent_metadata).decode(),
                "fence": list(rank.fence),
            }
            for rank in ranks
        ]
    )


def child(answer: int, most_bytes: int, timeout_s: float) -> None:
    """Be the child: read the ranks that standard input describes; write JSON to a descriptor."""
    ranks = read_ranks(sys.stdin.read())
    memory = np.zeros((_BATCH_PAGES, PROBE_PAGE_BYTES), dtype=np.uint8)
    agent = TransferAgent(f"preflight-{secrets.token_hex(4)}", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")])
    try:
        reader = _Reader(agent, memory, most_bytes, timeout_s)
        results = [asdict(reader.read(rank)) for rank in ranks]
    finally:
        agent.close()
    with os.fdopen(answer, "w") as file:
        json.dump(results, file)


@final
class _Failed(Exception):  # noqa: N818 - becomes a result
    """End of the reads of one rank."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@final
class _Reader:
    """Reads the probe pages of one rank after the other."""

    def __init__(self, agent: TransferAgent, memory: npt.NDArray[np.uint8], most_bytes: int, timeout_s: float) -> None:
        self._agent = agent
        self._memory = memory
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._count = 0

    def read(self, rank: LiveRank) -> RankRead:
        """Return what the reads of a rank gave."""
        local = np.array(
            [[self._memory.ctypes.data, PROBE_PAGE_BYTES, 0, PROBE_PAGE_BYTES, _BATCH_PAGES]], dtype=np.uint64
        )
        try:
            spec = PeerSpec(rank.name, rank.agent_metadata, local, probe_rows(rank.fence), fence=rank.fence)
            self._agent.add_peer(spec)
            checksum = self._compare(rank.name)
            word_us = min(self._read(rank.name, 0) for _ in range(_LEAST_READS)) * 1e6
            speed, moved = self._measure(rank.name)
        except AgentError as error:
            return RankRead(rank.name, error.code, str(error))
        except _Failed as failed:
            return RankRead(rank.name, failed.code, str(failed))
        return RankRead(rank.name, "", "", checksum, word_us, speed, moved)

    def _compare(self, name: str) -> int:
        """Read every probe page once; return the checksum of what came."""
        self._memory[:] = 0
        self._read(name, PROBE_PAGES)
        came = self._memory[:PROBE_PAGES].tobytes()
        wanted = probe_pattern().tobytes()
        if came != wanted:
            raise _Failed(
                "bytes-differ",
                f"the probe pages came with checksum {zlib.crc32(came):08x}, their content has {zlib.crc32(wanted):08x}",
            )
        return zlib.crc32(came)

    def _measure(self, name: str) -> tuple[float, int]:
        """Read batches of all pages again and again; return the fastest one's GB/s and the bytes of all.

        Example: 16 MiB a batch and at most 64 MiB are four batches; one that takes longer than a second is the last.
        """
        moved, best_s = 0, float("inf")
        while moved + self._memory.nbytes <= self._most_bytes:
            took_s = self._read(name, _BATCH_PAGES)
            moved += self._memory.nbytes
            best_s = min(best_s, took_s)
            if took_s > 1.0:
                break
        return (self._memory.nbytes / best_s / 1e9 if moved else 0.0), moved

    def _read(self, name: str, pages: int) -> float:
        """Read so many pages, 0 for one word, and return the seconds that it took."""
        self._count += 1
        local = np.arange(pages, dtype=np.int32)
        order = TransferOrder(
            f"read-{self._count}",
            name,
            local,
            local % PROBE_PAGES,
            deadline_s=self._timeout_s,
            operation="read" if pages else "probe",
        )
        began_s = time.perf_counter()
        self._agent.post(order)
        result = self._wait()
        if result.outcome != "done":
            raise _Failed(result.code or result.outcome, result.message)
        return time.perf_counter() - began_s

    def _wait(self) -> TransferResult:
        while True:
            self._agent.advance()
            for result in self._agent.take_results():
                return result
