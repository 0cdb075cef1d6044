"""Client connections, and a poll over many of them.

A connection is a DEALER that speaks like a REQ (an empty first frame) but may send ahead. It never reconnects by itself:
replies are matched to queries by position, so a connection that broke must end visibly. A monitor socket per connection
reports that.

libzmq's events tell the causes of an end apart as far as this (measured with libzmq 4.3.5; the detail is an errno):

    CLOSED                                          refused: nothing listens at the port
    HANDSHAKE_FAILED_NO_DETAIL, ECONNRESET          refused: reset before it opened, as by a process that is ending
    HANDSHAKE_FAILED_NO_DETAIL, other               closed in good order during the opening: keys, or no ZeroMQ
    HANDSHAKE_FAILED_AUTH, HANDSHAKE_FAILED_PROTOCOL   keys, or encryption on one side only
    DISCONNECTED before HANDSHAKE_SUCCEEDED         the bytes of the server are no ZMTP 3
    DISCONNECTED after it                           lost
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING, Any, final

import zmq

from kv_handshake._endpoint import endpoint_of
from kv_handshake._errors import ConfigurationError, HandshakeError, TransportError
from kv_handshake._limits import MAX_REPLY_BYTES
from kv_handshake._zmq._grip import CAN_LOOK, Grip
from kv_handshake._zmq._options import HIGH_WATER_MARK, NOBLOCK_AND_MORE, set_options

if TYPE_CHECKING:
    from kv_handshake._zmq._keys import ClientSecurity

__all__ = ["Connection", "Hub", "WakeupPipe"]

_ONLY_CURRENT_ZMTP = b"kv-handshake"
"""A ZAP domain for plain client sockets. Without one, libzmq takes a web server for a ZeroMQ of before 2011, reads its
text as frames, and may deliver one as a reply. With one it hangs up on everything older than ZMTP 3.0. No authenticator
serves the domain in a client's context, so nothing else changes."""

_OPENING_MS = 30_000
"""A connection that is not open by then is given up: its peer is silent, or too busy to answer."""

_OPENING_BYTES = 64 * 1024
"""Bytes for the opening, for heartbeats of the server and for the heads of frames."""

_MAX_FRAMES = 2
_MAX_SURPLUS_FRAMES = 64
_LONGEST_POLL_MS = 60_000
_UPKEEP_MS = 2
_MOST_STEPS = 3
"""Times that `poll` waits on after a step of an opening, which nobody has to act on: connected, opened."""

_FRESH_MS = 2
_FRESH_S = _FRESH_MS / 1000
"""Time from which on the steps and the end of a connection are waited for. Most handshakes are over by then, and each step of an
opening would wake the thread."""

_REFRESH_S = 1.0
_MOST_ENDED = 32
"""Ended connections are closed, and the sockets of the next one made, when no event has come for so long, or when so many
wait: either takes as long as several replies (see ``tools/bench/handshake.py``)."""

