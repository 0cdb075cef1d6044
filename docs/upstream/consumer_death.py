"""Harm readers in the middle of their reads and count how often the process they read from dies.

Needs `nixl`, `numpy` and Linux, nothing else. The parent imports NIXL once; the readers and the served process are forks
of it. Settings of UCX come from the environment:

    UCX_TLS=tcp python consumer_death.py --harm kill --count 200
    UCX_TLS=tcp UCX_KEEPALIVE_INTERVAL=inf python consumer_death.py --harm kill --count 200

Prints one JSON object: readers harmed, those that were in the middle of a read, and deaths of the served process by signal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import math
import mmap
import os
import random
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

HARMS = ("kill", "stop", "close", "reset", "frozen", "frozen-kill")
"""Harm to a reader: SIGKILL; SIGSTOP, then SIGKILL; its agent destroyed; its connections reset. `frozen`: its agent destroyed,
and `frozen-kill`: SIGKILL, while the served process is stopped."""
READING, IDLE = b"\1", b"\0"


@dataclass(frozen=True)
class Shape:
    """Pages of each process, and options of its UCX backend."""

    pages: int
    page_bytes: int
    backend: dict[str, str]


def load_nixl() -> Any:  # noqa: ANN401 - a module that type checkers do not know
    """Import NIXL under the name of whichever wheel is installed."""
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{name}._api")
    raise SystemExit("no NIXL here: pip install nixl")


def make_agent(name: str, shape: Shape) -> tuple[Any, Any]:
    """Return (agent, its registered memory)."""
    nixl = load_nixl()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=[]))
    agent.create_backend("UCX", shape.backend)
    memory = np.zeros(shape.pages * shape.page_bytes, dtype=np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], mem_type="DRAM"))
    return agent, memory


def prepare(agent: Any, owner: str, address: int, shape: Shape) -> Any:  # noqa: ANN401 - an agent of NIXL, its handle
    """Return the prepared list of all pages that begin at an address."""
    starts = np.arange(shape.pages, dtype=np.uint64) * shape.page_bytes + address
    rows = np.stack([starts, np.full_like(starts, shape.page_bytes), np.zeros_like(starts)], axis=1)
    return agent.prep_xfer_dlist(owner, agent.get_xfer_descs(rows, mem_type="DRAM"))


def serve(link: Connection, shape: Shape) -> None:
    """Register memory, tell its address, and poll for notifications until killed."""
    agent, memory = make_agent(f"served-{os.getpid()}", shape)
    link.send((agent.get_agent_metadata(), memory.ctypes.data))
    while True:  # until killed
        agent.get_new_notifs()
        time.sleep(0.001)


def read(link: Connection, shape: Shape, state: mmap.mmap, introduction: tuple[bytes, int]) -> None:
    """Read one page to connect, wait for a word, then read all pages again and again until harmed."""
    metadata, address = introduction
    agent, memory = make_agent(f"reader-{os.getpid()}", shape)
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    mine, theirs = prepare(agent, "", memory.ctypes.data, shape), prepare(agent, peer, address, shape)

    def post(pages: int) -> Any:  # noqa: ANN401 - NIXL's handle
        # In random order: NIXL would join neighbouring pages into one read.
        ids = np.random.default_rng().permutation(shape.pages)[:pages].astype(np.int32)
        return agent.make_prepped_xfer("READ", mine, ids, theirs, ids, b"")

    first = post(1)
    progress = agent.transfer(first)
    while progress == "PROC":
        progress = agent.check_xfer_state(first)
    link.send("connected")
    link.recv()
    while not link.poll():
        handle = post(shape.pages)
        progress = agent.transfer(handle)
        state[:1] = READING
        while progress == "PROC" and not link.poll():
            progress = agent.check_xfer_state(handle)
        if progress != "PROC":
            state[:1] = IDLE
            agent.release_xfer_handle(handle)
    if link.recv() == "reset":
        reset_connections()
        time.sleep(60)
    # Else leave the function: the agent is destroyed with whatever is on its way.


def reset_connections() -> None:
    """Close every TCP connection of this process so that its peer receives RST."""
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family != socket.AF_INET:
                continue
            connection.getpeername()  # raises for sockets that only listen
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            os.dup2(os.open("/dev/null", os.O_RDONLY), number)


@dataclass(frozen=True)
class Child:
    """Forked process and this side of its pipe."""

    pid: int
    link: Connection

    def end(self) -> None:
        """Kill the process and wait for its end."""
        self.link.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def signal_of_death(self) -> str | None:
        """Return the name of the signal that ended the process, None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            return None
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def fork(work: Callable[..., None], *arguments: object) -> Child:
    """Run a function in a child that dies with this process."""
    ours, theirs = Pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        _live(work, parent, theirs, arguments)
    theirs.close()
    return Child(pid, ours)


def _live(work: Callable[..., None], parent: int, link: Connection, arguments: tuple[object, ...]) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == parent:
            work(link, *arguments)
    finally:
        os._exit(0)


