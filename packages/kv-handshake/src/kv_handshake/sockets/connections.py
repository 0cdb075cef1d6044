"""Client connections, and a poll over many of them for one thread.

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
from typing import TYPE_CHECKING, Any, final

import zmq

from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.errors import ConfigurationError, TransportError
from kv_handshake.sockets.tcp import Grip, refuse_without_descriptors
from kv_handshake.wire.limits import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake.core.endpoint import Endpoint
    from kv_handshake.security import ClientSecurity

__all__ = ["HIGH_WATER_MARK", "NOBLOCK_AND_MORE", "Connection", "Hub", "set_options"]

HIGH_WATER_MARK = 256
"""Messages queued per peer. The transport counts what was read in halves of it, so half of it may be under way."""

NOBLOCK_AND_MORE = zmq.NOBLOCK | zmq.SNDMORE


def set_options(target: zmq.Socket[Any], *options: tuple[int, int]) -> None:
    """Set integer options of a socket."""
    for name, value in options:
        target.setsockopt(name, value)


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
    """A client connection to a listener; belongs to its hub's thread.

    Attributes:
        tried: Keys that were tried on its listener, the last one by this connection; "" without encryption.
        is_open: Whether queries and replies pass.
        was_reset: Whether the listener's system had accepted it, and ended it before it was open.

    Raises:
        TransportError: ``transport-failed``.
        ConfigurationError: ``invalid-endpoint``.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        security: ClientSecurity | None,
        tried: tuple[str, ...],
    ) -> None:
        self.endpoint = endpoint
        self.tried = tried
        self.socket = context.socket(zmq.DEALER)
        self.is_open = False
        self.was_reset = False
        self._fault = ""
        self._descriptor = -1
        self._sent = 0
        self._connected_s = time.monotonic()
        set_options(
            self.socket,
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_REPLY_BYTES),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RECONNECT_IVL, -1),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.HANDSHAKE_IVL, _OPENING_MS),
            (zmq.IPV6, int(":" in endpoint.host)),
        )
        if security is None:
            self.socket.zap_domain = _ONLY_CURRENT_ZMTP
        else:
            self.socket.curve_publickey = security.public_key.encode("ascii")
            self.socket.curve_secretkey = security.secret_key.encode("ascii")
            self.socket.curve_serverkey = tried[-1].encode("ascii")
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        try:
            self.socket.connect(endpoint.url)
        except zmq.ZMQError:
            self.close()
            raise

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
            self.was_reset = True
            return "connection-refused"
        return "authentication-refused"

    def is_flooded(self, grip: Grip) -> bool:
        """Return whether more bytes have come in than all requested replies may have."""
        if self._descriptor < 0:
            return False
        if grip.received_bytes(self._descriptor) <= _OPENING_BYTES + self._sent * MAX_REPLY_BYTES:
            return False
        ends = grip.ends(self._descriptor)
        return ends is not None and ends[1][1] == self.endpoint.port  # else gone, and its number is another file's now

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


_LONGEST_POLL_MS = 60_000
_CLOSING_MS = 2
_REFRESH_S = 1.0
_MOST_ENDED = 32
"""Ended connections are closed when no event has come for so long, or when so many wait: to close one takes as long as several
replies (see ``tools/bench/handshake.py``)."""

_TRIES = 2
"""Tries of each key, and of an opening without keys: a listener may change its own pair between two of them, and ends openings
when it does, or when it has too many."""


