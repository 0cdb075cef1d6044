"""Consumers of the transfer benchmark, each in a process of its own that is stopped while another one is measured.

NIXL's progress thread polls without a pause: two agents in one process, or two running processes on two cores, would
measure each other. All read into the same pages of shared memory: otherwise one process may get huge pages and the
next one not, for as long as both live, and that is worth more than what is to be measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count as count_up
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_nixl_agent import AgentOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.nixl.binding import find_nixl
from kv_nixl_agent.testing import PeerProcess, stop_process

Indices = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint64]
Read = Future[tuple[float, TransferResult]]
"""A read that was ordered: the moment and the result of its end."""
_ANSWERS_WITHIN_S = 90.0


def compute(_producer: object, duration_s: float, step_s: float) -> int:
    """Hold a producer's interpreter in pure Python steps of `step_s`, as a busy engine thread does."""
    end_s, steps = time.monotonic() + duration_s, 0
    while time.monotonic() < end_s:
        step_end_s = time.monotonic() + step_s
        while time.monotonic() < step_end_s:
            steps += 1
        time.sleep(0)
    return steps


class Ours:
    """Our thread; its caller learns of an end through a future."""

    def __init__(self, metadata: bytes, rows: Rows, fence: tuple[int, int, int], shared: str) -> None:
        _, page_bytes, _, _, count = rows[0].tolist()
        self._memory = SharedMemory(shared)
        here = _touched(self._memory).ctypes.data
        self._reads: dict[str, Read] = {}
        self._numbers = count_up()
        memory: Any = [(here, page_bytes * count, 0, "DRAM")]
        self.thread = TransferThread(
            "ours", memory, on_result=self._on_result, on_notification=lambda *_: None, options=AgentOptions()
        )
        self.thread.start()
        mine = np.array([[here, page_bytes, 0, page_bytes, count]], dtype=np.uint64)
        self.thread.call_soon(lambda: self.thread.agent.add_peer(PeerSpec("p", metadata, mine, rows, fence=fence)))

    def read(self, local: Indices, theirs: Indices, times: int) -> float:
        """Order `times` reads at once; seconds until the caller knows that all have ended."""
        began_s = time.perf_counter()
        for read in reversed([self._order(local, theirs) for _ in range(times)]):  # one wait, for the last
            read.result(60)
        return time.perf_counter() - began_s

    def submit_cost(self, local: Indices, theirs: Indices) -> float:
        """Seconds that ordering takes its caller."""
        began_s = time.perf_counter()
        read = self._order(local, theirs)
        cost_s = time.perf_counter() - began_s
        read.result(60)
        return cost_s

    def fenced(self, local: Indices, theirs: Indices, fence: tuple[int, int] | None) -> tuple[float, float]:
        """(seconds from first post to result, fence seconds) of one read."""
        _, result = self._order(local, theirs, fence=fence).result(60)
        return result.wire_s + result.fence_s, result.fence_s

    def notify(self, payloads: list[bytes], pause_s: float) -> dict[bytes, float]:
        """Read four pages per payload; monotonic time of each result."""
        ids = np.arange(4, dtype=np.int32)
        ends: dict[bytes, float] = {}
        for number, payload in enumerate(payloads):
            ends[payload], _ = self._order(ids, ids, notification=payload).result(60)
            time.sleep(pause_s + 0.002 * (number % 5))
        return ends

    def close(self) -> None:
        """End the thread."""
        self.thread.close()

    def _order(self, local: Indices, theirs: Indices, **more: Any) -> Read:
        name, read = f"t{next(self._numbers)}", Read()
        self._reads[name] = read
        self.thread.call_soon(lambda: self.thread.agent.post_read(name, "p", local, theirs, **more))
        return read

    def _on_result(self, result: TransferResult) -> None:
        read = self._reads.pop(result.transfer_id)
        if result.outcome == "done":
            read.set_result((time.monotonic(), result))
        else:
            read.set_exception(RuntimeError(f"a read did not succeed: {result}"))


