"""The side-channel protocol that lets two inference engines agree to move a KV cache.

This top level serves metadata, fetches it and encodes notifications. `kv_handshake.security` holds keys, `.inspect` looks at
engines by hand, `.testing` helps tests of other code.
"""

from kv_handshake.codec import Codec
from kv_handshake.core.handshake import Outcome, Timing
from kv_handshake.errors import ConfigurationError, HandshakeError, TransportError, WireError
from kv_handshake.net.client import Client
from kv_handshake.net.listener import Listener, QueryLimits
from kv_handshake.wire.dialects import dialect_of_vllm
from kv_handshake.wire.messages import AgentMetadata
from kv_handshake.wire.notifications import Notification
from kv_handshake.wire.policy import LocalOffer

__version__ = "0.3.0"

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
