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
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_nixl_agent import AgentOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.nixl.binding import find_nixl
from kv_nixl_agent.testing import PeerProcess, stop_process

Indices = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint64]
_SPAWN = multiprocessing.get_context("spawn")


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
    """Our thread; its caller learns of an end through an event."""

    def __init__(self, metadata: bytes, rows: Rows, fence: tuple[int, int, int], shared: str) -> None:
        _, page_bytes, _, _, count = rows[0].tolist()
        self._memory = SharedMemory(shared)
        here = _touched(self._memory).ctypes.data
        self._results: list[tuple[float, TransferResult]] = []
        self._number = self._expected = 0
        self._all_ended = threading.Event()
        self.thread = TransferThread(
            "ours",
            [(here, page_bytes * count, 0, "DRAM")],
            on_result=self._on_result,
            on_notification=lambda *_: None,
            options=AgentOptions(),
        )
        self.thread.start()
        mine = np.array([[here, page_bytes, 0, page_bytes, count]], dtype=np.uint64)
        self.thread.call_soon(lambda: self.thread.agent.add_peer(PeerSpec("p", metadata, mine, rows, fence=fence)))

    def read(self, local: Indices, theirs: Indices, times: int) -> float:
        """Order `times` reads at once; seconds until the caller knows that all have ended."""
        began_s = time.perf_counter()
        self._order(local, theirs, times)
        self._wait()
        return time.perf_counter() - began_s

    def submit_cost(self, local: Indices, theirs: Indices) -> float:
        """Seconds that ordering takes its caller."""
        began_s = time.perf_counter()
        self._order(local, theirs)
        cost_s = time.perf_counter() - began_s
        self._wait()
        return cost_s

    def fenced(self, local: Indices, theirs: Indices, fence: tuple[int, int] | None) -> tuple[float, float]:
        """(seconds from first post to result, fence seconds) of one read."""
        self._order(local, theirs, fence=fence)
        _, result = self._wait()
        return result.wire_s + result.fence_s, result.fence_s

    def notify(self, payloads: list[bytes], pause_s: float) -> dict[bytes, float]:
        """Read four pages per payload; monotonic time of each result."""
        ids = np.arange(4, dtype=np.int32)
        ends: dict[bytes, float] = {}
        for number, payload in enumerate(payloads):
            self._order(ids, ids, notification=payload)
            ends[payload], _ = self._wait()
            time.sleep(pause_s + 0.002 * (number % 5))
        return ends

    def close(self) -> None:
        """End the thread."""
        self.thread.close()

    def _order(self, local: Indices, theirs: Indices, times: int = 1, **more: Any) -> None:
        self._results.clear()
        self._all_ended.clear()
        self._expected = times
        for _ in range(times):
            self._number += 1
            self.thread.call_soon(partial(self._post, f"t{self._number}", local, theirs, **more))

    def _post(self, name: str, local: Indices, theirs: Indices, **more: Any) -> None:
        self.thread.agent.post_read(name, "p", local, theirs, **more)

    def _wait(self) -> tuple[float, TransferResult]:
        """Wait for all that was ordered; return the moment and the result of the last one."""
        if not self._all_ended.wait(60) or any(result.outcome != "done" for _, result in self._results):
            raise RuntimeError(f"reads did not succeed: {self._results[-1:]}")
        return self._results[-1]

    def _on_result(self, result: TransferResult) -> None:
        self._results.append((time.monotonic(), result))
        if len(self._results) == self._expected:
            self._all_ended.set()


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
    """Parent's side: the child runs only while a call is answered."""

    def __init__(self, kind: str, peer: PeerProcess, pages: SharedMemory, **options: str) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        described = (peer.agent_metadata, peer.rows, peer.fence, pages.name)
        self._process = _SPAWN.Process(target=serve, args=(theirs, kind, *described), kwargs=options)
        self._process.start()
        theirs.close()
        self._reply()

    def call(self, command: str, *arguments: object) -> Any:
        """Let the child run one command."""
        os.kill(self._process.pid or 0, signal.SIGCONT)
        self._connection.send((command, arguments))
        return self._reply()

    def close(self) -> None:
        """End the child."""
        os.kill(self._process.pid or 0, signal.SIGCONT)
        self._connection.send(None)
        self._process.join(10)
        self._process.kill()
        self._connection.close()

    def _reply(self) -> Any:
        if not self._connection.poll(90):
            self._process.kill()
            raise TimeoutError("a consumer did not answer within 90 s")
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        stop_process(self._process.pid or 0)
        return answer


def serve(connection: Connection[Any, Any], kind: str, *arguments: Any, **options: str) -> None:
    """Run the child."""
    try:
        consumer = {"ours": Ours, "bare": Bare}[kind](*arguments, **options)
        gc.disable()
        connection.send("ready")
        while (order := connection.recv()) is not None:
            command, given = order
            connection.send(getattr(consumer, command)(*given))
        consumer.close()
    except Exception as error:  # noqa: BLE001 - answered to the parent
        connection.send(error)
