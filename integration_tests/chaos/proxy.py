"""A TCP proxy that misbehaves on demand: it delays, drops, cuts, holds half-open and refuses connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, final

from kvdev.engines import free_port

Behaviour = Literal["pass", "delay", "drop", "drop-answers", "half-open", "cut-midway", "refuse"]
"""`drop` swallows what either side sends, `drop-answers` what the server sends; `half-open` accepts and never reads;
`cut-midway` resets a connection after some bytes of an answer; `refuse` resets each connection at once."""
_CHUNK_BYTES = 1 << 16
_RESETS_ON_CLOSE = struct.pack("ii", 1, 0)
_WAKES_EVERY_S = 0.02


@final
@dataclass
class Proxy:
    """Forwards connections of a port of its own to a server, as its behaviour says at the moment of each byte."""

    target: tuple[str, int]
    """Address of the server."""
    behaviour: Behaviour = "pass"
    delay_s: float = 0.2
    cut_after_bytes: int = 100
    port: int = field(default_factory=free_port)
    accepted: int = 0
    dropped_bytes: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _loop: asyncio.AbstractEventLoop | None = None
    _end: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, is_up: threading.Event) -> None:
        """Serve until `end` is called."""
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        is_up.set()
        await self._end.wait()
        server.close()
        self._reset_all()
        await asyncio.sleep(0)

    def behave(self) -> None:
        """Forward everything from now on, and reset connections that are open; from any thread."""
        self.behaviour = "pass"
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reset_all)

    def end(self) -> None:
        """Let `run` return."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)

    # --------------------------------------------------------------------------------------------------- connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._open.add(writer)
        try:
            if self.behaviour != "refuse":
                await self._relay(reader, writer)
        except OSError:
            pass  # either end has gone
        finally:
            self._open.discard(writer)
            _reset(writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(*self.target)
        self._open.add(to_there)
        try:
            ways = (self._pump(reader, to_there, is_answer=False), self._pump(there, writer, is_answer=True))
            tasks = [asyncio.ensure_future(way) for way in ways]
            # A server that has answered and closed has ended the connection; a client may close its half first.
            await tasks[1]
            tasks[0].cancel()
        finally:
            self._open.discard(to_there)
            _reset(to_there)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        passed = 0
        while True:
            while self.behaviour == "half-open":
                await asyncio.sleep(_WAKES_EVERY_S)
            data = await reader.read(_CHUNK_BYTES)
            if not data:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            if self.behaviour == "delay":
                await asyncio.sleep(self.delay_s)
            if self.behaviour == "drop" or (self.behaviour == "drop-answers" and is_answer):
                self.dropped_bytes += len(data)
                continue
            if self.behaviour == "cut-midway" and is_answer and passed + len(data) > self.cut_after_bytes:
                writer.write(data[: max(0, self.cut_after_bytes - passed)])
                await writer.drain()
                raise ConnectionResetError("cut")
            passed += len(data)
            writer.write(data)
            await writer.drain()

    def _reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that its other end gets a reset, as from a machine that has restarted."""
    found = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if found is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS_ON_CLOSE)
    writer.transport.abort()


@contextlib.contextmanager
def running_proxy(proxy: Proxy) -> Iterator[Proxy]:
    """Run the proxy on a thread of its own."""
    is_up = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(proxy.run(is_up)), name="proxy", daemon=True)
    thread.start()
    assert is_up.wait(60), "the proxy does not listen"
    try:
        yield proxy
    finally:
        proxy.end()
        thread.join(10)
