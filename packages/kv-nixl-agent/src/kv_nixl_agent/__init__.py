"""Memory registration and transfers through NIXL, off the engine's thread and safe against dying peers."""

from ._agent import TransferAgent
from ._bindings import NixlBinding, available_plugins, find_nixl, open_nixl
from ._errors import ERROR_CODES, AgentError, ErrorFacts, Fault
from ._integrity import ChecksumTable, PageLayout, host_pages, page_check
from ._memory import CLOSED_GENERATION
from ._metadata import open_metadata, seal_metadata
from ._options import AgentOptions, BackendOptions, SyncMode, ThreadOptions
from ._port import Handle, MemoryKind, NixlPort, Operation, PortFactory, PortFeatures, Progress, WireTelemetry
from ._thread import ThreadHealth, TransferThread
from ._values import (
    MemoryRegion,
    Outcome,
    PageCheck,
    QuarantineEntry,
    StallEntry,
    TraceEvent,
    TransferOrder,
    TransferResult,
)

__all__ = [
    "CLOSED_GENERATION",
    "ERROR_CODES",
    "AgentError",
    "AgentOptions",
    "BackendOptions",
    "ChecksumTable",
    "ErrorFacts",
    "Fault",
    "Handle",
    "MemoryKind",
    "MemoryRegion",
    "NixlBinding",
    "NixlPort",
    "Operation",
    "Outcome",
    "PageCheck",
    "PageLayout",
    "PortFactory",
    "PortFeatures",
    "Progress",
    "QuarantineEntry",
    "StallEntry",
    "SyncMode",
    "ThreadHealth",
    "ThreadOptions",
    "TraceEvent",
    "TransferAgent",
    "TransferOrder",
    "TransferResult",
    "TransferThread",
    "WireTelemetry",
    "available_plugins",
    "find_nixl",
    "host_pages",
    "open_metadata",
    "open_nixl",
    "page_check",
    "seal_metadata",
]

__version__ = "0.2.0"
