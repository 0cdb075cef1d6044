"""Engines of the benchmark of pairs: every kind of pair with a router in front, and an engine that computes prompts alone.

All are up at once and one group runs at a time, the others are stopped (SIGSTOP): a connector that polls while it is idle takes a
core from what is measured beside it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from kvdev.demo import connector_config, running_router
from kvdev.early import EarlyTickets
from kvdev.engines import Engine, EngineSpec, start_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvdev.forked import Starter

__all__ = [
    "ALONE", "BLOCK_TOKENS", "CONFIGS", "TOKEN_BYTES", "Fleet", "Pair",
    "cpu_seconds", "processes_of", "started_fleet", "states_of",
]  # fmt: skip

ALONE: Final = "alone"
"""Name of the engine without a connector."""
BLOCK_TOKENS: Final = 128
"""Tokens of a block, vLLM's default on CPU."""
TOKEN_BYTES: Final = 131_072
"""Of the model `fat`."""
_POOL_TOKENS: Final = 8704
"""Tokens that each engine's cache holds: 68 blocks, of which four prompts of 1900 tokens take 60."""
_WITHIN_S: Final = 10.0

# Addresses of early tickets must be covered: here by the list of hosts, since these engines share no secret.
_STREAMING: Final = {"streaming": True, "remote_hosts": ["127.0.0.0/8"]}
_ROLES: Final = ("kv_producer", "kv_consumer")
CONFIGS: Final[Mapping[str, Sequence[Mapping[str, object]]]] = {
    "ours": [connector_config(role) for role in _ROLES],
    "streamed": [connector_config(role, **_STREAMING) for role in _ROLES],
    "vllm": [{"kv_connector": "NixlConnector", "kv_role": role} for role in _ROLES],
}
"""Kind of pair -> `--kv-transfer-config` of its prefill and of its decode engine."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine, and the address of the router in front of them.

    `early` writes early tickets, as the router does, where both engines are asked at once; None for a plain pair.
    """

    prefill: Engine
    decode: Engine
    router: str
    early: EarlyTickets | None = None


@final
class Fleet:
    """All engines of a setting, of which one group runs at a time."""

    def __init__(self) -> None:
        self.pairs: dict[str, Pair] = {}
        self.groups: dict[str, list[Engine]] = {}

    @property
    def alone(self) -> Engine:
        """The engine without a connector."""
        return self.groups[ALONE][0]

    def only(self, name: str) -> None:
        """Let one group go on once all others stand still.

        Raises:
            TimeoutError: A process does not stop, or does not go on.
        """
        going = self.groups[name]
        _signal([each for group in self.groups.values() for each in group if each not in going], signal.SIGSTOP)
        _signal(going, signal.SIGCONT)

    def resume(self) -> None:
        """Let every group go on: a stopped process does not obey a SIGTERM."""
        for group in self.groups.values():
            _signal(group, signal.SIGCONT)


def _signal(engines: Sequence[Engine], number: signal.Signals) -> None:
    for engine in engines:
        engine.signal_all(number)
    until = time.monotonic() + _WITHIN_S
    for engine in engines:
        while any((state == "T") is (number == signal.SIGCONT) for state in states_of(engine.pid)):
            if time.monotonic() > until:
                raise TimeoutError(f"group {engine.pid} after {number.name}: {states_of(engine.pid)}")
            time.sleep(0.01)


@contextlib.contextmanager
def started_fleet(
    starter: Starter, python: Path, model: Path, chunk: int, environment: Mapping[str, str]
) -> Iterator[Fleet]:
    """Start all engines, one group after the other, each stopped as soon as it is healthy.

    `chunk` is the most tokens of a step (`--max-num-batched-tokens`).
    """
    fleet, cores = Fleet(), sorted(os.sched_getaffinity(0))
    arguments = [
        "--disable-uvicorn-access-log",
        "--kv-cache-memory-bytes", str(_POOL_TOKENS * TOKEN_BYTES),
        "--block-size", str(BLOCK_TOKENS),
        "--max-num-batched-tokens", str(chunk),
        "--max-num-seqs", "64",
    ]  # fmt: skip

    def spec(name: str, number: int, config: Mapping[str, object] | None) -> EngineSpec:
        more = ["--no-enable-prefix-caching"] if number else []  # a decode engine holds no prefix
        core = str(cores[number % len(cores)])
        return EngineSpec(f"bench-{name}-{number}", model, core, config, [*arguments, *more], dict(environment))

    with contextlib.ExitStack() as stack:
        for name, configs in [*CONFIGS.items(), (ALONE, [None])]:
            specs = [spec(name, number, config) for number, config in enumerate(configs)]
            engines = stack.enter_context(start_all(specs, python, quiet=True, launch=starter.launch))
            stack.callback(fleet.resume)
            fleet.groups[name] = engines
            if name != ALONE:
                fleet.pairs[name] = _paired(stack, *engines, is_concurrent=name == "streamed")
            _signal(engines, signal.SIGSTOP)
        yield fleet


def _paired(stack: contextlib.ExitStack, prefill: Engine, decode: Engine, *, is_concurrent: bool) -> Pair:
    channel = ("127.0.0.1", prefill.side_channel_port)
    words = ["--concurrent", f"{channel[0]}:{channel[1]}"] if is_concurrent else []
    router = stack.enter_context(running_router([prefill.url], [decode.url], *words))
    return Pair(prefill, decode, router, EarlyTickets([prefill.url], [channel]) if is_concurrent else None)


def processes_of(group: int) -> list[int]:
    """Return the processes of a process group, in the order of their numbers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(folder.name)) == group:
                found.append(int(folder.name))
    return sorted(found)


def states_of(group: int) -> list[str]:
    """Return the state letter of each process of a group that has not ended. Source: proc(5)."""
    return [state for pid in processes_of(group) if (state := _fields(pid)[0]) not in "ZX"]


def cpu_seconds(pid: int) -> float:
    """Return the time that a process has run, all of its threads, in ticks of 10 ms; 0 for one that has ended."""
    fields = _fields(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if len(fields) > 13 else 0.0


def _fields(pid: int) -> list[str]:
    """Return the fields of a process's `stat` from its state on; those of a zombie for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]
