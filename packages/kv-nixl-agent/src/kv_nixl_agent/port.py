"""The seam to NIXL: the Protocol that this package needs, and its implementation over the real library.

Pass another `PortFactory` to `TransferAgent` or `TransferThread` to replace NIXL, as `testing.FakeFabric.port` does.
"""

from ._bindings import open_nixl
from ._port import NixlPort, PortFactory, PortFeatures, WireTelemetry

__all__ = [
    "NixlPort",
    "PortFactory",
    "PortFeatures",
    "WireTelemetry",
    "open_nixl",
]
