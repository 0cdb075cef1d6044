"""The protocol without input and output, for embedders with a transport of their own."""

from kv_handshake._dialect import dialect_of
from kv_handshake._queries import encode_query
from kv_handshake._server import ServerCore
from kv_handshake._session import ClientSession
from kv_handshake._states import state_diagram
from kv_handshake._stream import StreamReader, encode_stream

__all__ = [
    "ClientSession",
    "ServerCore",
    "StreamReader",
    "dialect_of",
    "encode_query",
    "encode_stream",
    "state_diagram",
]
