"""The listening socket: a ROUTER with blocking receives.

Between two messages it costs nothing, and a private in-process endpoint wakes it.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, final

import zmq

from kv_handshake._errors import TransportError
from kv_handshake._zmq._curve import DOMAIN, ClientKeyCheck
from kv_handshake._zmq._options import HIGH_WATER_MARK, NOBLOCK_AND_MORE, set_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kv_handshake._zmq._keys import ServerSecurity
    from kv_handshake._zmq._port import ListeningPort

__all__ = ["Incoming", "RouterSocket", "TooManyFrames"]

_MAX_INCOMING_BYTES = 1024 * 1024
"""A longer frame closes its connection before it is in memory; shorter ones are refused with a code."""

_RECEIVE_TIMEOUT_MS = 1000
_KNOWN_ADDRESSES = 4096
_MAX_FRAMES = 2
_MAX_SURPLUS_FRAMES = 64
_NO_CLIENTS: Mapping[str, int] = MappingProxyType({})


class TooManyFrames(Exception):  # noqa: N818 - a signal to the listener, not an error of this package
    """A message has so many frames that reading them would keep others waiting; only a new socket gets rid of it."""


class Incoming(NamedTuple):
    """A message from a peer.

    Attributes:
        envelope: Frames that lead back to the sender: its identity, and the empty delimiter if it sent one.
        query: The query, or None if the message is not shaped like one.
        address: The sender's IP address.
    """

    envelope: tuple[bytes, ...]
    query: bytes | None
    address: str


@final
class RouterSocket:
    """A socket on a listening port, used by one thread; only `wake` may be called from others.

    Raises:
        TransportError: ``bind-failed``.
    """

    def __init__(self, port: ListeningPort, *, security: ServerSecurity | None = None) -> None:
        endpoint = port.endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._wakeup_url = f"inproc://wake-{uuid.uuid4().hex}"
        self._addresses: OrderedDict[bytes, str] = OrderedDict()
        self._key_check: ClientKeyCheck | None = None
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
            self._socket.setsockopt(zmq.USE_FD, port.descriptor())
            self._socket.bind(endpoint.url)
            self._socket.bind(self._wakeup_url)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(
                "bind-failed",
                f"cannot listen on {endpoint.host} port {endpoint.port}: {error.strerror}",
                host=endpoint.host,
                port=endpoint.port,
                errno=error.errno,
            ) from error

    def receive(self) -> Incoming | None:
        """Return the next message, or None about once a second and when woken.

        Raises:
            TooManyFrames: The message goes on after 64 surplus frames.
        """
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
                elif (surplus := surplus + 1) > _MAX_SURPLUS_FRAMES:
                    raise TooManyFrames(address)
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
                self._socket.send(frame, NOBLOCK_AND_MORE)
            self._socket.send(last, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def wake(self) -> None:
        """Make a blocked `receive` return soon; from any thread."""
        with contextlib.suppress(zmq.ZMQError), self._context.socket(zmq.DEALER) as caller:
            caller.setsockopt(zmq.LINGER, 200)
            caller.connect(self._wakeup_url)
            caller.send(b"", zmq.NOBLOCK)

    def denied(self) -> Mapping[str, int]:
        """Return how often each client without an authorised key was turned away, by address and key."""
        return self._key_check.denied() if self._key_check is not None else _NO_CLIENTS

    def close(self) -> None:
        """Close the socket and everything that belongs to it."""
        if self._key_check is not None:
            self._key_check.stop()
        self._context.destroy(linger=0)

    def _encrypt(self, security: ServerSecurity) -> None:
        self._socket.curve_server = True
        self._socket.curve_publickey = security.public_key.encode("ascii")
        self._socket.curve_secretkey = security.secret_key.encode("ascii")
        if security.authorized:
            self._socket.zap_domain = DOMAIN.encode("ascii")
            self._key_check = ClientKeyCheck(self._context, security.authorized)
            self._key_check.start()

    def _remember(self, identity: bytes, frame: zmq.Frame) -> str:
        try:
            address = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return ""  # in-process: a call of `wake`
        self._addresses[identity] = address
        if len(self._addresses) > _KNOWN_ADDRESSES:
            self._addresses.popitem(last=False)
        return address