_EVENT = struct.Struct("=HI")  # kind, value
_MONITORED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@final
class Connection:
    """A client connection to a listener; belongs to its hub's thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], security: ClientSecurity | None, key_number: int = 0
    ) -> None:
        self.address = ""
        self.key_number = key_number
        self.socket = context.socket(zmq.DEALER)
        self.is_open = False
        self._fault = ""
        self._descriptor = -1
        self._sent = 0
        self._port = 0
        self._connected_s = 0.0
        set_options(
            self.socket,
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_REPLY_BYTES),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RECONNECT_IVL, -1),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.HANDSHAKE_IVL, _OPENING_MS),
        )
        if security is None:
            self.socket.zap_domain = _ONLY_CURRENT_ZMTP
        else:
            self.socket.curve_publickey = security.public_key.encode("ascii")
            self.socket.curve_secretkey = security.secret_key.encode("ascii")
            self.socket.curve_serverkey = security.server_keys[key_number].encode("ascii")
        self.monitor = self.socket.get_monitor_socket(_MONITORED)

    def connect(self, address: str, port: int) -> None:
        """Start to connect to a literal address.

        Raises:
            TransportError: ``transport-failed``.
            ConfigurationError: ``invalid-endpoint``.
        """
        endpoint = endpoint_of(address, port)
        self.address, self._port = address, endpoint.port
        try:
            self.socket.setsockopt(zmq.IPV6, int(":" in endpoint.host))
            self._connected_s = time.monotonic()
            self.socket.connect(endpoint.url)
        except zmq.ZMQError as error:
            raise TransportError(
                "transport-failed", f"cannot connect to {address} port {port}: {error.strerror}", errno=error.errno
            ) from error

    def send(self, query: bytes) -> None:
        """Queue a query; it leaves as soon as the connection stands.

        A connection that has ended already drops it; `fault` reports why it ended.

        Raises:
            TransportError: ``transport-failed``.
        """
        self._sent += 1
        try:
            self.socket.send(b"", NOBLOCK_AND_MORE)
            self.socket.send(query, zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise TransportError("transport-failed", f"cannot send a query: {error.strerror}") from error

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next reply without the delimiter, at most a few, or None if there is none.

        Of a reply with many frames only the first 64 or so are read: more would keep other peers waiting. Such a reply has
        too many frames for any session, and its connection must be closed.
        """
        try:
            part = self.socket.recv(zmq.NOBLOCK, copy=False)  # a frame knows whether another one follows it
        except zmq.Again:
            return None
        frames = [part.bytes]
        surplus = 0
        while part.more:
            part = self.socket.recv(copy=False)
            if len(frames) <= _MAX_FRAMES + 1:
                frames.append(part.bytes)
            elif (surplus := surplus + 1) > _MAX_SURPLUS_FRAMES:
                break
        return frames[1:] if not frames[0] else frames

    def fault(self) -> str:
        """Return why the connection ended, as a code, or nothing; takes one event, the hub's poll reports further ones.

        Replies that came before the end stay readable.
        """
        if self._fault:
            return self._fault
        try:
            kind, detail = _EVENT.unpack(self.monitor.recv(zmq.NOBLOCK))
            self.monitor.recv()  # the address, which is known
        except zmq.Again:
            return ""
        if kind == zmq.EVENT_CONNECTED:
            self._descriptor = detail
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_open = True
        else:
            self._fault = self._cause(kind, detail)
        return self._fault

    def _cause(self, kind: int, detail: int) -> str:
        if kind == zmq.EVENT_CLOSED:
            return "connection-refused"
        if self.is_open or time.monotonic() - self._connected_s >= _OPENING_MS / 1e3:
            return "connection-lost"
        if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and detail == errno.ECONNRESET:
            return "connection-refused"
        return "authentication-refused"

    def is_flooded(self, grip: Grip) -> bool:
        """Return whether more has come in than all replies that were asked for may have."""
        if self._descriptor < 0:
            return False
        if grip.received_bytes(self._descriptor) <= _OPENING_BYTES + self._sent * MAX_REPLY_BYTES:
            return False
        ends = grip.ends(self._descriptor)
        return ends is not None and ends[1][1] == self._port  # else gone, and its number is another file's now

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


