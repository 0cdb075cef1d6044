"""Memory registration and transfers through NIXL, off the engine's thread and safe against dying peers."""

from kv_nixl_agent.agent import TransferAgent
from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.binding import open_nixl, try_backends
from kv_nixl_agent.nixl.port import NixlPort, PortFactory
from kv_nixl_agent.options import AgentOptions, BackendOptions, ThreadOptions
from kv_nixl_agent.thread import TransferThread
from kv_nixl_agent.values import PeerSpec, QuarantineEntry, StallEntry, ThreadHealth, TransferOrder, TransferResult

__all__ = [
    "AgentError",
    "AgentOptions",
    "BackendOptions",
    "NixlPort",
    "PeerSpec",
    "PortFactory",
    "QuarantineEntry",
    "StallEntry",
    "ThreadHealth",
    "ThreadOptions",
    "TransferAgent",
    "TransferOrder",
    "TransferResult",
    "TransferThread",
    "open_nixl",
    "try_backends",
]

__version__ = "0.3.0"
