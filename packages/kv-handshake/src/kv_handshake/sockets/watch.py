"""Limits on the connections of a listener: how many, how long without a query, and how many bytes without one.

Theory of operation. libzmq keeps a message in memory until its last frame has come, and sets no limit to their number: an empty
frame takes 2 bytes on the network and 64 in memory. So a thread of its own compares, for every connection, the bytes that the
kernel has received with the queries that have reached the listener. A query takes some 30 bytes; a connection that is far ahead
of its queries is shut down, and libzmq frees what it held of it.

The thread sleeps while nothing comes in. It is woken by the kernel (edge-triggered, so libzmq's own waiting is not disturbed),
waits `_GRAIN_S` so that it never runs while a handshake is answered, and then looks at the connections that got something. From
then on it looks every `_GRAIN_S`, until nothing has come in for `_AWAKE_S`: to be woken costs a handshake more than the look.
Example: 10 MB of empty frames at 40 MB/s are stopped after 20 to 40 ms: about 1 MB on the network, 40 MB in memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

import zmq

from kv_handshake.sockets.tcp import Grip, most_connections

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_handshake.core.server import Sender
    from kv_handshake.sockets.tcp import Ends

__all__ = ["AHEAD_BYTES", "AHEAD_BYTES_IN_ALL", "IDLE_S", "MOST_CONNECTIONS", "ConnectionWatch"]

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""Not `EVENT_MONITOR_STOPPED`, which libzmq sends even if that means to wait for a reader."""


_GRAIN_S = 0.02
_ROUND_S = 1.0
"""Time between two looks at connections on which nothing comes in."""

_AWAKE_S = 0.5
"""Time after the last news in which the thread looks every `_GRAIN_S` without being woken, as a handshake would wake it."""

_EVENT = struct.Struct("=HI")  # kind, descriptor
_OPENING_BYTES = 2048
"""Bytes that an honest connection may be ahead while the listener is busy: an encrypted opening and its first queries."""
_JOIN_S = 2.0
_DESCRIPTOR_SHARE = 4
"""Connections take at most one descriptor in this many that the process may open."""


MOST_CONNECTIONS = 1024
"""Connections at once; fewer where the process may open few files."""

IDLE_S = 60.0
"""Longest time without a query."""

AHEAD_BYTES = 192 * 1024
"""Bytes that a connection may be ahead of its queries."""

AHEAD_BYTES_IN_ALL = 1024 * 1024
"""Bytes that all connections together may be ahead."""


@final
@dataclass(slots=True)
class _Open:
    """An open connection as the watch knows it."""

    descriptor: int
    ends: Ends
    queries: int
    since_s: float
    begin_bytes: int = 0
    ahead_bytes: int = 0

    @property
    def address(self) -> str:
        """The peer's IP address."""
        return self.ends[1][0]

    @property
    def surplus_bytes(self) -> int:
        """Bytes that it is ahead beyond those of an honest opening."""
        return max(0, self.ahead_bytes - _OPENING_BYTES)


