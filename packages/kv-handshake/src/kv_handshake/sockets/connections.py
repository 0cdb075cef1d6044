"""Client connections.

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

import errno
import struct
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import zmq

from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.errors import TransportError
from kv_handshake.wire.limits import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from kv_handshake.sockets.keys import ClientSecurity
    from kv_handshake.sockets.tcp import Grip

__all__ = ["HIGH_WATER_MARK", "NOBLOCK_AND_MORE", "NOTHING_TRIED", "Connection", "Tried", "set_options"]

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
class Tried(NamedTuple):
    """Keys that a listener does not have, as its answers showed.

    Attributes:
        keys: The keys, in the order in which they were tried.
        is_again: Whether all of them are tried a second time.
    """

    keys: tuple[str, ...] = ()
    is_again: bool = False


NOTHING_TRIED: Final = Tried()


@final
class Connection:
    """A client connection to a listener; belongs to its hub's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        security: ClientSecurity | None,
        server_key: str = "",
    ) -> None:
        self.address = ""
        self.tried = Tried()
        """Keys that were tried on its listener, including this connection's own."""
        self.server_key = ""
        self.socket = context.socket(zmq.DEALER)
        self.is_open = False
        self.was_reset = False
        """Whether the listener's system had accepted it, and ended it before it was open."""
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
            self.server_key = server_key or security.server_key
            self.socket.curve_serverkey = self.server_key.encode("ascii")
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
                "transport-failed",
                f"cannot connect to {address} port {port}: {error.strerror}",
                errno=error.errno,
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
        return ends is not None and ends[1][1] == self._port  # else gone, and its number is another file's now

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
