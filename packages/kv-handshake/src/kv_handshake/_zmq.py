"""The only module that knows ZeroMQ: a listening socket, connections, and a poll over many of them.

The listener's socket is a ROUTER with blocking receives: between two messages it costs nothing, and a private in-
process endpoint wakes it. A client connection is a DEALER that speaks like a REQ (an empty first frame) but may send
ahead. It never reconnects by itself: replies are matched to queries by position, so a connection that broke must end
visibly. A monitor socket per connection reports that.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
import time
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, final

import zmq
import zmq.utils.z85

from kv_handshake._endpoint import tcp_url
from kv_handshake._errors import HandshakeError, TransportError
from kv_handshake._limits import MAX_REPLY_BYTES
from kv_handshake._transport import Doorbell, GuestList, Incoming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kv_handshake._keys import ClientSecurity, ServerSecurity

__all__ = ["Connection", "Hub", "RouterSocket", "generate_keypair"]

_MAX_INCOMING_BYTES = 1024 * 1024
"""A longer frame closes its connection before it is in memory; shorter ones are refused with a code."""

_HIGH_WATER_MARK = 256
"""Messages queued per peer. The transport counts what was read in halves of it, so half of it may be under way."""

_ONLY_CURRENT_ZMTP = b"kv-handshake"
"""A ZAP domain for plain client sockets. Without one, libzmq takes a web server for a ZeroMQ of before 2011, reads its
text as frames, and may deliver one as a reply. With one it hangs up on everything older than ZMTP 3.0. Nobody answers
for the domain in a client's context, so nothing else changes."""

