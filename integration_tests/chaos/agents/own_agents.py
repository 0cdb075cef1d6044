"""The campaign of `docs/upstream/consumer_death.py` with agents of `kv-nixl-agent` in both roles.

Run as a script it takes the same options and prints the same JSON object, so the two can be put side by side.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import queue
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "upstream"))

import consumer_death as bare

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy.typing as npt

    Introduction = tuple[bytes, tuple[int, int, int], int]


def open_thread(name: str, shape: bare.Shape, results: queue.SimpleQueue[TransferResult]) -> tuple[TransferThread, int]:
    """Return (a running transfer thread, address of its pages)."""
    memory = np.zeros(shape.pages * shape.page_bytes, np.uint8)
    thread = TransferThread(
        name,
        [(memory.ctypes.data, memory.nbytes, 0, "DRAM")],
        on_result=results.put,
        on_notification=lambda *_: None,
        options=AgentOptions(backends=(BackendOptions(parameters=shape.backend),)),
    )
    thread.start()
    _KEPT.append(memory)
    return thread, int(memory.ctypes.data)


_KEPT: list[npt.NDArray[np.uint8]] = []
"""Pages of this process, which live as long as it does."""


def serve(link: Connection, shape: bare.Shape) -> None:
    """Lend pages until killed."""
    thread, address = open_thread(f"served-{os.getpid()}", shape, queue.SimpleQueue())
    link.send((thread.agent_metadata(), thread.fence, address))
    while True:
        time.sleep(1.0)


def read(link: Connection, shape: bare.Shape, state: mmap.mmap, introduction: Introduction) -> None:
    """Read one page to connect, wait for a word, then read all pages again and again until harmed."""
    metadata, fence, address = introduction
    results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
    thread, own = open_thread(f"reader-{os.getpid()}", shape, results)
    here, there = (
        np.array([[start, shape.page_bytes, 0, shape.page_bytes, shape.pages]], np.uint64) for start in (own, address)
    )
    thread.call_soon(lambda: thread.agent.add_peer(PeerSpec("p", metadata, here, there, fence=fence)))

    numbers = itertools.count()

    def submit(pages: int) -> None:
        ids = np.random.default_rng().permutation(shape.pages)[:pages].astype(np.int32)
        thread.call_soon(lambda: thread.agent.post_read(f"r{next(numbers)}", "p", ids, ids, deadline_s=20.0))

    submit(1)
    if results.get(timeout=20.0).outcome != "done":
        return
    link.send("connected")
    link.recv()
    for _ in range(3):  # so that one is on its way whenever another ends
        submit(shape.pages)
    while not thread.statistics()["inflight"] and results.empty():
        time.sleep(0.0002)
    state[:1] = bare.READING
    while not link.poll():
        if results.empty():
            time.sleep(0.0005)
        else:
            results.get()
            submit(shape.pages)
    if link.recv() == "reset":
        bare.reset_connections()
        time.sleep(60)
    thread.close()


if __name__ == "__main__":
    import kv_nixl_agent.nixl.binding  # noqa: F401  as much as possible is loaded before the forks

    print(json.dumps(bare.run(bare.arguments().parse_args(), (serve, read))))
