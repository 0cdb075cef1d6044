"""The listening side: a TCP port that is held for the listener's whole life, and a ROUTER on it with blocking receives.

ZeroMQ sockets come and go: one that broke, or that a hostile message holds up, is replaced. The port stays open meanwhile, so
that clients wait in its backlog instead of being refused, and no other process takes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import socket
import threading
import uuid
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kv_handshake.core.endpoint import endpoint_of
from kv_handshake.core.server import Incoming, Sender
from kv_handshake.errors import ConfigurationError, TransportError
from kv_handshake.sockets.connections import HIGH_WATER_MARK, NOBLOCK_AND_MORE, set_options
from kv_handshake.sockets.tcp import refuse_without_descriptors
from kv_handshake.sockets.watch import ConnectionWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kv_handshake.core.endpoint import Endpoint
    from kv_handshake.security import ServerSecurity

__all__ = ["ListeningPort", "RouterSocket", "TooManyFrames"]

_BACKLOG = 256


@final
class ListeningPort:
    """A bound and listening TCP port.

    Args:
        endpoint: Host and port to bind; port 0 takes any free one.

    Raises:
        TransportError: ``bind-failed``.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        host = "0.0.0.0" if endpoint.host == "*" else endpoint.host  # noqa: S104 - as the operator says
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            is_dual = host == "::" and socket.has_dualstack_ipv6()
            self._socket = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
        except OSError as error:
            raise _bind_failed(endpoint, error) from error
        self._socket.setblocking(False)
        bound = self._socket.getsockname()
        self.endpoint = endpoint_of(bound[0], bound[1])

    def descriptor(self) -> int:
        """Return a descriptor of the port for one ZeroMQ socket, which closes it."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        """Free the port, once the last ZeroMQ socket on it is closed too."""
        self._socket.close()


_MAX_INCOMING_BYTES = 128 * 1024
"""A longer frame closes its connection before it is in memory; shorter ones are refused with a code."""

_SHARED_FROM_BYTES = 1024
"""Replies that wait for their readers share the bytes of frames from here on: one then takes some 300 bytes more."""

_MOST_SHARED = 128
_RECEIVE_TIMEOUT_MS = 1000
_KNOWN_SENDERS = 4096
_MAX_FRAMES = 2
_MAX_SURPLUS_FRAMES = 1 << 20
"""So many empty frames are 2 MiB, more than comes in before the watch ends a connection that is so far ahead of its queries."""

_WAKER = Sender("", -1)
"""In-process: a call of `wake`."""


class TooManyFrames(Exception):  # noqa: N818 - a signal to the listener, not an error of this package
    """A message has more frames than could come in unnoticed; only a new socket gets rid of it without reading them all."""


_DOMAIN = "kv-handshake"
_MOST_REFUSED = 256
_ADDRESS_FRAME = 3
"""Index of the client's address in a ZAP request: version, request id, domain, address, identity, mechanism, key."""

_ZAP_VERSION = b"1.0"
_LET_IN = b"200"
_ID_BYTES = 16
"""Random bytes of a routing id, so that no peer can choose another's. The first byte is not zero, unlike in libzmq's own ids."""


