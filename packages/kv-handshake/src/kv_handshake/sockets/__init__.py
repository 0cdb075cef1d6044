"""The only subpackage that knows ZeroMQ: a listening socket, client connections and a poll over them, and CURVE keys."""

from __future__ import annotations

from kv_handshake.sockets.connections import NOTHING_TRIED, Connection, Tried
from kv_handshake.sockets.hub import Hub
from kv_handshake.sockets.keys import ClientSecurity, ServerSecurity, generate_keypair, write_keypair
from kv_handshake.sockets.router import Incoming, ListeningPort, RouterSocket, TooManyFrames
from kv_handshake.sockets.tcp import most_connections

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