def wilson(deaths: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of deaths per 100. Example: 2 of 60 gives (0.9, 11.4)."""
    if not count:
        return 0.0, 100.0
    share, z2 = deaths / count, 1.96**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return round(100 * max(0.0, middle - half), 1), round(100 * min(1.0, middle + half), 1)


Work = tuple["Callable[..., None]", "Callable[..., None]"]
"""Functions of the served process and of a reader; they may stand for other users of NIXL."""


class Campaign:
    """Keeps a served process and a few connected readers, and harms one reader after the other."""

    def __init__(self, harm: str, shape: Shape, ready: int, seed: int, work: Work = (serve, read)) -> None:
        self._harm, self._shape, self._ready = harm, shape, ready
        self._serve, self._read = work
        self._chance = random.Random(seed)  # noqa: S311 - moments of kills
        self._readers: list[tuple[Child, mmap.mmap]] = []
        self.harmed = self.mid_read = self.failed_starts = 0
        self.deaths: Counter[str] = Counter()
        self.census: list[dict[str, int]] = []
        self._start()

    def _start(self) -> None:
        self._served = fork(self._serve, self._shape)
        self._introduction = self._served.link.recv()

    def count(self) -> None:
        """Note what the served process holds; a new one begins a new list."""
        folder = Path(f"/proc/{self._served.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        descriptors = [str(entry.readlink()) for entry in (folder / "fd").iterdir()]
        self.census.append({
            "harmed": self.harmed,
            "memory_kib": pages * mmap.PAGESIZE >> 10,
            "descriptors": len(descriptors),
            "sockets": sum(name.startswith("socket:") for name in descriptors),
        })  # fmt: skip

    def step(self) -> None:
        """Harm one reader in the middle of its read, and note whether the served process survived."""
        while len(self._readers) < self._ready:
            state = mmap.mmap(-1, 1)
            self._readers.append((fork(self._read, self._shape, state, self._introduction), state))
        reader, state = self._readers.pop(0)
        is_connected = False
        with contextlib.suppress(EOFError, OSError):
            is_connected = reader.link.poll(20) and reader.link.recv() == "connected"
        if is_connected:
            self._do_harm(reader, state)
        else:
            self.failed_starts += 1
        reader.end()
        self._look()

    def _do_harm(self, reader: Child, state: mmap.mmap) -> None:
        reader.link.send("go")
        until_s = time.monotonic() + 2.0
        while state[:1] != READING and time.monotonic() < until_s:
            time.sleep(0.0005)
        time.sleep(self._chance.uniform(0.0, 0.02))
        is_reading = state[:1] == READING
        if self._harm == "stop":
            os.kill(reader.pid, signal.SIGSTOP)
            time.sleep(self._chance.uniform(0.0, 0.1))
        if self._harm.startswith("frozen"):
            os.kill(self._served.pid, signal.SIGSTOP)
            time.sleep(0.02)  # the reader's next read is on its way
        if self._harm in {"kill", "frozen-kill"}:
            os.kill(reader.pid, signal.SIGKILL)
            reader.link.poll(1.0)
        elif self._harm != "stop":
            with contextlib.suppress(OSError):
                reader.link.send(self._harm)
                reader.link.poll(1.0 if self._harm == "reset" else 10.0)  # until it ends, unless it stays alive
        if self._harm.startswith("frozen"):
            os.kill(self._served.pid, signal.SIGCONT)
        self.harmed += 1
        self.mid_read += is_reading

    def _look(self) -> None:
        time.sleep(0.05)
        end = self._served.signal_of_death()
        if end is not None:
            self.deaths[end] += 1
            self.census.clear()
            self._drop_readers()
            self._start()

    def _drop_readers(self) -> None:
        for reader, _ in self._readers:
            reader.end()
        self._readers.clear()

    def close(self) -> None:
        """End all processes."""
        self._look()
        self._drop_readers()
        self._served.end()


def arguments() -> argparse.ArgumentParser:
    """Return the parser of a campaign's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harm", choices=HARMS, default="kill")
    parser.add_argument("--count", type=int, default=50, help="readers to harm")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--ready", type=int, default=3, help="readers that are connected beforehand")
    parser.add_argument("--pages", type=int, default=256, help="pages of one read, in random order")
    parser.add_argument("--page-kib", type=int, default=128)
    parser.add_argument("--backend", default="", help="options of NIXL's UCX backend, such as num_threads=4,...")
    parser.add_argument("--census", type=int, default=0, help="note what the served process holds after so many")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(options: argparse.Namespace, work: Work = (serve, read)) -> dict[str, Any]:
    """Run a campaign and return its figures."""
    load_nixl()  # the children are to find it loaded
    backend = dict(pair.split("=", 1) for pair in options.backend.split(",") if pair)
    shape = Shape(options.pages, options.page_kib << 10, backend)
    began_s = time.monotonic()
    campaign = Campaign(options.harm, shape, options.ready, options.seed, work)
    try:
        while campaign.harmed < options.count and time.monotonic() - began_s < options.seconds:
            campaign.step()
            if options.census and campaign.harmed % options.census == 0:
                campaign.count()
    finally:
        campaign.close()
    deaths = sum(campaign.deaths.values())
    variables = {name: text for name, text in sorted(os.environ.items()) if name.startswith(("UCX_", "MALLOC_", "KV_"))}
    return {
        "harm": options.harm,
        "harmed": campaign.harmed,
        "mid_read": campaign.mid_read,
        "deaths": deaths,
        "by_signal": dict(campaign.deaths),
        "deaths_per_100": round(100 * deaths / max(1, campaign.harmed), 1),
        "interval": wilson(deaths, campaign.harmed),
        "failed_starts": campaign.failed_starts,
        "census": campaign.census,
        "seconds": round(time.monotonic() - began_s, 1),
        "settings": variables | backend,
    }


if __name__ == "__main__":
    print(json.dumps(run(arguments().parse_args())))
