"""Consumers of the transfer benchmark, each in a process of its own that is stopped while another one is measured.

NIXL's progress thread polls without a pause: two agents in one process, or two running processes on two cores, would
measure each other. All read into the same pages of shared memory: otherwise one process may get huge pages and the
next one not, for as long as both live, and that is worth more than what is to be measured.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.nixl.binding import find_nixl
from kv_nixl_agent.testing import PeerProcess, stop_process

Indices = npt.NDArray[np.int32]
Rows = npt.NDArray[np.uint64]


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

    def __init__(self, metadata: bytes, rows: Rows, fence: tuple[int, int, int], options: dict[str, Any]) -> None:
        _, self._page_bytes, _, _, count = rows[0].tolist()
        self._memory = _shared_pages(options.pop("memory_fd"), count, self._page_bytes)
        self._results: list[TransferResult] = []
        self._ends_s: list[float] = []
        self._expected = 0
        self._all_ended = threading.Event()
        backend = BackendOptions(**options.pop("backend", {}))
        self.thread = TransferThread(
            "ours",
            [(self._memory.ctypes.data, self._memory.nbytes, 0, "DRAM")],
            on_result=self._on_result,
            on_notification=lambda *_: None,
            options=AgentOptions(backends=(backend,), **options),
        )
        self.thread.start()
        mine = np.array([[self._memory.ctypes.data, self._page_bytes, 0, self._page_bytes, count]], dtype=np.uint64)
        self._do(lambda: self.thread.agent.add_peer(PeerSpec("p", metadata, mine, rows, fence=fence)))
        self._number = 0

    def read(self, local: Indices, theirs: Indices, times: int) -> float:
        """Order `times` reads at once; seconds until the caller knows that all have ended."""
        began_s = time.perf_counter()
        self.order(local, theirs, times)
        self.wait()
        return time.perf_counter() - began_s

    def order(self, local: Indices, theirs: Indices, times: int, **more: Any) -> None:
        """Order without waiting."""
        self._results.clear()
        self._ends_s.clear()
        self._all_ended.clear()
        self._expected = times
        for _ in range(times):
            self._number += 1
            self.thread.call_soon(partial(self._post, f"t{self._number}", local, theirs, **more))

    def _post(self, name: str, local: Indices, theirs: Indices, **more: Any) -> None:
        self.thread.agent.post_read(name, "p", local, theirs, **more)

    def wait(self) -> None:
        """Wait for all that was ordered."""
        if not self._all_ended.wait(60) or any(result.outcome != "done" for result in self._results):
            message = f"reads did not succeed: {self._results[-1:]}"
            raise RuntimeError(message)

    def submit_cost(self, local: Indices, theirs: Indices) -> float:
        """Seconds that ordering takes its caller."""
        self._results.clear()
        self._all_ended.clear()
        self._expected = 1
        self._number += 1
        order = partial(self._post, f"t{self._number}", local, theirs)
        began_s = time.perf_counter()
        self.thread.call_soon(order)
        cost_s = time.perf_counter() - began_s
        self.wait()
        return cost_s

    def fenced(self, local: Indices, theirs: Indices, fence: tuple[int, int] | None) -> tuple[float, float]:
        """(seconds from first post to result, fence seconds) of one read."""
        self.order(local, theirs, 1, fence=fence)
        self.wait()
        result = self._results[0]
        return result.wire_s + result.fence_s, result.fence_s

    def notify(self, payloads: list[bytes], pause_s: float) -> dict[bytes, float]:
        """Read four pages per payload; monotonic time of each result."""
        ids = np.arange(4, dtype=np.int32)
        ends: dict[bytes, float] = {}
        for number, payload in enumerate(payloads):
            self.order(ids, ids, 1, notification=payload)
            self.wait()
            ends[payload] = self._ends_s[0]
            time.sleep(pause_s + 0.002 * (number % 5))
        return ends

    def close(self) -> None:
        """End the thread."""
        self.thread.close()

    def _do(self, function: Any) -> None:
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self.thread.call_soon(call)
        if not done.wait(30):
            raise RuntimeError(self.thread.health().last_error)

    def _on_result(self, result: TransferResult) -> None:
        self._ends_s.append(time.monotonic())
        self._results.append(result)
        if len(self._results) == self._expected:
            self._all_ended.set()


class Bare:
    """NIXL used directly, in the caller's thread: with strided rows, or with one descriptor per half block."""

    def __init__(self, metadata: bytes, rows: Rows, _: tuple[int, int, int], options: dict[str, Any]) -> None:
        address, page_bytes, _, _, count = rows[0].tolist()
        is_per_block = options.pop("per_block", False)
        self._memory = _shared_pages(options.pop("memory_fd"), count, page_bytes)
        module = find_nixl()
        self._nixl = module.nixl_agent("bare", module.nixl_agent_config(capture_telemetry=True, backends=[]))
        self._nixl.create_backend("UCX", {"num_threads": "4", **options})
        here = self._memory.ctypes.data
        self._nixl.register_memory(np.array([[here, self._memory.nbytes, 0]], dtype=np.uint64), "DRAM")
        name = self._nixl.add_remote_agent(metadata).decode()
        if is_per_block:
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


def _shared_pages(file_descriptor: int, count: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Map the memory that all consumers read into; every page is touched once."""
    pages = np.frombuffer(mmap.mmap(file_descriptor, count * page_bytes), dtype=np.uint8).reshape(count, page_bytes)
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

    def __init__(self, kind: str, peer: PeerProcess, memory_fd: int, **options: object) -> None:
        ours, theirs = socket.socketpair()
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        folder = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {folder!r}); from _consumers import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno(), memory_fd], stdout=subprocess.DEVNULL
        )
        theirs.close()
        described = (peer.agent_metadata, peer.rows, peer.fence)
        self._connection.send((kind, *described, {**options, "memory_fd": memory_fd}))
        self._reply()
        stop_process(self._process.pid)

    def call(self, command: str, *arguments: object) -> Any:
        """Let the child run one command."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._connection.send((command, arguments))
        answer = self._reply()
        stop_process(self._process.pid)
        return answer

    def close(self) -> None:
        """End the child."""
        os.kill(self._process.pid, signal.SIGCONT)
        self._connection.send(("exit", ()))
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _reply(self) -> Any:
        if not self._connection.poll(90):
            self._process.kill()
            message = "a consumer did not answer within 90 s"
            raise TimeoutError(message)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def serve(file_descriptor: int) -> None:
    """Run the child."""
    connection: Connection[Any, Any] = Connection(file_descriptor)
    kind, *arguments = connection.recv()
    try:
        consumer: Ours | Bare = Ours(*arguments) if kind == "ours" else Bare(*arguments)
    except Exception as error:  # noqa: BLE001 - answered to the parent
        connection.send(error)
        return
    gc.disable()
    connection.send("ready")
    while True:
        try:
            command, given = connection.recv()
        except EOFError:
            break
        if command == "exit":
            break
        try:
            connection.send(getattr(consumer, command)(*given))
        except Exception as error:  # noqa: BLE001 - answered to the parent
            connection.send(error)
    consumer.close()
