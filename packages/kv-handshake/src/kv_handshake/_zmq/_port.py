"""The TCP port of a listener, held for its whole life.

ZeroMQ sockets come and go: one that broke, or that a hostile message holds up, is replaced. The port stays open meanwhile, so
that clients wait in its backlog instead of being refused, and no other process takes it.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, final

from kv_handshake._endpoint import endpoint_of
from kv_handshake._errors import TransportError

if TYPE_CHECKING:
    from kv_handshake._endpoint import Endpoint

__all__ = ["ListeningPort"]

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
            raise TransportError(
                "bind-failed",
                f"cannot listen on {endpoint.host} port {endpoint.port}: {error.strerror}; is the port taken or the address "
                "not local?",
                host=endpoint.host,
                port=endpoint.port,
                errno=error.errno,
            ) from error
        self._socket.setblocking(False)
        bound = self._socket.getsockname()
        self.endpoint = endpoint_of(bound[0], bound[1])

    def descriptor(self) -> int:
        """Return a descriptor of the port for one ZeroMQ socket, which closes it."""
        return os.dup(self._socket.fileno())

    def close(self) -> None:
        """Free the port, once the last ZeroMQ socket on it is closed too."""
        self._socket.close()