@final
class Hub:
    """A poll over many connections and a wake-up, for one thread; only `wake` may be called from others.

    Raises:
        TransportError: ``transport-failed``: too few files may be opened.
    """

    def __init__(self, security: ClientSecurity | None = None) -> None:
        refuse_without_descriptors("transport-failed", "cannot create a socket")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._context.socket(zmq.PAIR).close()  # starts the context, while the descriptors are there
        self._security = security
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, Connection] = {}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._ended: list[Connection] = []
        self._next_refresh_s = 0.0
        self._grip = Grip()
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def may_try_again(self, connection: Connection) -> bool:
        """Return whether a listener that refused an opening may take another one, with the next key if there are several.

        A reset opening is tried again only with keys; without, it is reported as it is.

        Example: keys "new" and "old", and a listener that changes from "old" to "new" after it has refused "new". It refuses
        "old", too, and is asked with "new" again.
        """
        is_keyed_reset = connection.was_reset and self._security is not None
        is_refused = connection.fault() == "authentication-refused" or is_keyed_reset
        return is_refused and self._next_key(connection.tried) is not None

    def _next_key(self, tried: Sequence[str]) -> str | None:
        """Return the key tried least often, None if all were tried twice.

        A rotation adds and removes keys between two attempts, so the keys themselves are remembered, not their numbers.
        """
        known = self._security.server_keys if self._security is not None else ("",)
        return min((key for key in known if tried.count(key) < _TRIES), key=tried.count, default=None)

    def open(self, address: str, port: int, tried: tuple[str, ...] = ()) -> Connection:
        """Return a new connection, on its way.

        Args:
            address: A literal address.
            port: The port.
            tried: Keys that were tried on this listener.

        Raises:
            TransportError: ``transport-failed``.
            ConfigurationError: ``invalid-endpoint``, ``invalid-key-file`` or ``insecure-key-file``.
        """
        self._refresh_keys()
        endpoint = endpoint_of(address, port)
        key = self._next_key(tried) or (self._security.server_key if self._security is not None else "")
        try:
            connection = Connection(self._context, endpoint, self._security, (*tried, key))
        except zmq.ZMQError as error:
            raise TransportError(
                "transport-failed", f"cannot connect to {endpoint}: {error.strerror}", errno=error.errno
            ) from error
        for each in (connection.socket, connection.monitor):
            self._poller.register(each, zmq.POLLIN)
            self._by_socket[each] = connection
        return connection

    def _refresh_keys(self) -> None:
        """Load changed key files, at most once a second."""
        if self._security is None or time.monotonic() < self._next_refresh_s:
            return
        self._next_refresh_s = time.monotonic() + _REFRESH_S
        with contextlib.suppress(
            ConfigurationError
        ):  # half written: the former keys go on, and are read again in a second
            self._security = self._security.refreshed()

    def discard(self, connection: Connection) -> None:
        """Forget a connection; `poll` closes it when there is time."""
        for each in (connection.socket, connection.monitor):
            del self._by_socket[each]
            self._poller.unregister(each)
        self._ended.append(connection)
        if len(self._ended) >= _MOST_ENDED:
            self._close_ended()

    def poll(self, timeout_s: float) -> tuple[list[Connection], list[Connection]]:
        """Wait until a connection is readable or changes, `wake` is called, or the time is over; it may return earlier.

        Returns:
            The connections with replies to read, and those for whose end `fault` has a code.
        """
        longest_ms = _CLOSING_MS if self._ended else _LONGEST_POLL_MS
        found = self._poller.poll(max(0, min(longest_ms, math.ceil(timeout_s * 1000))))
        if not found:
            self._close_ended()
        readable: list[Connection] = []
        ended: list[Connection] = []
        for each, _ in found:
            connection = self._by_socket.get(each)
            if connection is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif each is connection.socket:
                readable.append(connection)
            elif connection.fault():
                ended.append(connection)
        return readable, ended

    def flooded(self) -> list[Connection]:
        """Return the connections on which more has come in than was asked for: libzmq sets no limit to the frames of a reply."""
        return [each for each in dict.fromkeys(self._by_socket.values()) if each.is_flooded(self._grip)]

    def _close_ended(self) -> None:
        while self._ended:
            self._ended.pop().close()

    def wake(self) -> None:
        """Make a blocked `poll` return; from any thread, also after `close`."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Close all connections and the wake-up."""
        for connection in {*self._by_socket.values(), *self._ended}:
            connection.close()
        self._woken.close()
        self._waker.close()
        self._grip.close()
        self._context.destroy(linger=0)