@final
class Hub:
    """A poll over many connections and a wake-up, for one thread; only `wake` may be called from others."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._security = security
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, Connection] = {}
        self._wakeup = WakeupPipe()
        self._prepared: Connection | None = None
        self._ended: list[Connection] = []
        self._needs_upkeep = True
        self._fresh: deque[tuple[float, Connection]] = deque()
        self._next_refresh_s = 0.0
        self._grip = Grip() if CAN_LOOK else None
        self._poller.register(self._wakeup.fileno(), zmq.POLLIN)

    @property
    def server_keys(self) -> int:
        """Keys that a listener may have; 0 without encryption."""
        return len(self._security.server_keys) if self._security is not None else 0

    def open(self, address: str, port: int, key_number: int = 0) -> Connection:
        """Return a new connection, on its way.

        Args:
            address: A literal address.
            port: The port.
            key_number: Index of the key that the listener must have; the first one's if there are fewer by now.

        Raises:
            TransportError: ``transport-failed``.
            ConfigurationError: ``invalid-endpoint``, ``invalid-key-file`` or ``insecure-key-file``.
        """
        self._refresh_keys()
        if key_number >= self.server_keys:  # a rotation took keys away between two attempts
            key_number = 0
        try:
            if self._prepared is not None and not key_number:
                connection, self._prepared = self._prepared, None
            else:
                connection = Connection(self._context, self._security, key_number)
            self._needs_upkeep = True
        except zmq.ZMQError as error:
            raise TransportError("transport-failed", f"cannot create a socket: {error.strerror}") from error
        try:
            connection.connect(address, port)
        except HandshakeError:
            connection.close()
            raise
        self._add(connection.socket, connection)
        self._fresh.append((time.monotonic(), connection))
        return connection

    def _add(self, each: zmq.Socket[Any], connection: Connection) -> None:
        self._poller.register(each, zmq.POLLIN)
        self._by_socket[each] = connection

    def _heed_ends(self, now_s: float) -> None:
        """Begin to wait for the ends of connections that are no longer fresh."""
        while self._fresh and now_s - self._fresh[0][0] >= _FRESH_S:
            _, connection = self._fresh.popleft()
            if connection.socket in self._by_socket:
                self._add(connection.monitor, connection)

    def _refresh_keys(self) -> None:
        """Take changed key files over, at most once a second."""
        if self._security is None or time.monotonic() < self._next_refresh_s:
            return
        self._next_refresh_s = time.monotonic() + _REFRESH_S
        former = self._security
        try:
            self._security = former.refreshed()
        except ConfigurationError:
            return  # half written: the former keys go on, and the files are read again in a second
        if self._security is not former and self._prepared is not None:
            self._prepared.close()
            self._prepared = None

    def discard(self, connection: Connection) -> None:
        """Forget a connection; `poll` closes it when there is time."""
        for each in (connection.socket, connection.monitor):
            if self._by_socket.pop(each, None) is not None:
                self._poller.unregister(each)
        self._ended.append(connection)
        self._needs_upkeep = True
        if len(self._ended) >= _MOST_ENDED:
            self._do_upkeep()

    def poll(self, timeout_s: float) -> tuple[list[Connection], list[Connection]]:
        """Wait until a connection is readable or changes, `wake` is called, or the time is over; at times less.

        Returns:
            The connections with replies to read, and those for whose end `fault` has a code.
        """
        longest_ms = _UPKEEP_MS if self._needs_upkeep else _LONGEST_POLL_MS
        wait_ms = max(0, min(_FRESH_MS if self._fresh else longest_ms, math.ceil(timeout_s * 1000)))
        steps = 0
        while True:
            found = self._poller.poll(wait_ms)
            readable, changed, is_awake = self._sort(found)
            steps += 1
            if readable or changed or is_awake or not found or steps == _MOST_STEPS:
                break
        if self._fresh:
            self._heed_ends(time.monotonic())
        if self._needs_upkeep and not found:
            self._do_upkeep()
        return readable, changed

    def _sort(self, found: list[tuple[Any, int]]) -> tuple[list[Connection], list[Connection], bool]:
        """Return the readable connections, those that have ended, and whether `wake` was called."""
        readable: list[Connection] = []
        ended: list[Connection] = []
        is_awake = False
        for each, _ in found:
            connection = self._by_socket.get(each)
            if connection is None:
                self._wakeup.drain()
                is_awake = True
            elif each is connection.socket:
                readable.append(connection)
            elif connection.fault():
                ended.append(connection)
        return readable, ended, is_awake

    def flooded(self) -> list[Connection]:
        """Return the connections on which more has come in than was asked for: libzmq sets no limit to the frames of a reply."""
        if self._grip is None:
            return []
        return [each for each in dict.fromkeys(self._by_socket.values()) if each.is_flooded(self._grip)]

    def _do_upkeep(self) -> None:
        """Close ended connections and prepare the next one."""
        self._needs_upkeep = False
        while self._ended:
            self._ended.pop().close()
        if self._prepared is None:
            with contextlib.suppress(zmq.ZMQError):  # `open` tries again and reports it
                self._prepared = Connection(self._context, self._security)

    def wake(self) -> None:
        """Make a blocked `poll` return; from any thread, also after `close`."""
        self._wakeup.wake()

    def close(self) -> None:
        """Close all connections and the wake-up."""
        prepared = [self._prepared] if self._prepared is not None else []
        for connection in {*self._by_socket.values(), *self._ended, *prepared}:
            connection.close()
        self._wakeup.close()
        if self._grip is not None:
            self._grip.close()
        self._context.destroy(linger=0)


@final
class WakeupPipe:
    """A descriptor to poll that any thread can make readable."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable again."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)

    def wake(self) -> None:
        """Make the descriptor readable; harmless after `close`."""
        with contextlib.suppress(OSError):
            self._writer.send(b"!")

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()
