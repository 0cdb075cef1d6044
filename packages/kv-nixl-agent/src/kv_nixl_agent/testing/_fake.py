"""A fabric of in-process agents that moves real bytes and has NIXL's observed semantics, with faults on demand.

What is modelled, as measured with NIXL 1.5.1: merging needs both lists to ascend and strides equal to lengths;
empty, unequal or wrong indices are refused when a transfer is made; unregistered ranges when a list is prepared; a
peer's lists go stale when it is removed; a second agent of a known name is refused; a dead peer raises a
disconnect; a stopped peer leaves transfers in progress for ever; a completion notification leaves only when the
reader sees the end of its transfer; releasing an active transfer succeeds, and its data may still land later; a
peer that deregisters is not noticed; unloading the agent of a living process leaks its sockets on both sides.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, final

from kv_nixl_agent._errors import AgentError
from kv_nixl_agent.testing._fake_nixl import FakeNixl, FakeTransfer, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FakeFabric"]


@final
class FakeFabric:
    """Connects fake agents by name.

    Args:
        latency_polls: Polls that a transfer stays in progress after it was posted; 0 completes it while posting.
        has_late_writes: Whether data of a released active transfer still lands (`land_late_writes`), as over TCP.
        seed: Of the random faults.
    """

    def __init__(self, *, latency_polls: int = 1, has_late_writes: bool = True, seed: int = 0) -> None:
        self.latency_polls = latency_polls
        self.has_late_writes = has_late_writes
        self.random = random.Random(seed)  # noqa: S311 - reproducible faults, no secrets
        self.fault_rates: dict[str, float] = {}
        """Probability by fault: `post-error` and the like for each call, `disconnect`, `sticky-error`, `stall`,
        `drop-notification`."""
        self.agents_unloaded_alive = 0
        """Peers' agents that were unloaded while their process lived: each leaks its sockets."""
        self._agents: dict[str, FakeNixl] = {}
        self._incarnations = 0
        self._orphans: list[FakeTransfer] = []
        self._armed: deque[tuple[str, str]] = deque()

    def port(
        self,
        agent_name: str,
        backends: Sequence[tuple[str, Mapping[str, str]]],
        *,
        progress_thread: bool = True,  # noqa: ARG002 - the factory's signature
    ) -> FakeNixl:
        """Create an agent; this method is a `PortFactory`."""
        self._incarnations += 1
        agent = FakeNixl(self, agent_name, self._incarnations, {name: dict(given) for name, given in backends})
        self._agents[agent_name] = agent
        return agent

    def agent(self, name: str) -> FakeNixl:
        """Return the newest agent of that name."""
        return self._agents[name]

    def fail_next(self, call: str, code: str) -> None:
        """Let the next `call` (a port method's name) of any agent raise `code`."""
        self._armed.append((call, code))

    def land_late_writes(self) -> int:
        """Write the data of released active transfers; returns how many transfers landed."""
        landed = 0
        for transfer in list(self._orphans):
            if transfer.peer is None or not transfer.peer.is_stopped:
                self._orphans.remove(transfer)
                copy_bytes(transfer)
                landed += 1
        return landed

    def hit(self, call: str) -> None:
        """Raise an armed or random fault of a port call."""
        if self._armed and self._armed[0][0] == call:
            _, code = self._armed.popleft()
            raise AgentError(code, f"injected into {call}")
        rate = self.fault_rates.get(f"{call}-error", 0.0)
        if rate and self.random.random() < rate:
            raise AgentError("nixl-backend", f"random fault in {call}")

    def chance(self, fault: str) -> bool:
        """Whether a random fault happens now."""
        rate = self.fault_rates.get(fault, 0.0)
        return bool(rate) and self.random.random() < rate

    def find(self, name: str, incarnation: int) -> FakeNixl | None:
        """Return a living agent, None if it is dead or was restarted."""
        agent = self._agents.get(name)
        return agent if agent is not None and agent.incarnation == incarnation and not agent.is_dead else None

    def orphan(self, transfer: FakeTransfer) -> None:
        """Keep a released active transfer for a late write."""
        if self.has_late_writes:
            self._orphans.append(transfer)
