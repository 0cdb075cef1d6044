"""Sample engines: memory, descriptors, sockets and threads of their processes; leases and blocks by their status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import family_of

from vllm_adapter.cli.engines import ask_all


@dataclass(frozen=True, slots=True)
class Sample:
    """Levels of an engine's processes, added up."""

    resident_mb: float
    """Anonymous resident memory: pages of files come and go with the kernel's needs."""
    descriptors: int
    sockets: int
    threads: int


def sample_of(pid: int) -> Sample:
    """Return the levels of a process and its descendants; those that end meanwhile count nothing."""
    resident_kb = descriptors = sockets = threads = 0
    for each in family_of(pid):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            # An ended process that was not waited for has no memory any more.
            resident_kb += int(fields.get("RssAnon", "0 kB").split()[0])
            threads += int(fields["Threads"])
            for entry in os.scandir(f"/proc/{each}/fd"):
                descriptors += 1
                with contextlib.suppress(OSError):
                    sockets += str(Path(entry.path).readlink()).startswith("socket:")
    return Sample(resident_kb / 1024, descriptors, sockets, threads)


def held_of(answers: Sequence[Any], pids: Sequence[int]) -> dict[str, int]:
    """Add up what the parts of one engine hold for requests and peers, the engine being that of these processes."""
    parts = [answer for answer in answers if answer.get("pid") in set(pids)]
    schedulers = [part for part in parts if part.get("part") == "scheduler"]
    workers = [part for part in parts if part.get("part") != "scheduler"]
    if not schedulers or not workers or any("error" in part or part.get("is_silent") for part in parts):
        return {"parts without an answer to status": 1}
    return {
        **{name: _sum(schedulers, name) for name in ("leases", "leased_blocks", "fence_slots_used")},
        "requests": sum(sum(part.get("requests_by_state", {}).values()) for part in schedulers),
        **{name: _sum(workers, name) for name in ("reads", "quarantined_transfers")},
    }


def _sum(parts: Sequence[Any], name: str) -> int:
    levels = (part.get(name, 0) for part in parts)
    return sum(level if isinstance(level, int) else len(level) for level in levels)


def held_by(pids: Mapping[str, int], folder: Path) -> dict[str, dict[str, int]]:
    """Return what each engine holds: it answers on a socket in this folder, and is led by this process."""
    answers = ask_all(folder)
    return {name: held_of(answers, family_of(pid)) for name, pid in pids.items()}