@final
class ConnectionWatch:
    """Keeps the limits of one listening socket on a thread of its own.

    Args:
        sock: The listening socket; its monitor belongs to the watch from now on.
        port: Its port, which distinguishes its connections from other files of the process.
        report: Called on the watch's thread with the cause and the address of each connection that was shut down.
        upkeep: Called about once a second on the watch's thread; returns whether all connections must be shut down.
        closed: Called on the watch's thread with the descriptor of each connection that has ended.
    """

    def __init__(
        self,
        sock: zmq.Socket[bytes],
        port: int,
        *,
        report: Callable[[str, str], None],
        upkeep: Callable[[], bool],
        closed: Callable[[int], None],
    ) -> None:
        self._report = report
        self._upkeep = upkeep
        self._closed = closed
        self._most = most_connections(MOST_CONNECTIONS, share=_DESCRIPTOR_SHARE)
        self._socket = sock
        self._port = port
        self._open: dict[int, _Open] = {}
        self._senders: dict[int, Sender] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-handshake-watch", daemon=True)
        with contextlib.ExitStack() as undo:
            self._grip = Grip()
            undo.callback(self._grip.close)
            self._arrivals = undo.enter_context(select.epoll())
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._bell)
            context = cast("zmq.Context[zmq.Socket[bytes]]", sock.context)  # pyright: ignore[reportUnknownMemberType]
            # Its queue has no limit: at one, libzmq's own thread would wait, holding a lock that `close` needs.
            self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
            undo.callback(self._monitor.close, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            url = f"inproc://watch-{uuid.uuid4().hex}"
            sock.monitor(url, _EVENTS)
            # libzmq's own thread blocks on a monitor without a reader: it is disabled first and closed last.
            undo.callback(sock.disable_monitor)
            self._monitor.connect(url)
            self._thread.start()
            self._descriptors = undo.pop_all()

    def note(self, sender: Sender) -> None:
        """Take in the first query of a connection; called by the listener's thread."""
        self._senders[sender.descriptor] = sender

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        os.eventfd_write(self._bell, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            self._socket.disable_monitor()
        else:
            self._descriptors.close()

    # Everything below runs on the watch's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._monitor, self._arrivals.fileno(), self._bell):
            poller.register(each, zmq.POLLIN)
        now_s = time.monotonic()
        next_round_s, awake_until_s = now_s + _ROUND_S, now_s
        while True:
            is_quiet = now_s >= awake_until_s and not poller.poll(int(_ROUND_S * 1000))
            if self._ended.wait(0 if is_quiet else _GRAIN_S):
                break
            now_s = time.monotonic()
            try:
                has_events = self._take_events(now_s)
                touched = [self._open[fd] for fd, _ in self._arrivals.poll(0) if fd in self._open]
                if touched or has_events:
                    awake_until_s = now_s + _AWAKE_S
                self._look_at(touched, now_s)
                if now_s >= next_round_s:
                    next_round_s = now_s + _ROUND_S
                    self._make_round(now_s)
            except Exception as error:  # noqa: BLE001 - the limits and the monitor's reader must outlive any failure
                self._report("watch", f"the watch over connections goes on after {error!r}")

    def _take_events(self, now_s: float) -> bool:
        """Take all news of connections in; return whether there were any. Most handshakes begin and end between two looks."""
        accepted: set[int] = set()
        has_events = False
        with contextlib.suppress(zmq.ZMQError):
            while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                kind, descriptor = _EVENT.unpack(self._monitor.recv(zmq.NOBLOCK))
                self._monitor.recv()
                has_events = True
                self._open.pop(descriptor, None)
                if kind == zmq.EVENT_ACCEPTED:
                    accepted.add(descriptor)
                else:
                    accepted.discard(descriptor)
                    self._closed(descriptor)
        for descriptor in accepted:
            self._add(descriptor, now_s)
        if len(self._open) > self._most:
            self._make_room()
        return has_events

    def _add(self, descriptor: int, now_s: float) -> None:
        ends = self._grip.ends(descriptor)
        if ends is None or ends[0][1] != self._port:  # gone, and its number is another file's now
            return
        self._open[descriptor] = _Open(descriptor, ends, self._queries(descriptor), since_s=now_s)
        with contextlib.suppress(OSError):
            self._arrivals.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def _look_at(self, connections: list[_Open], now_s: float) -> None:
        for each in connections:
            self._measure(each, now_s)
            if each.ahead_bytes > AHEAD_BYTES:
                self._hang_up(each, "message-too-long")
        if not connections:
            return
        excess = sum(each.surplus_bytes for each in self._open.values()) - AHEAD_BYTES_IN_ALL
        if excess > 0:
            for each in sorted(self._open.values(), key=lambda each: -each.ahead_bytes):
                self._hang_up(each, "messages-too-long")
                excess -= each.surplus_bytes
                if excess <= 0:
                    break

    def _measure(self, connection: _Open, now_s: float) -> None:
        received = self._grip.received_bytes(connection.descriptor)
        queries = self._queries(connection.descriptor)
        if queries != connection.queries:
            connection.queries, connection.begin_bytes, connection.since_s = queries, received, now_s
        connection.ahead_bytes = received - connection.begin_bytes

    def _queries(self, descriptor: int) -> int:
        sender = self._senders.get(descriptor)
        return sender.queries if sender is not None else 0

    def _make_round(self, now_s: float) -> None:
        for each in list(self._open.values()):
            self._measure(each, now_s)
            if now_s - each.since_s > IDLE_S:
                self._hang_up(each, "idle")
        if self._upkeep():
            for each in list(self._open.values()):
                self._hang_up(each, "keys-changed")

    def _make_room(self) -> None:
        """Shut down as many connections as are too many: of the address with most, the one longest without a query."""
        held = Counter(each.address for each in self._open.values())
        waiting = sorted(self._open.values(), key=lambda each: each.since_s, reverse=True)
        for _ in range(len(self._open) - self._most):
            address, _ = held.most_common(1)[0]
            at = next(at for at in range(len(waiting) - 1, -1, -1) if waiting[at].address == address)
            held[address] -= 1
            self._hang_up(waiting.pop(at), "too-many-connections")

    def _hang_up(self, connection: _Open, cause: str) -> None:
        if self._open.pop(connection.descriptor, None) is None:
            return
        if self._grip.hang_up(connection.descriptor, connection.ends):
            self._report(cause, connection.address)
