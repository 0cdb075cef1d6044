"""Cost of a transfer agent in a process of its own, as a prototype: `python isolation_cost.py --reads 300`.

The engine's process and the agent's share the pages (a memory file, as a host buffer would be), so bytes move as ever; an
order and its result each cross a pipe. Prints, for both ways and two sizes of read, the median time from order to result as
the engine's process sees it, and the CPU time of all processes on this side for one read.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import signal
import statistics
import threading
import time
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kv_nixl_agent import PeerSpec, TransferOrder, TransferResult, TransferThread
from kv_nixl_agent.testing import PeerProcess

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PAGE_BYTES, PAGES = 65536, 1024
SIZES = (1, 256)


class Reader(Protocol):
    """Either way to read pages."""

    def read(self, ids: np.ndarray) -> str:
        """Read pages into the same places here; return the outcome."""
        ...

    def other_cpu_s(self) -> float:
        """Return the CPU seconds of its other process so far."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class InProcess:
    """Agent in the engine's process, as it is today."""

    def __init__(self, pages: mmap.mmap, producer: tuple[Any, ...]) -> None:
        metadata, rows, fence = producer
        self._results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        address = np.frombuffer(pages, np.uint8).ctypes.data
        self._thread = TransferThread(
            f"reader-{os.getpid()}",
            [(address, PAGE_BYTES * PAGES, 0, "DRAM")],
            on_result=self._results.put,
            on_notification=lambda *_: None,
        )
        self._thread.start()
        here = np.array([[address, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], np.uint64)
        self._thread.call_soon(lambda: self._thread.add_peer(PeerSpec("p", metadata, here, rows, fence=fence)))

    def read(self, ids: np.ndarray) -> str:
        self._thread.submit(TransferOrder("r", "p", ids, ids, deadline_s=20.0))
        return self._results.get(timeout=30.0).outcome

    def other_cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        self._thread.close()


def serve_orders(link: Connection, pages: mmap.mmap, producer: tuple[Any, ...]) -> None:
    """Run the agent for another process until its pipe closes."""
    inner = InProcess(pages, producer)
    while True:
        try:
            ids = link.recv()
        except EOFError:
            break
        link.send(inner.read(np.frombuffer(ids, np.int32)) if ids else str(time.process_time()))
    inner.close()


class Isolated:
    """Agent in a process of its own; a thread of the engine's process takes the results, as `on_result` would."""

    def __init__(self, pages: mmap.mmap, producer: tuple[Any, ...]) -> None:
        self._link, theirs = Pipe()
        self._pid = os.fork()
        if not self._pid:
            self._link.close()
            try:
                serve_orders(theirs, pages, producer)
            finally:
                os._exit(0)
        theirs.close()
        self._results: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._taker = threading.Thread(target=self._take, daemon=True)
        self._taker.start()

    def _take(self) -> None:
        while True:
            try:
                self._results.put(self._link.recv())
            except (EOFError, OSError):
                return

    def read(self, ids: np.ndarray) -> str:
        self._link.send(ids.tobytes())
        return self._results.get(timeout=30.0)

    def other_cpu_s(self) -> float:
        self._link.send(b"")
        return float(self._results.get(timeout=30.0))

    def close(self) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)


def measure(reader: Reader, reads: int) -> dict[str, float]:
    """Return median microseconds for a read of each size, and CPU microseconds of this process for one read."""
    chance = np.random.default_rng(0)
    assert reader.read(np.arange(4, dtype=np.int32)) == "done"
    figures: dict[str, float] = {}
    for pages in SIZES:
        took_us: list[float] = []
        cpu_s, other_s = time.process_time(), reader.other_cpu_s()
        for _ in range(reads):
            ids = chance.permutation(PAGES)[:pages].astype(np.int32)
            began_s = time.perf_counter()
            assert reader.read(ids) == "done"
            took_us.append(1e6 * (time.perf_counter() - began_s))
        figures[f"us_of_{pages}"] = round(statistics.median(took_us), 1)
        figures[f"engine_cpu_us_of_{pages}"] = round(1e6 * (time.process_time() - cpu_s) / reads, 1)
        figures[f"other_cpu_us_of_{pages}"] = round(1e6 * (reader.other_cpu_s() - other_s) / reads, 1)
    return figures


def main() -> None:
    """Measure both ways, one after the other, several times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    process = PeerProcess("served", page_bytes=PAGE_BYTES, page_count=PAGES)
    producer = (process.agent_metadata, process.rows, process.fence)
    pages = mmap.mmap(-1, PAGE_BYTES * PAGES)
    makers: tuple[type[InProcess | Isolated], ...] = (Isolated, InProcess)
    try:
        for number in range(options.rounds):
            for make in makers:
                reader = make(pages, producer)
                print(json.dumps({"way": make.__name__, "round": number, **measure(reader, options.reads)}))
                reader.close()
    finally:
        process.close()


if __name__ == "__main__":
    main()
