"""A producer rank in a process of its own, for self-tests, benchmarks and fault tests.

The child runs a `TransferThread` over one region of pages and obeys commands from its parent over a socket pair. Its
main thread stands for the engine: it can be given work in pure Python while the transfer thread works.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kv_nixl_agent.options import AgentOptions, BackendOptions
from kv_nixl_agent.thread import TransferThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from kv_nixl_agent.values import FenceLocation, StreamLocation

__all__ = ["PeerProcess", "Producer", "page_pattern", "stop_process"]

_REPLY_TIMEOUT_S = 60.0
_STREAM_ENTRIES = 2048


def stop_process(pid: int) -> None:
    """SIGSTOP a child process and wait until its last thread stands: on a busy machine that takes tens of milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def page_pattern(seed: int, page_count: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """Return reproducible content of a region, uint8 (page_count, page_bytes), every page different."""
    words = -(-page_bytes // 8)
    base = np.random.default_rng(seed).integers(0, 1 << 62, words, dtype=np.uint64)
    marks = np.arange(page_count, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    content: npt.NDArray[np.uint64] = base[None, :] ^ marks
    raw: npt.NDArray[np.uint8] = np.ndarray((page_count, words * 8), dtype=np.uint8, buffer=content.tobytes())
    return raw[:, :page_bytes]


@final
class PeerProcess:
    """Parent's side of a producer process. Every call is bounded in time.

    Args:
        name: Agent name.
        page_bytes: Size of a page.
        page_count: Pages of its region.
        backend: Its NIXL back end; None for UCX.
        stream_slots: Its stream slots.
        environment: Further environment variables.
    """

    def __init__(
        self,
        name: str,
        *,
        page_bytes: int = 4096,
        page_count: int = 256,
        backend: BackendOptions | None = None,
        stream_slots: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.page_bytes = page_bytes
        self.page_count = page_count
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        code = f"from kv_nixl_agent.tools.producer import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
        theirs.close()
        self.pid = self._process.pid
        self._connection.send((name, page_bytes, page_count, backend or BackendOptions(), stream_slots))
        answer: tuple[bytes, npt.NDArray[np.uint64], FenceLocation, StreamLocation | None] = self.finish()
        self.agent_metadata, self.rows, self.fence, self.streams = answer
        """Metadata of the child's agent, its pages as one strided row, its fence array, its stream memory."""

    def begin(self, command: Callable[..., object] | str, *arguments: object) -> None:
        """Send a command: a method of `Producer`, or a function that the child can import and call with its `Producer`."""
        self._connection.send((command, arguments))

    def finish(self) -> Any:  # noqa: ANN401 - the command decides
        """Return the answer of the command that was begun, or raise its error."""
        if not self._connection.poll(_REPLY_TIMEOUT_S):
            self.kill()
            message = f"the producer process {self.pid} did not answer within {_REPLY_TIMEOUT_S:.0f} s"
            raise TimeoutError(message)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def call(self, command: Callable[..., object] | str, *arguments: object) -> Any:  # noqa: ANN401 - the command decides
        """Run a command and return its answer; see `begin`."""
        self.begin(command, *arguments)
        return self.finish()

    def write_fence(self, slot: int, generation: int) -> None:
        """Write a word of the child's fence array; it is written when this returns."""
        self.call("write_fence", slot, generation)

    def notifications(self) -> list[tuple[str, bytes, float]]:
        """Return (sender, payload, monotonic arrival time) since the last call."""
        return list(self.call("notifications"))

    def kill(self) -> None:
        """SIGKILL the child and wait for its end."""
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> None:
        """SIGSTOP the child; see `stop_process`."""
        stop_process(self.pid)

    def resume(self) -> None:
        """SIGCONT the child."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the child."""
        if self._process.poll() is None:
            self.resume()
            try:
                self.begin("exit")
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        self._connection.close()


@final
class Producer:
    """The child's transfer thread, its pages and the notifications that arrived."""

    def __init__(self, name: str, page_bytes: int, page_count: int, backend: BackendOptions, stream_slots: int) -> None:
        self._pages = np.zeros((page_count, page_bytes), dtype=np.uint8)
        self.fill(0)
        self.arrived: list[tuple[str, bytes, float]] = []
        self.thread = TransferThread(
            name,
            [(self._pages.ctypes.data, self._pages.nbytes, 0, "DRAM")],
            on_result=lambda _: None,
            on_notification=lambda sender, payload: self.arrived.append((sender, payload, time.monotonic())),
            options=AgentOptions(
                backends=(backend,),
                stream_slots=stream_slots,
                stream_capacity=_STREAM_ENTRIES,
            ),
        )
        self.thread.start()

    def describe(self) -> tuple[bytes, npt.NDArray[np.uint64], FenceLocation, StreamLocation | None]:
        """Return the attributes of `PeerProcess`."""
        page_count, page_bytes = self._pages.shape
        rows = np.array([[self._pages.ctypes.data, page_bytes, 0, page_bytes, page_count]], dtype=np.uint64)
        return self.thread.agent_metadata(), rows, self.thread.fence, self.thread.streams

    def fill(self, seed: int) -> None:
        """Store `page_pattern` of a seed in the pages."""
        self._pages[:] = page_pattern(seed, *self._pages.shape)

    def write_fence(self, slot: int, generation: int) -> None:
        """Store a fence word."""
        self.thread.write_fence(slot, generation)

    def notifications(self) -> list[tuple[str, bytes, float]]:
        """Return what arrived since the last call."""
        taken, self.arrived = self.arrived, []
        return taken


def serve(file_descriptor: int) -> None:
    """Run the child: the entry point of the producer process."""
    connection: Connection[Any, Any] = Connection(file_descriptor)
    producer = Producer(*connection.recv())
    connection.send(producer.describe())
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:  # the parent is gone
            break
        if command == "exit":
            break
        try:
            answer = command(producer, *arguments) if callable(command) else getattr(producer, command)(*arguments)
            connection.send(answer)
        except Exception as error:  # noqa: BLE001 - answered to the parent
            connection.send(error)
    producer.thread.close()
