"""Sample engines: memory, descriptors, sockets and threads of their processes; leases and blocks by their status."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from kvdev.engines import metric_sum
from vllm_adapter.cli.engines import ask_all

__all__ = [
    "HELD_BY_ENGINE",
    "Held",
    "Recorder",
    "Sample",
    "family_of",
    "held_of",
    "is_alive",
    "running_recorder",
    "sample_of",
]


@dataclass(frozen=True, slots=True)
class Sample:
    """Levels of an engine's processes, added up."""

    at_s: float
    processes: int
    resident_mb: float
    """Anonymous resident memory: pages of files come and go with the kernel's needs."""
    descriptors: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class Held:
    """Things that an engine holds for requests and peers, as `vllm-adapter status` says."""

    leases: int = 0
    leased_blocks: int = 0
    fence_slots: int = 0
    requests: int = 0
    reads: int = 0
    quarantined: int = 0
    peers: int = 0
    is_silent: bool = False


HELD_BY_ENGINE = ("leases", "leased_blocks", "fence_slots", "requests", "reads", "quarantined")
"""Levels of `Held` that are zero in an engine at rest."""


def family_of(pid: int) -> list[int]:
    """Return a process and all its descendants that live."""
    found, waiting = [], [pid]
    while waiting:
        each = waiting.pop()
        found.append(each)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def sample_of(pid: int, now_s: float) -> Sample:
    """Return the levels of a process and its descendants; those that end meanwhile count nothing."""
    processes = resident_kb = descriptors = sockets = threads = 0
    for each in family_of(pid):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            # An ended process that nobody has waited for has no memory any more.
            resident_kb += int(fields.get("RssAnon", "0 kB").split()[0])
            threads += int(fields["Threads"])
            for entry in os.scandir(f"/proc/{each}/fd"):
                descriptors += 1
                with contextlib.suppress(OSError):
                    sockets += str(Path(entry.path).readlink()).startswith("socket:")
            processes += 1
    return Sample(now_s, processes, resident_kb / 1024, descriptors, sockets, threads)


def held_of(answers: Sequence[Any], pids: Sequence[int]) -> Held:
    """Add up what the parts of one engine say, the engine being that of these processes."""
    parts = [answer for answer in answers if answer.get("pid") in set(pids)]
    schedulers = [part for part in parts if part.get("part") == "scheduler"]
    workers = [part for part in parts if part.get("part") != "scheduler"]
    if not schedulers or not workers or any("error" in part or part.get("is_silent") for part in parts):
        return Held(is_silent=True)
    return Held(
        leases=_sum(schedulers, "leases"),
        leased_blocks=_sum(schedulers, "leased_blocks"),
        fence_slots=_sum(schedulers, "fence_slots_used"),
        requests=sum(sum(part.get("requests_by_state", {}).values()) for part in schedulers),
        reads=_sum(workers, "reads"),
        quarantined=_sum(workers, "quarantined_transfers"),
        peers=_sum(workers, "peers"),
    )


def _sum(parts: Sequence[Any], name: str) -> int:
    levels = (part.get(name, 0) for part in parts)
    return sum(level if isinstance(level, int) else len(level) for level in levels)


@final
@dataclass
class Recorder:
    """A thread that samples every engine once a second, and asks each for its status."""

    pids: Callable[[], Mapping[str, int]]
    """Engine -> the process that leads it, of those that live now."""
    folder: Path
    """Folder of the sockets on which these engines answer."""
    every_s: float = 1.0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    holdings: dict[str, list[tuple[float, Held]]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Take one sample of each engine."""
        pids, now_s = self.pids(), time.monotonic()
        for name, pid in pids.items():
            self.samples.setdefault(name, []).append(sample_of(pid, now_s))
        for name, held in self.held(pids).items():
            self.holdings.setdefault(name, []).append((now_s, held))

    def held(self, pids: Mapping[str, int] | None = None) -> dict[str, Held]:
        """Ask each engine what it holds."""
        pids = self.pids() if pids is None else pids
        answers = ask_all([self.folder])
        return {name: held_of(answers, family_of(pid)) for name, pid in pids.items()}

    def run(self) -> None:
        """Sample until told to stop."""
        while not self._stop.wait(self.every_s):
            self.look()

    def stop(self) -> None:
        """Let `run` return."""
        self._stop.set()

    def levels(self, engine: str, name: str) -> list[float]:
        """Return one level of an engine over time."""
        return [float(getattr(sample, name)) for sample in self.samples.get(engine, [])]

    def write(self, file: Path) -> None:
        """Write all samples as JSON, to draw them again."""
        data: dict[str, Any] = {
            "samples": {name: [asdict(each) for each in samples] for name, samples in self.samples.items()},
            "holdings": {
                name: [{"at_s": at_s, **asdict(held)} for at_s, held in holdings]
                for name, holdings in self.holdings.items()
            },
        }
        file.write_text(json.dumps(data))


@contextlib.contextmanager
def running_recorder(recorder: Recorder) -> Iterator[Recorder]:
    """Sample on a thread of its own."""
    thread = threading.Thread(target=recorder.run, name="recorder", daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        recorder.stop()
        thread.join(30)


def usage_of(page: str) -> float:
    """Return the share of KV blocks in use, by an engine's metrics page."""
    return metric_sum(page, "vllm:kv_cache_usage_perc")
