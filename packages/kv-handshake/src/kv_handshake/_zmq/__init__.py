"""The only subpackage that knows ZeroMQ: a listening socket, client connections and a poll over them, and CURVE keys."""

from __future__ import annotations

from kv_handshake._zmq._connections import NOTHING_TRIED, Connection, Tried
from kv_handshake._zmq._curve import generate_keypair
from kv_handshake._zmq._descriptors import most_connections
from kv_handshake._zmq._hub import Hub
from kv_handshake._zmq._key_files import write_keypair
from kv_handshake._zmq._keys import ClientSecurity, ServerSecurity
from kv_handshake._zmq._port import ListeningPort
from kv_handshake._zmq._router import Incoming, RouterSocket, TooManyFrames

__all__ = [
    "NOTHING_TRIED",
    "ClientSecurity",
    "Connection",
    "Hub",
    "Incoming",
    "ListeningPort",
    "RouterSocket",
    "ServerSecurity",
    "TooManyFrames",
    "Tried",
    "generate_keypair",
    "most_connections",
    "write_keypair",
]
