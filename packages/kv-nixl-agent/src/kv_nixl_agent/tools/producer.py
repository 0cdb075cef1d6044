"""A producer rank in a process of its own, for self-tests, benchmarks and fault tests.

The child runs a `TransferThread` over one region of pages and obeys commands from its parent over a socket pair. Its
main thread stands for the engine: it can be told to compute in pure Python while the transfer thread works.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kv_nixl_agent.options import AgentOptions, BackendOptions, ThreadOptions
from kv_nixl_agent.thread import TransferThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from kv_nixl_agent.values import StreamLocation

    _Description = tuple[bytes, tuple[int, int, int], int, StreamLocation | None]

    """Metadata, fence array, address of the pages, stream memory."""

__all__ = ["PeerProcess", "count_sockets", "page_pattern", "stop_process"]

_REPLY_TIMEOUT_S = 60.0
_STREAM_ENTRIES = 2048


def stop_process(pid: int) -> None:
    """SIGSTOP a child process and wait until its last thread stands: on a busy machine that takes tens of milliseconds."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def count_sockets(pid: int) -> int:
    """Return how many sockets a process holds open."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += str(link.readlink()).startswith("socket:")
    return count


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
        engine_config: UCX settings, for example `{"TLS": "tcp"}`.
        stream_slots: Its stream slots.
        environment: Further environment variables.
    """

    def __init__(
        self,
        name: str,
        *,
        page_bytes: int = 4096,
        page_count: int = 256,
        engine_config: Mapping[str, str] | None = None,
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
        self._connection.send((name, page_bytes, page_count, dict(engine_config or {}), stream_slots))
        self._description: _Description = self._reply()

    @property
    def agent_metadata(self) -> bytes:
        """Metadata of the child's agent, with its checksum trailer."""
        return self._description[0]

    @property
    def fence(self) -> tuple[int, int, int]:
        """Location of the child's fence array."""
        return self._description[1]

    @property
    def streams(self) -> StreamLocation | None:
        """Location of the child's stream memory."""
        return self._description[3]

    @property
    def address(self) -> int:
        """Address of the child's region."""
        return self._description[2]

    @property
    def rows(self) -> npt.NDArray[np.uint64]:
        """The child's pages as one strided row."""
        return np.array([[self.address, self.page_bytes, 0, self.page_bytes, self.page_count]], dtype=np.uint64)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401 - the command decides
        """Run a command of `_Child` and return its answer."""
        self._connection.send((command, arguments))
        return self._reply()

    def begin(self, command: str, *arguments: object) -> None:
        """Send a command whose answer `finish` takes later."""
        self._connection.send((command, arguments))

    def finish(self) -> Any:  # noqa: ANN401 - the command decides
        """Take the answer of a command that was begun."""
        return self._reply()

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
        stop_process(self._process.pid)

    def resume(self) -> None:
        """SIGCONT the child."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the child."""
        if self._process.poll() is None:
            self.resume()
            try:
                self._connection.send(("exit", ()))
                self._process.wait(10)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        self._connection.close()

    def _reply(self) -> Any:  # noqa: ANN401 - the command decides
        if not self._connection.poll(_REPLY_TIMEOUT_S):
            self.kill()
            message = f"the producer process {self._process.pid} did not answer within {_REPLY_TIMEOUT_S:.0f} s"
            raise TimeoutError(message)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class _Child:
    """The commands. All memory belongs to the child."""

    def __init__(
        self, name: str, page_bytes: int, page_count: int, engine_config: dict[str, str], stream_slots: int
    ) -> None:
        self._pages = np.zeros((page_count, page_bytes), dtype=np.uint8)
        self._pages[:] = page_pattern(0, page_count, page_bytes)
        self._arrived: list[tuple[str, bytes, float]] = []
        self._events: list[tuple[float, str]] = []
        self._has_timer = False
        self.thread = TransferThread(
            name,
            [(self._pages.ctypes.data, self._pages.nbytes, 0, "DRAM")],
            on_result=lambda _: None,
            on_notification=self._note,
            options=AgentOptions(
                backends=(BackendOptions(engine_config=engine_config),),
                stream_slots=stream_slots,
                stream_capacity=_STREAM_ENTRIES,
            ),
            thread_options=ThreadOptions(),
        )
        self.thread.start()

    def describe(self) -> _Description:
        return self.thread.agent_metadata(), self.thread.fence, int(self._pages.ctypes.data), self.thread.streams

    def fill(self, seed: int) -> None:
        self._pages[:] = page_pattern(seed, *self._pages.shape)

    def read_page(self, number: int) -> bytes:
        return bytes(self._pages[number].tobytes())

    def write_fence(self, slot: int, generation: int) -> None:
        self._on_owner(lambda: self.thread.write_fence(slot, generation))

    def notifications(self) -> list[tuple[str, bytes, float]]:
        taken, self._arrived = self._arrived, []
        return taken

    def _note(self, sender: str, payload: bytes) -> None:
        now_s = time.monotonic()
        self._arrived.append((sender, payload, now_s))
        self._events.append((now_s, payload.decode(errors="replace")))

    def watch_timer(self, period_s: float) -> None:
        """Begin a new list of events, with the runs of a timer among them; return once it runs, which the first call starts."""
        if not self._has_timer:
            self._has_timer = True
            self.thread.call_every(period_s, lambda: self._events.append((time.monotonic(), "timer")))
        self._events.clear()
        self.events_since(0.0, "timer")

    def events_since(self, began_s: float, event: str) -> list[str]:
        """Return notifications and timer runs since that monotonic time, in order, once `event` is among them or 20 s passed."""
        end_s = time.monotonic() + 20.0
        while True:
            seen = [name for at_s, name in list(self._events) if at_s >= began_s]
            if event in seen or time.monotonic() > end_s:
                return seen
            time.sleep(0.01)

    def stream(self, method: str, *arguments: object) -> None:
        """Call a method of the stream words."""
        getattr(self.thread.stream_words, method)(*arguments)

    def run(self, function: Callable[..., object], *arguments: object) -> object:
        """Call a function that the child can import with its transfer thread; return what it returns."""
        return function(self.thread, *arguments)

    def compute(self, duration_s: float, step_s: float) -> int:
        """Hold the interpreter in pure Python steps of `step_s`, as a busy engine thread does."""
        end, steps = time.monotonic() + duration_s, 0
        while time.monotonic() < end:
            step_end = time.monotonic() + step_s
            while time.monotonic() < step_end:
                steps += 1
            time.sleep(0)
        return steps

    def deregister(self) -> None:
        """Close the agent in order, and leave the process alive."""
        self.thread.close()

    def _on_owner(self, function: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self.thread.call_soon(run)
        if not done.wait(10):
            message = "the owner thread did not answer"
            raise TimeoutError(message)


def serve(file_descriptor: int) -> None:
    """Run the child: the entry point of the producer process."""
    connection: Connection[Any, Any] = Connection(file_descriptor)
    child = _Child(*connection.recv())
    connection.send(child.describe())
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:  # the parent is gone
            break
        if command == "exit":
            break
        try:
            connection.send(getattr(child, command)(*arguments))
        except Exception as error:  # noqa: BLE001 - answered to the parent
            connection.send(error)
    child.thread.close()
