"""The only subpackage that knows ZeroMQ: a listening socket, client connections and a poll over them, and CURVE keys."""

from __future__ import annotations

from kv_handshake._zmq._connections import Connection, Hub
from kv_handshake._zmq._curve import generate_keypair, read_certificate
from kv_handshake._zmq._router import RouterSocket, TooManyFrames

__all__ = ["Connection", "Hub", "RouterSocket", "TooManyFrames", "generate_keypair", "read_certificate"]