_OPENING_MS = 30_000
"""A connection that is not open by then is given up: its peer says nothing, or is too busy to."""
_NOBLOCK_AND_MORE = zmq.NOBLOCK | zmq.SNDMORE
_QUIET_MS = 2
_MOST_RETIRED = 32
"""Sockets are closed, and those of the next connection made, when nothing has happened for so long, or so many wait."""
_RECEIVE_TIMEOUT_MS = 1000
_KNOWN_ADDRESSES = 4096
_MAX_FRAMES = 2
_MONITORED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def generate_keypair() -> tuple[str, str]:
    """Return a new CurveZMQ (public, secret) key pair in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


@final
class RouterSocket:
    """A bound listening socket, used by one thread; only `wake` may be called from others.

    Raises:
        TransportError: ``bind-failed``.
    """

    def __init__(self, host: str, port: int, *, security: ServerSecurity | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._doorbell = f"inproc://wake-{uuid.uuid4().hex}"
        self._addresses: OrderedDict[bytes, str] = OrderedDict()
        self._guests = GuestList(security.authorized if security is not None else {})
        self._gatekeeper: _Gatekeeper | None = None
        try:
            _set_options(
                self._socket,
                (zmq.LINGER, 0),
                (zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES),
                (zmq.RCVHWM, _HIGH_WATER_MARK),
                (zmq.SNDHWM, _HIGH_WATER_MARK),
                (zmq.RCVTIMEO, _RECEIVE_TIMEOUT_MS),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.IPV6, int(":" in host)),
            )
            if security is not None:
                self._socket.curve_server = True
                self._socket.curve_publickey = security.public_key.encode("ascii")
                self._socket.curve_secretkey = security.secret_key.encode("ascii")
                if security.authorized:
                    self._socket.zap_domain = b"kv-handshake"
                    self._gatekeeper = _Gatekeeper(self._context, self._guests)
            self._socket.bind(tcp_url(host, port))
            self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            self._socket.bind(self._doorbell)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                "bind-failed",
                f"cannot listen on {host} port {port}: {error.strerror}; is the port taken or the address not local?",
                host=host,
                port=port,
                errno=error.errno,
            ) from error

    def receive(self) -> Incoming | None:
        """Return the next message, or None about once a second and when woken."""
        try:
            identity = self._socket.recv()
            address = self._addresses.get(identity)
            if address is None:
                first = self._socket.recv(copy=False)
                address = self._remember(identity, first)
                frames = [first.bytes]
            else:
                frames = [self._socket.recv()]
            surplus = 0
            while self._socket.get(zmq.RCVMORE):
                part = self._socket.recv()
                if len(frames) < _MAX_FRAMES:
                    frames.append(part)
                else:
                    surplus += 1
        except zmq.Again:
            return None
        if surplus or (len(frames) == _MAX_FRAMES and frames[0]):
            return Incoming((identity, b""), None, address)
        if len(frames) == _MAX_FRAMES:
            return Incoming((identity, b""), frames[1], address)
        return Incoming((identity,), frames[0], address) if address else None

    def send(self, envelope: Sequence[bytes], frames: Iterable[bytes]) -> bool:
        """Send a reply; return False if the peer is gone or does not read."""
        try:
            # Not send_multipart, which looks at every part again.
            *first, last = (*envelope, *frames)
            for frame in first:
                self._socket.send(frame, _NOBLOCK_AND_MORE)
            self._socket.send(last, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def wake(self) -> None:
        """Make a blocked `receive` return soon; from any thread."""
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as bell:
            bell.setsockopt(zmq.LINGER, 200)
            bell.connect(self._doorbell)
            bell.send(b"", zmq.NOBLOCK)

    def denied(self) -> Mapping[str, int]:
        """Return how often each client without an authorised key was turned away, by address and key."""
        return self._guests.denied()

    def close(self) -> None:
        """Close the socket and everything that belongs to it."""
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.destroy(linger=0)

    def _remember(self, identity: bytes, frame: zmq.Frame) -> str:
        try:
            address = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return ""  # in-process: the doorbell
        self._addresses[identity] = address
        if len(self._addresses) > _KNOWN_ADDRESSES:
            self._addresses.popitem(last=False)
        return address


@final
class _Gatekeeper:
    """Answers ZeroMQ's question whether a client key may connect (ZAP 1.0), on a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], guests: GuestList) -> None:
        self._guests = guests
        self._closing = threading.Event()
        self._socket = context.socket(zmq.REP)
        _set_options(self._socket, (zmq.LINGER, 0), (zmq.RCVTIMEO, 100))
        self._socket.bind("inproc://zeromq.zap.01")
        self._thread = threading.Thread(target=self._run, name="kv-handshake-gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
            except zmq.Again:
                continue
            key = zmq.utils.z85.encode(credentials[0]).decode("ascii") if mechanism == b"CURVE" else ""
            name = self._guests.name_of(key, address.decode("ascii", "replace"))
            verdict = (b"400", b"key not authorized", b"") if name is None else (b"200", b"", name.encode())
            self._socket.send_multipart((version, request, *verdict, b""))
        self._socket.close(0)


@final
class Connection:
    """One client connection to one listener; belongs to its hub's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: ClientSecurity | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self._is_open = False
        self._fault = ""
        self._connected_s = 0.0
        _set_options(
            self.socket,
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_REPLY_BYTES),
            (zmq.RCVHWM, _HIGH_WATER_MARK),
            (zmq.SNDHWM, _HIGH_WATER_MARK),
            (zmq.RECONNECT_IVL, -1),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.HANDSHAKE_IVL, _OPENING_MS),
        )
        if security is None:
            self.socket.zap_domain = _ONLY_CURRENT_ZMTP
        else:
            self.socket.curve_publickey = security.public_key.encode("ascii")
            self.socket.curve_secretkey = security.secret_key.encode("ascii")
            self.socket.curve_serverkey = security.server_key.encode("ascii")
        self.monitor = self.socket.get_monitor_socket(_MONITORED)

    def connect(self, address: str, port: int) -> None:
        """Start to connect to a literal address.

        Raises:
            TransportError: ``transport-failed``.
        """
        try:
            self.socket.setsockopt(zmq.IPV6, int(":" in address))
            self._connected_s = time.monotonic()
            self.socket.connect(tcp_url(address, port))
        except zmq.ZMQError as error:
            raise TransportError(
                "transport-failed", f"cannot connect to {address} port {port}: {error.strerror}", errno=error.errno
            ) from error

    def send(self, query: bytes) -> None:
        """Queue a query; it leaves as soon as the connection stands.

        A connection that has ended already takes nothing; why it ended is for `fault` to say.

        Raises:
            TransportError: ``transport-failed``.
        """
        try:
            self.socket.send(b"", _NOBLOCK_AND_MORE)
            self.socket.send(query, zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise TransportError("transport-failed", f"cannot send a query: {error.strerror}") from error

    def receive(self) -> list[bytes] | None:
        """Return the frames of the next reply without the delimiter, at most a few, or None if none is there."""
        try:
            frames = [self.socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self.socket.get(zmq.RCVMORE):
            part = self.socket.recv()
            if len(frames) <= _MAX_FRAMES + 1:
                frames.append(part)
        return frames[1:] if not frames[0] else frames

    def fault(self) -> str:
        """Return why the connection ended, as a code, or nothing; takes one event, the hub's poll tells if there are more.

        Replies that came before the end stay readable.
        """
        if self._fault:
            return self._fault
        try:
            kind = int.from_bytes(self.monitor.recv(zmq.NOBLOCK)[:2], sys.byteorder)
            self.monitor.recv()  # the address, which is known
        except zmq.Again:
            return ""
        if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_open = True
        elif kind == zmq.EVENT_CLOSED:
            self._fault = "connection-refused"
        elif self._is_open or time.monotonic() - self._connected_s >= _OPENING_MS / 1e3:
            self._fault = "connection-lost"
        else:
            # One that ends before it is open has met wrong keys, or something that does not open like ZeroMQ.
            self._fault = "authentication-refused"
        return self._fault

    def close(self) -> None:
        """Close the connection."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


@final
class Hub:
    """A poll over many connections and a doorbell, for one thread; only `wake` may be called from others."""

    def __init__(self, security: ClientSecurity | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._security = security
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, Connection] = {}
        self._spare: Connection | None = None
        self._retired: list[Connection] = []
        self._has_chores = True
        self._doorbell = Doorbell()
        self._poller.register(self._doorbell.fileno(), zmq.POLLIN)

    def open(self, address: str, port: int) -> Connection:
        """Return a new connection, on its way.

        Raises:
            TransportError: ``transport-failed``.
        """
        try:
            connection = self._spare or Connection(self._context, self._security)
            self._spare, self._has_chores = None, True
        except zmq.ZMQError as error:
            raise TransportError("transport-failed", f"cannot create a socket: {error.strerror}") from error
        try:
            connection.connect(address, port)
        except HandshakeError:
            connection.close()
            raise
        for each in (connection.socket, connection.monitor):
            self._poller.register(each, zmq.POLLIN)
            self._by_socket[each] = connection
        return connection

    def discard(self, connection: Connection) -> None:
        """Forget a connection; it is closed in a quiet moment."""
        for each in (connection.socket, connection.monitor):
            self._poller.unregister(each)
            del self._by_socket[each]
        self._retired.append(connection)
        self._has_chores = True
        if len(self._retired) >= _MOST_RETIRED:
            self._tidy()

    def poll(self, timeout_s: float) -> tuple[list[Connection], list[Connection]]:
        """Wait until a connection has something to say, the doorbell rings or the time is over; at times not so long.

        Returns:
            The connections with replies to read, and those with a fault to look at.
        """
        timeout_ms = _QUIET_MS if self._has_chores and timeout_s * 1000 > _QUIET_MS else int(timeout_s * 1000) + 1
        readable: list[Connection] = []
        faulty: list[Connection] = []
        found = self._poller.poll(max(0, min(60_000, timeout_ms)))
        for each, _ in found:
            connection = self._by_socket.get(each)
            if connection is None:
                self._doorbell.hear()
            elif each is connection.socket:
                readable.append(connection)
            else:
                faulty.append(connection)
        if self._has_chores and not found:
            self._tidy()
        return readable, faulty

    def _tidy(self) -> None:
        """Do what takes as long as a few replies and can wait; once, also if it fails."""
        self._has_chores = False
        while self._retired:
            self._retired.pop().close()
        if self._spare is None:
            with contextlib.suppress(zmq.ZMQError):  # `open` will say why
                self._spare = Connection(self._context, self._security)

    def wake(self) -> None:
        """Make a blocked `poll` return; from any thread, also after `close`."""
        self._doorbell.ring()

    def close(self) -> None:
        """Close all connections and the doorbell."""
        for connection in {*self._by_socket.values(), *self._retired}:
            connection.close()
        self._doorbell.close()
        self._context.destroy(linger=0)


def _set_options(target: zmq.Socket[bytes], *options: tuple[int, int]) -> None:
    for name, value in options:
        target.setsockopt(name, value)
