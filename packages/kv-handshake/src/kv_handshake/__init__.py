"""The side-channel protocol that lets two inference engines agree to move a KV cache.

This top level serves metadata, fetches it and encodes notifications. `kv_handshake.security` holds keys, `.inspect` looks at
engines by hand, `.testing` helps tests of other code.
"""

from kv_handshake._client import Client
from kv_handshake._codec import Codec
from kv_handshake._dialect import dialect_of_vllm
from kv_handshake._errors import ConfigurationError, HandshakeError, TransportError, WireError
from kv_handshake._listener import Listener, QueryLimits
from kv_handshake._messages import AgentMetadata
from kv_handshake._notifications import Notification
from kv_handshake._outcome import Outcome
from kv_handshake._policy import LocalOffer
from kv_handshake._timing import Timing

__version__ = "0.2.0"

__all__ = [
    "AgentMetadata",
    "Client",
    "Codec",
    "ConfigurationError",
    "HandshakeError",
    "Listener",
    "LocalOffer",
    "Notification",
    "Outcome",
    "QueryLimits",
    "Timing",
    "TransportError",
    "WireError",
    "dialect_of_vllm",
]