class Bare:
    """NIXL used directly, in the caller's thread: with strided rows, or with one descriptor per half block."""

    def __init__(self, metadata: bytes, rows: Rows, _: tuple[int, int, int], shared: str, **options: str) -> None:
        address, page_bytes, _, _, count = rows[0].tolist()
        self._memory = SharedMemory(shared)
        here = _touched(self._memory).ctypes.data
        module = find_nixl()
        self._nixl = module.nixl_agent("bare", module.nixl_agent_config(capture_telemetry=True, backends=[]))
        self._nixl.create_backend("UCX", {"num_threads": "4", **options})
        self._nixl.register_memory(np.array([[here, page_bytes * count, 0]], dtype=np.uint64), "DRAM")
        name = self._nixl.add_remote_agent(metadata).decode()
        if not options:  # as connectors without strided rows do
            mine, theirs = _halves(here, page_bytes, count), _halves(address, page_bytes, count)
        else:
            mine, theirs = np.array([[here, page_bytes, 0, page_bytes, count]], dtype=np.uint64), rows
        self._local = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", mine, "DRAM")
        self._theirs = self._nixl.prep_xfer_dlist(name, theirs, "DRAM")
        self.read(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32), 1)

    def read(self, local: Indices, theirs: Indices, times: int) -> float:
        """Post `times` reads, then poll them all; seconds."""
        began_s = time.perf_counter()
        handles = [self._post(local, theirs) for _ in range(times)]
        for handle in handles:
            self._finish(handle)
        return time.perf_counter() - began_s

    def post_cost(self, local: Indices, theirs: Indices) -> float:
        """Seconds that making and posting takes its caller."""
        began_s = time.perf_counter()
        handle = self._post(local, theirs)
        cost_s = time.perf_counter() - began_s
        self._finish(handle)
        return cost_s

    def close(self) -> None:
        """Nothing to end."""

    def _post(self, local: Indices, theirs: Indices) -> object:
        handle = self._nixl.make_prepped_xfer("READ", self._local, local, self._theirs, theirs, b"")
        self._nixl.transfer(handle)
        return handle

    def _finish(self, handle: object) -> None:
        while self._nixl.check_xfer_state(handle) != "DONE":
            pass
        self._nixl.release_xfer_handle(handle)


def _touched(shared: SharedMemory) -> npt.NDArray[np.uint8]:
    """Return the memory that all consumers read into; every page is touched once."""
    pages = np.ndarray(shared.size, np.uint8, shared.buf)
    pages[:] = 1
    return pages


def _halves(address: int, page_bytes: int, count: int) -> Rows:
    """Return one line per block, all K halves before all V halves."""
    half = page_bytes // 2
    pages = np.arange(count, dtype=np.uint64) * np.uint64(page_bytes) + np.uint64(address)
    result = np.zeros((2 * count, 3), dtype=np.uint64)
    result[:, 0] = np.concatenate([pages, pages + np.uint64(half)])
    result[:, 1] = half
    return result


class ConsumerProcess:
    """A consumer in a process of its own, which runs only while a call is answered."""

    def __init__(self, kind: Callable[..., Any], peer: PeerProcess, pages: SharedMemory, **options: str) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        made = self._pool.submit(_make, kind, peer.agent_metadata, peer.rows, peer.fence, pages.name, **options)
        self._pid = made.result(_ANSWERS_WITHIN_S)
        stop_process(self._pid)

    def call(self, command: str, *arguments: object) -> Any:
        """Let the child run one command."""
        os.kill(self._pid, signal.SIGCONT)
        try:
            answer = self._pool.submit(_call, command, *arguments).result(_ANSWERS_WITHIN_S)
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            raise
        stop_process(self._pid)
        return answer

    def close(self) -> None:
        """End the child."""
        self.call("close")
        os.kill(self._pid, signal.SIGCONT)
        self._pool.shutdown()


_made: list[Any] = []
"""The consumer of this process."""


def _make(kind: Callable[..., Any], *arguments: Any, **options: str) -> int:
    _made.append(kind(*arguments, **options))
    gc.disable()
    return os.getpid()


def _call(command: str, *arguments: Any) -> Any:
    return getattr(_made[0], command)(*arguments)
