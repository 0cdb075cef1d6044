"""A poll over many client connections and a wake-up, for one thread."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import TYPE_CHECKING, Any, final

import zmq

from kv_handshake.errors import ConfigurationError, HandshakeError, TransportError
from kv_handshake.sockets.connections import NOTHING_TRIED, Connection, Tried
from kv_handshake.sockets.tcp import Grip, refuse_without_descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_handshake.sockets.keys import ClientSecurity

__all__ = ["Hub"]


_LONGEST_POLL_MS = 60_000
_UPKEEP_MS = 2
_REFRESH_S = 1.0
_MOST_ENDED = 32
"""Ended connections are closed, and the sockets of the next one made, when no event has come for so long, or when so many
wait: either takes as long as several replies (see ``tools/bench/handshake.py``)."""


@final
class Hub:
    """A poll over many connections and a wake-up, for one thread; only `wake` may be called from others.

    Raises:
        TransportError: ``transport-failed``: too few files may be opened.
    """

    def __init__(self, security: ClientSecurity | None = None) -> None:
        try:
            refuse_without_descriptors()
        except OSError as error:
            raise TransportError("transport-failed", f"cannot create a socket: {error.strerror}") from error
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._context.socket(zmq.PAIR).close()  # starts the context, while the descriptors are there
        self._security = security
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, Connection] = {}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._prepared: Connection | None = None
        self._ended: list[Connection] = []
        self._needs_upkeep = True
        self._next_refresh_s = 0.0
        self._grip = Grip()
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def next_try(self, connection: Connection) -> Tried | None:
        """Return the next try after an opening that the listener refused, or None if there is nothing left to try.

        Each key is tried, and then each once more: a listener may change its own pair between two tries, and ends openings when
        it does, or when it has too many. Without keys, the opening is tried once more, unless the connection was reset, which is
        reported as it is.

        Example: keys "new" and "old", and a listener that changes from "old" to "new" after it has refused "new". It refuses
        "old", too, and is asked with "new" again.
        """
        is_keyed_reset = connection.was_reset and self._security is not None
        if connection.fault() != "authentication-refused" and not is_keyed_reset:
            return None
        tried = connection.tried
        if not connection.was_reset and self._untried_key(tried.keys):
            return tried
        return None if tried.is_again else Tried(is_again=True)

    def _untried_key(self, tried: Sequence[str]) -> str:
        """Return the next key that a listener may have, empty if all were tried, or without encryption.

        A rotation adds and removes keys between two attempts, so the keys themselves are remembered, not their numbers.
        """
        known = self._security.server_keys if self._security is not None else ()
        return next((key for key in known if key not in tried), "")

    def open(self, address: str, port: int, tried: Tried = NOTHING_TRIED) -> Connection:
        """Return a new connection, on its way.

        Args:
            address: A literal address.
            port: The port.
            tried: Keys that the listener does not have; it must have the first of the others.

        Raises:
            TransportError: ``transport-failed``.
            ConfigurationError: ``invalid-endpoint``, ``invalid-key-file`` or ``insecure-key-file``.
        """
        self._refresh_keys()
        server_key = self._untried_key(tried.keys)
        try:
            if self._prepared is not None and self._prepared.server_key == server_key:
                connection, self._prepared = self._prepared, None
            else:
                connection = Connection(self._context, self._security, server_key)
            connection.tried = tried._replace(keys=(*tried.keys, connection.server_key))
            self._needs_upkeep = True
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

    def _refresh_keys(self) -> None:
        """Load changed key files, at most once a second."""
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
            del self._by_socket[each]
            self._poller.unregister(each)
        self._ended.append(connection)
        self._needs_upkeep = True
        if len(self._ended) >= _MOST_ENDED:
            self._do_upkeep()

    def poll(self, timeout_s: float) -> tuple[list[Connection], list[Connection]]:
        """Wait until a connection is readable or changes, `wake` is called, or the time is over; it may return earlier.

        Returns:
            The connections with replies to read, and those for whose end `fault` has a code.
        """
        longest_ms = _UPKEEP_MS if self._needs_upkeep else _LONGEST_POLL_MS
        found = self._poller.poll(max(0, min(longest_ms, math.ceil(timeout_s * 1000))))
        if self._needs_upkeep and not found:
            self._do_upkeep()
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
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Close all connections and the wake-up."""
        prepared = [self._prepared] if self._prepared is not None else []
        for connection in {*self._by_socket.values(), *self._ended, *prepared}:
            connection.close()
        self._woken.close()
        self._waker.close()
        self._grip.close()
        self._context.destroy(linger=0)