@final
class ClientKeyCheck(ThreadAuthenticator):
    """Lets listed client keys in, on a thread of its own, and counts refusals by address and key.

    Each connection that is let in gets its routing id here, since libzmq accepts any id that a peer chooses. The id given here
    counts if it comes last, as it does except for 2 in 1000 connections to a machine without a free core (measured with
    libzmq 4.3.5).

    Args:
        context: The context of the listening socket.
        authorized: Name by public key in Z85.
        admits_any_client: Whether every key is let in.

    Attributes:
        refusals: Clients turned away so far, by address and key.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], authorized: Mapping[str, str], *, admits_any_client: bool = False
    ) -> None:
        super().__init__(context)  # pyright: ignore[reportUnknownMemberType]
        self._authorized = dict(authorized)
        self._admits_any_client = admits_any_client
        self.refusals: Counter[str] = Counter()
        self._client_address = ""
        self.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Note the client's address, which `callback` does not get, and answer the request."""
        self._client_address = msg[_ADDRESS_FRAME].decode("ascii", "replace") if len(msg) > _ADDRESS_FRAME else ""
        await super().handle_zap_message(msg)

    def admit(self, authorized: Mapping[str, str]) -> bool:
        """Let these clients in from now on; return whether one of the former ones is not among them."""
        former, self._authorized = self._authorized, dict(authorized)
        return not former.keys() <= authorized.keys()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the owner of a public key may connect."""
        del domain
        text = key.decode("ascii", "replace")
        if self._admits_any_client or text in self._authorized:
            return True
        client = f"{self._client_address} {text}"
        self.refusals[client if client in self.refusals or len(self.refusals) < _MOST_REFUSED else "others"] += 1
        return False

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str = "anonymous"
    ) -> None:
        """Answer a request, with the routing id of the connection."""
        name = user_id.encode("ascii", "replace") if status_code == _LET_IN else b""
        routing_id = b"\x01" + secrets.token_bytes(_ID_BYTES)
        metadata = b"\x08Identity" + len(routing_id).to_bytes(4, "big") + routing_id
        reply = [_ZAP_VERSION, request_id, status_code, status_text, name, metadata]
        self.zap_socket.send_multipart(reply)  # pyright: ignore[reportUnknownMemberType]


@final
class RouterSocket:
    """A socket on a listening port, used by one thread; only `wake` may be called from others.

    Args:
        port: The listening port.
        security: Keys of an encrypted side channel.
        report: Called on another thread with the cause and the address of each connection that was shut down, and with ``keys``
            and a text if key files cannot be read.
        closed: Called on another thread with the descriptor of each connection that has ended.

    Attributes:
        security: The keys as their files are now.
        is_outdated: Whether the listener's own keys have changed, so that a new socket is needed.

    Raises:
        TransportError: ``bind-failed``.
    """

    def __init__(
        self,
        port: ListeningPort,
        *,
        security: ServerSecurity | None = None,
        report: Callable[[str, str], None],
        closed: Callable[[int], None],
    ) -> None:
        endpoint = port.endpoint
        refuse_without_descriptors(
            "bind-failed", f"cannot listen on {endpoint}", host=endpoint.host, port=endpoint.port, errno=errno.EMFILE
        )
        self._context = zmq.Context()
        self._socket = _make_router(self._context)
        self._caller = self._context.socket(zmq.DEALER)
        self._caller_lock = threading.Lock()
        self._wakeup_url = f"inproc://wake-{uuid.uuid4().hex}"
        self._senders: OrderedDict[bytes, Sender] = OrderedDict()
        self._shared: dict[int, tuple[bytes, zmq.Frame]] = {}
        self._key_check: ClientKeyCheck | None = None
        self._key_problem = ""
        self._report = report
        self.security = security
        self.is_outdated = False
        self._watch: ConnectionWatch | None = None
        try:
            set_options(
                self._socket,
                (zmq.LINGER, 0),
                (zmq.MAXMSGSIZE, _MAX_INCOMING_BYTES),
                (zmq.RCVHWM, HIGH_WATER_MARK),
                (zmq.SNDHWM, HIGH_WATER_MARK),
                (zmq.RCVTIMEO, _RECEIVE_TIMEOUT_MS),
                (zmq.ROUTER_MANDATORY, 1),
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.IPV6, int(":" in endpoint.host)),
            )
            if security is not None:
                self._encrypt(security)
                self._refresh_keys()  # the files may have changed since they were read
            self._watch = ConnectionWatch(
                self._socket, endpoint.port, report=report, upkeep=self._refresh_keys, closed=closed
            )
            self._socket.setsockopt(zmq.USE_FD, port.descriptor())
            self._socket.bind(endpoint.url)
            self._socket.bind(self._wakeup_url)
            self._caller.connect(self._wakeup_url)
        except (zmq.ZMQError, OSError, RuntimeError) as error:  # also: no descriptor or thread left
            self.close()
            raise _bind_failed(endpoint, error) from error

    def receive(self) -> Incoming | None:
        """Return the next message, or None about once a second and when woken.

        Raises:
            TooManyFrames: The message goes on after 1 048 576 surplus frames.
        """
        try:
            identity = self._socket.recv()
            part = self._socket.recv(copy=False)  # a frame knows whether another one follows it
            sender = self._sender(identity, part)
            frames = [part.bytes]
            sender.queries += 1
            surplus = 0
            while part.more:
                part = self._socket.recv(copy=False)
                if len(frames) < _MAX_FRAMES:
                    frames.append(part.bytes)
                elif (surplus := surplus + 1) > _MAX_SURPLUS_FRAMES:
                    raise TooManyFrames(sender.address)
        except zmq.Again:
            return None
        if surplus or (len(frames) == _MAX_FRAMES and frames[0]):
            return Incoming((identity, b""), None, sender, surplus)
        if len(frames) == _MAX_FRAMES:
            return Incoming((identity, b""), frames[1], sender)
        return Incoming((identity,), frames[0], sender) if sender is not _WAKER else None

    def send(self, envelope: Sequence[bytes], frames: Iterable[bytes], *, is_shared: bool = True) -> bool:
        """Send a reply; return False if the peer is gone or does not read.

        Args:
            envelope: Frames that lead back to the asker.
            frames: The reply.
            is_shared: Whether other peers get the same frames: long ones then lie in memory once.
        """
        send = self._send if is_shared else self._socket.send
        try:
            # Not send_multipart, which looks at every part again.
            *first, last = (*envelope, *frames)
            for frame in first:
                send(frame, NOBLOCK_AND_MORE)
            send(last, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def _send(self, frame: bytes, flags: int) -> None:
        """Send a frame; long ones lie in memory once, however many replies wait for their readers."""
        if len(frame) < _SHARED_FROM_BYTES:
            self._socket.send(frame, flags)
            return
        known = self._shared.get(id(frame))
        if known is None or known[0] is not frame:
            if len(self._shared) >= _MOST_SHARED:
                self._shared.clear()
            known = self._shared[id(frame)] = (frame, zmq.Frame(frame, copy=True))
        self._socket.send(known[1], flags, copy=False)

    def wake(self) -> None:
        """Make a blocked `receive` return soon; from any thread."""
        with self._caller_lock, contextlib.suppress(zmq.ZMQError):
            self._caller.send(b"", zmq.NOBLOCK)

    def denied(self) -> Mapping[str, int]:
        """Return how often each client without an authorised key was turned away, by address and key."""
        return dict(self._key_check.refusals) if self._key_check is not None else {}

    def close(self) -> None:
        """Close the socket and everything that belongs to it."""
        if self._watch is not None:
            self._watch.close()
        if self._key_check is not None:
            self._key_check.stop()
        with self._caller_lock:  # no call is under way then, and later ones find a closed socket
            self._context.destroy(linger=0)

    def _encrypt(self, security: ServerSecurity) -> None:
        self._socket.curve_server = True
        self._socket.curve_publickey = security.public_key.encode("ascii")
        self._socket.curve_secretkey = security.secret_key.encode("ascii")
        self._socket.zap_domain = _DOMAIN.encode("ascii")
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._key_check = ClientKeyCheck(
            self._context, security.authorized, admits_any_client=security.admits_any_client
        )
        self._key_check.start()

    def _refresh_keys(self) -> bool:
        """Load changed key files; return whether open connections may include some that would no longer be admitted.

        Key files that cannot be read admit no client, since one of them may have been a revocation. Runs on the watch's
        thread.
        """
        former, check = self.security, self._key_check
        if former is None or check is None:
            return False
        try:
            self.security = former.refreshed()
        except ConfigurationError as error:
            if str(error) != self._key_problem:
                self._key_problem = str(error)
                self._report("keys", f"no new client is let in: {error}")
            return check.admit({})
        self._key_problem = ""
        if (self.security.public_key, self.security.secret_key) != (former.public_key, former.secret_key):
            self.is_outdated = True
        return check.admit(self.security.authorized)

    def _sender(self, identity: bytes, frame: zmq.Frame) -> Sender:
        """Return the connection that a message came from; a peer chooses its identity, even one that another had before."""
        try:
            descriptor = int(frame.get(zmq.SRCFD))
            known = self._senders.get(identity)
            if known is not None and known.descriptor == descriptor:
                return known
            is_req = frame.get("Socket-Type") == "REQ"
            sender = Sender(str(frame.get("Peer-Address")), descriptor, is_req=is_req)
        except zmq.ZMQError:
            return _WAKER
        if self._watch is not None:
            self._watch.note(sender)
        self._senders[identity] = sender
        if len(self._senders) > _KNOWN_SENDERS:
            self._senders.popitem(last=False)
        return sender


def _make_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a socket whose routing ids begin at a random number.

    libzmq counts from a `rand()` that it never seeds, and ends the process when its counter reaches an id that a peer has chosen.
    Later numbers of `rand()`, which others may show, tell nothing about this one.
    """
    seed = ctypes.CDLL(None).srand
    seed(secrets.randbits(32))
    try:
        return context.socket(zmq.ROUTER)
    finally:
        seed(secrets.randbits(32))


def _bind_failed(endpoint: Endpoint, error: Exception) -> TransportError:
    problem = getattr(error, "strerror", None) or error
    return TransportError(
        "bind-failed",
        f"cannot listen on {endpoint}: {problem}; is the port taken or the address not local?",
        host=endpoint.host,
        port=endpoint.port,
        errno=getattr(error, "errno", None),
    )
