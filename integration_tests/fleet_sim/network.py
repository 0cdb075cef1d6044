"""The network between processes: delays, losses, one-way partitions, slow peers.

Every link is directed, from one engine's slot to another's. A partition of A -> B alone lets B's messages reach A.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import final

from world import World

LINK_KINDS = {"cut": "is_cut", "slow": "slowness", "loss": "loss", "doubling": "doubling", "damage": "damage"}
"""Kinds of faults of a link, and what each changes."""

_MESSAGE_BYTES_PER_S = 1e7


@final
@dataclass(slots=True)
class Link:
    """Conditions from one slot to another.

    Attributes:
        is_cut: Nothing passes; transfers wait, messages are lost or wait.
        slowness: Delays are multiplied by this.
        loss, doubling, damage: Probability of each per message.
    """

    is_cut: bool = False
    slowness: float = 1.0
    loss: float = 0.0
    doubling: float = 0.0
    damage: float = 0.0


@final
@dataclass(slots=True)
class Network:
    """All links, and the delays that they draw."""

    world: World
    base_s: float
    bytes_per_s: float
    links: dict[tuple[str, str], Link] = field(default_factory=dict[tuple[str, str], Link])
    spent_s: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """All delays that were drawn for a link so far."""

    def link(self, source: str, target: str) -> Link:
        """Return the conditions from a slot to another."""
        return self.links.setdefault((source, target), Link())

    def draws(self, source: str, target: str, purpose: str) -> random.Random:
        """Return the random numbers of a link."""
        return self.world.random(f"{purpose} {source}>{target}")

    def delay_s(self, source: str, target: str, purpose: str, size_bytes: int = 0) -> float:
        """Draw how long so many bytes take."""
        draw = self.draws(source, target, purpose)
        latency_s = self.base_s * (0.5 + draw.random()) * (10.0 if draw.random() < 0.02 else 1.0)
        rate = self.bytes_per_s if purpose == "read" else _MESSAGE_BYTES_PER_S
        delay_s = self.link(source, target).slowness * (latency_s + size_bytes / rate)
        self.spent_s[source, target] = self.spent_s.get((source, target), 0.0) + delay_s
        return delay_s

    def heal(self) -> None:
        """End all bad conditions."""
        self.links.clear()


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a bit changed, or cut off."""
    if not data:
        return b"\x00"
    at = draw.randrange(len(data))
    if draw.random() < 0.3:
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
