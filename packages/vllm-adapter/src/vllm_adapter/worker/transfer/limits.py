"""Time limits and counts for reads and for the engines that are read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["PeerLimits", "ReadLimits"]


@final
@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Time limits for peers, and the connector version assumed of peers that announce none.

    Attributes:
        handshake_s: Longest wait of a read for its engine.
        engine_ttl_s: Time without use after which an engine is forgotten.
        probe_s: Interval between two probes of an engine that is not being read from.
        dialect: Connector version of peers whose tickets announce none.
        only_ours: Whether the configuration states that all peers run this connector; the names of a peer's agents must then
            begin with its engine id. Otherwise only peers that announce this connector's capabilities must meet that.
    """

    handshake_s: float
    engine_ttl_s: float
    dialect: int
    probe_s: float = 10.0
    only_ours: bool = False


@final
@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Time limits of a read, a lease and its renewal, the number of retries, and the limits of peers."""

    read_timeout_s: float
    lease_s: float
    renewed_s: float
    peers: PeerLimits
    retries: int = 1
