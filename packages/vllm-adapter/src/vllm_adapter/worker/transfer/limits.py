"""Durations and counts that bound reads and the engines they are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

__all__ = ["PeerLimits", "ReadLimits"]


@final
@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Durations, and the connector version assumed of peers that do not say theirs.

    Attributes:
        handshake_s: Longest wait of a read for its engine.
        engine_ttl_s: Time after which an unused engine is forgotten.
        probe_s: Time between two probes of an engine that is not read from.
        dialect: Connector version of peers whose tickets do not say.
        only_ours: Whether every peer is of our own kind, by configuration: its agents' names must begin with its engine id. Of
            others only those are held to it that announce what our kind can do.
    """

    handshake_s: float
    engine_ttl_s: float
    dialect: int
    probe_s: float = 10.0
    only_ours: bool = False


@final
@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Durations that bound a read, a lease and its renewal, how often a read is made again, and the limits of peers."""

    read_timeout_s: float
    lease_s: float
    renewed_s: float
    peers: PeerLimits
    retries: int = 1
