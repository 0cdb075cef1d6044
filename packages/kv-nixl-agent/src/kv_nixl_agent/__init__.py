"""Memory registration and transfers through NIXL, off the engine's thread and safe against dying peers."""

from ._agent import TransferAgent
from ._errors import AgentError
from ._health import ThreadHealth
from ._options import AgentOptions, BackendOptions, ThreadOptions
from ._thread import TransferThread
from ._values import PeerSpec, QuarantineEntry, StallEntry, TraceEvent, TransferOrder, TransferResult

__all__ = [
    "AgentError",
    "AgentOptions",
    "BackendOptions",
    "PeerSpec",
    "QuarantineEntry",
    "StallEntry",
    "ThreadHealth",
    "ThreadOptions",
    "TraceEvent",
    "TransferAgent",
    "TransferOrder",
    "TransferResult",
    "TransferThread",
]

__version__ = "0.2.0"
