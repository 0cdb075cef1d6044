"""The seam to NIXL: the Protocol that this package needs, and its implementation over the real library.

Pass another `PortFactory` to `TransferAgent` or `TransferThread` to replace NIXL, as `testing.FakeFabric.port` does.
"""

from ._bindings import open_nixl
from ._port import Handle, MemoryKind, NixlPort, Operation, PortFactory, PortFeatures, Progress, WireTelemetry

__all__ = [
    "Handle",
    "MemoryKind",
    "NixlPort",
    "Operation",
    "PortFactory",
    "PortFeatures",
    "Progress",
    "WireTelemetry",
    "open_nixl",
]
