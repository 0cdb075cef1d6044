"""Compare reads of another process's GPU memory: our transfer thread, NIXL used directly, and the device's own copy.

    python integration_tests/gpu/compare.py [--output FILE]

The two readers run in one process and take turns, in random order. Both read all pages of the producer, in random order,
into pages in another random order, so that hardly any can be merged with the next; the bytes are compared once. `copy` is
`cudaMemcpy` of as many bytes, one piece, within one process: the ceiling.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SIZES = {16384: 4096, 65536: 2048, 1 << 20: 256}
"""Bytes of a page -> pages."""
ROUNDS = 9


def produce(connection, page_bytes, pages):
    """Hold pages on the device and serve them until told to stop."""
    import torch

    from kv_nixl_agent import TransferThread
    from kv_nixl_agent.testing import page_pattern

    content = page_pattern(5, pages, page_bytes).copy()
    memory = torch.from_numpy(content).to("cuda:0")
    torch.cuda.synchronize()
    region: Any = (memory.data_ptr(), memory.numel(), 0, "VRAM")
    thread = TransferThread("producer", [region], on_result=lambda _: None, on_notification=lambda *_: None)
    thread.start()
    rows = np.array([[memory.data_ptr(), page_bytes, 0, page_bytes, pages]], dtype=np.uint64)
    connection.send((thread.agent_metadata(), rows, thread.fence))
    connection.recv()
    thread.close()


class Ours:
    """The transfer thread, whose caller waits for the result."""

    def __init__(self, memory, rows, described):
        from kv_nixl_agent import PeerSpec, TransferThread

        metadata, theirs, fence = described
        self._ended, self._result, self._number = threading.Event(), None, 0
        region: Any = (memory.data_ptr(), memory.numel(), 0, "VRAM")
        self._thread = TransferThread("ours", [region], on_result=self._take, on_notification=lambda *_: None)
        self._thread.start()
        met = threading.Event()
        spec = PeerSpec("p", metadata, rows, theirs, memory_kind="VRAM", fence=fence)
        self._thread.call_soon(lambda: (self._thread.add_peer(spec), met.set()))
        assert met.wait(30), self._thread.health().last_error

    def read(self, into, ids):
        self._ended.clear()
        self._number += 1
        began_s = time.perf_counter()
        number = self._number
        self._thread.call_soon(lambda: self._thread.post_read(f"t{number}", "p", into, ids))
        assert self._ended.wait(60)
        took_s = time.perf_counter() - began_s
        assert self._result.outcome == "done", self._result
        return took_s

    def close(self):
        self._thread.close()

    def _take(self, result):
        self._result = result
        self._ended.set()


class Bare:
    """NIXL used directly, polled in the caller's thread, with the same rows and the same backend parameters."""

    def __init__(self, memory, rows, described):
        from kv_nixl_agent import BackendOptions
        from kv_nixl_agent.nixl.binding import find_nixl

        metadata, theirs, _ = described
        module = find_nixl()
        self._nixl = module.nixl_agent("bare", module.nixl_agent_config(backends=[]))
        self._nixl.create_backend("UCX", dict(BackendOptions().as_parameters()))
        self._nixl.register_memory(np.array([[memory.data_ptr(), memory.numel(), 0]], dtype=np.uint64), "VRAM")
        name = self._nixl.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        self._here = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "VRAM")
        self._there = self._nixl.prep_xfer_dlist(name, theirs, "VRAM")

    def read(self, into, ids):
        began_s = time.perf_counter()
        handle = self._nixl.make_prepped_xfer("READ", self._here, into, self._there, ids, b"")
        self._nixl.transfer(handle)
        while (state := self._nixl.check_xfer_state(handle)) != "DONE":
            assert state != "ERR"
        self._nixl.release_xfer_handle(handle)
        return time.perf_counter() - began_s

    def close(self):
        """Nothing to end."""


class Copy:
    """The device's own copy of as many bytes."""

    def __init__(self, memory, rows, described):
        self._memory, self._source = memory, memory.clone()

    def read(self, _into, _ids):
        import torch

        torch.cuda.synchronize()
        began_s = time.perf_counter()
        self._memory.copy_(self._source)
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    def close(self):
        """Nothing to end."""


def compare(page_bytes, pages, order):
    """Return GB/s of each side: median and best of the rounds."""
    import torch

    from kv_nixl_agent.testing import page_pattern

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    producer = context.Process(target=produce, args=(there, page_bytes, pages), daemon=True)
    producer.start()
    assert here.poll(60), "the producer did not start"
    described = here.recv()
    memory = torch.zeros((pages, page_bytes), dtype=torch.uint8, device="cuda:0")
    rows = np.array([[memory.data_ptr(), page_bytes, 0, page_bytes, pages]], dtype=np.uint64)
    sides = {side.__name__.lower(): side(memory, rows, described) for side in (Ours, Bare, Copy)}
    into, ids = (order.permutation(pages).astype(np.int32) for _ in range(2))
    content = page_pattern(5, pages, page_bytes)
    expected = torch.empty((pages, page_bytes), dtype=torch.uint8)
    expected[into] = torch.from_numpy(np.ascontiguousarray(content[ids]))
    taken = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name in order.permutation(list(sides)).tolist():
            memory.zero_()
            torch.cuda.synchronize()
            took_s = sides[name].read(into, ids)
            if number:
                taken[name].append(took_s)
            elif name != "copy":
                assert torch.equal(memory.cpu(), expected), f"{name} read other bytes"
    for side in sides.values():
        side.close()
    here.send("stop")
    producer.join(20)
    total = page_bytes * pages / 1e9
    return {
        name: {"median_gb_s": round(total / median(times), 2), "best_gb_s": round(total / min(times), 2)}
        for name, times in taken.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    order = np.random.default_rng(3)
    settings = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
    figures = {f"{size // 1024} KB": compare(size, pages, order) for size, pages in SIZES.items()}
    text = json.dumps({"settings": settings, "figures": figures}, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
