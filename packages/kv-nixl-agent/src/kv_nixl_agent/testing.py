"""Test doubles: a fake NIXL that moves bytes and fails on demand, and a producer in a process of its own.

`FakeFabric` connects in-process agents; it moves real bytes and has NIXL's observed semantics, with faults on demand.

What is modelled, as measured with NIXL 1.5.1: merging needs both lists to ascend and strides equal to lengths;
empty, unequal or wrong indices are refused when a transfer is made; unregistered ranges when a list is prepared; a
peer's lists go stale when it is removed; a second agent of a known name is refused; a dead peer raises a
disconnect; a stopped peer leaves transfers in progress; a completion notification leaves only when the
reader sees the end of its transfer; releasing an active transfer succeeds, and its data may still land later; a
peer that deregisters is not noticed; unloading the agent of a living process leaks its sockets on both sides.
"""

from __future__ import annotations

import ctypes
import json
import random
from collections import deque
from typing import TYPE_CHECKING, cast, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.nixl.binding import expand_rows
from kv_nixl_agent.tools.producer import PeerProcess, page_pattern, stop_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.nixl.port import Handle, MemoryKind, Progress

__all__ = ["FakeFabric", "FakeNixl", "FakeTransfer", "PeerProcess", "page_pattern", "stop_process"]


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
        """Probability by fault: `post-error` and the like for each call, `disconnect`, `sticky-error`, `stall`."""
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


_HEAD = b"nixlSerDes|Agent"
_SOCKETS_PER_PEER = 5


@final
class _Prepared:
    def __init__(self, owner: str | None, incarnation: int, rows: npt.NDArray[np.uint64]) -> None:
        self.owner = owner
        self.incarnation = incarnation
        self.descriptors = expand_rows(rows)
        self.is_dense = bool((rows[:, 3] == rows[:, 1]).all())


@final
class FakeTransfer:
    """A transfer of one agent: the copies that it makes when it ends."""

    def __init__(self, peer: FakeNixl | None, copies: npt.NDArray[np.uint64], notification: bytes) -> None:
        self.peer = peer
        self.copies = copies  # (n, 3): source, target, length
        self.notification = notification
        self.polls_left = -1  # not posted
        self.is_done = False
        self.is_released = False
        self.failure = ""


@final
class FakeNixl:
    """`NixlPort` of one in-process agent."""

    def __init__(
        self, fabric: FakeFabric, name: str, incarnation: int, parameters: Mapping[str, Mapping[str, str]]
    ) -> None:
        self.name = name
        self.implementation = "fake"
        self.incarnation = incarnation
        self.is_dead = False
        self.is_stopped = False
        self._fabric = fabric
        self._parameters = parameters
        self._regions: dict[int, list[tuple[int, int, int, str]]] = {}
        self._next = 0
        self._peers: dict[str, tuple[int, list[tuple[int, int, int, str]]]] = {}
        self._inbox: deque[tuple[str, bytes]] = deque()
        self.sockets = 0
        """Sockets that connections to other agents hold, including leaked ones."""

    # Faults -----------------------------------------------------------------------------------------------------------

    def die(self) -> None:
        """Behave like a killed process towards everybody."""
        self.is_dead = True

    def stop(self) -> None:
        """Behave like a stopped process: nothing moves until `resume`."""
        self.is_stopped = True

    def resume(self) -> None:
        """Go on after `stop`."""
        self.is_stopped = False

    # Port -------------------------------------------------------------------------------------------------------------

    def register(self, kind: MemoryKind, ranges: npt.NDArray[np.uint64]) -> Handle:
        """Register memory."""
        self._live("register")
        self._next += 1
        self._regions[self._next] = [(int(a), int(n), int(d), kind) for a, n, d in ranges]
        return self._next

    def deregister(self, registration: Handle) -> None:
        """Undo a registration."""
        self._live("deregister")
        if self._regions.pop(cast("int", registration), None) is None:
            raise AgentError("nixl-not-found", "deregister: unknown registration")

    def agent_metadata(self) -> bytes:
        """Describe this agent."""
        self._live("agent_metadata")
        body = json.dumps([self.incarnation, [list(region) for region in self._all_regions()]]).encode()
        name = self.name.encode()
        return _HEAD + len(name).to_bytes(8, "little") + name + b"|Body" + len(body).to_bytes(8, "little") + body + b"|"

    def add_peer(self, agent_metadata: bytes) -> str:
        """Load a peer's metadata."""
        self._live("add_peer")
        try:
            start = len(_HEAD) + 8
            end = start + int.from_bytes(agent_metadata[len(_HEAD) : start], "little")
            name = agent_metadata[start:end].decode()
            incarnation, regions = json.loads(agent_metadata[end + 5 + 8 : -1])
        except (ValueError, OverflowError) as error:
            raise AgentError("nixl-mismatch", f"add_peer: {error}") from error
        known = self._peers.get(name)
        if known is not None and known[0] != incarnation:
            raise AgentError("nixl-not-allowed", f"add_peer: another agent {name!r} is known")
        if known is None:
            self._connect(name, incarnation, _SOCKETS_PER_PEER)
        self._peers[name] = (incarnation, [(a, n, d, k) for a, n, d, k in regions])
        return name

    def _connect(self, name: str, incarnation: int, sockets: int) -> None:
        peer = self._fabric.find(name, incarnation)
        self.sockets += sockets
        if peer is not None:
            peer.sockets += sockets

    def remove_peer(self, agent_name: str) -> None:
        """Forget a peer."""
        self._live("remove_peer")
        known = self._peers.pop(agent_name, None)
        if known is None:
            return
        if self._fabric.find(agent_name, known[0]) is None:
            self.sockets -= _SOCKETS_PER_PEER
        else:
            self._fabric.agents_unloaded_alive += 1

    def prepare(self, agent_name: str | None, kind: MemoryKind, rows: npt.NDArray[np.uint64]) -> Handle:
        """Prepare strided rows."""
        self._live("prepare")
        if agent_name is None:
            incarnation, regions = self.incarnation, self._all_regions()
        elif agent_name in self._peers:
            incarnation, regions = self._peers[agent_name]
        else:
            raise AgentError("nixl-not-found", f"prepare: no agent {agent_name!r}")
        prepared = _Prepared(agent_name, incarnation, rows)
        lines = prepared.descriptors
        inside = np.zeros(len(lines), dtype=bool)
        for address, length, device, region_kind in regions:
            if region_kind == kind:
                inside |= (
                    (lines[:, 0] >= address) & (lines[:, 0] + lines[:, 1] <= address + length) & (lines[:, 2] == device)
                )
        if not bool(inside.all()):
            raise AgentError("nixl-not-found", "prepare: rows outside registered memory")
        return prepared

    def release_prepared(self, prepared: Handle) -> None:
        """Release a prepared list."""
        self._live("release_prepared")
        if not isinstance(prepared, _Prepared):
            raise AgentError("nixl-invalid-param", "release_prepared: not a prepared list")

    def make(
        self,
        local: Handle,
        local_indices: npt.NDArray[np.int32],
        peer: Handle,
        peer_indices: npt.NDArray[np.int32],
        notification: bytes,
    ) -> Handle:
        """Make a transfer."""
        self._live("make")
        if not isinstance(local, _Prepared) or not isinstance(peer, _Prepared) or peer.owner is None:
            raise AgentError("nixl-invalid-param", "make: not a local and a peer list")
        if len(local_indices) != len(peer_indices) or not len(local_indices):
            raise AgentError("nixl-invalid-param", f"make: {len(local_indices)} against {len(peer_indices)} indices")
        for indices, side in ((local_indices, local), (peer_indices, peer)):
            if int(indices.min()) < 0 or int(indices.max()) >= len(side.descriptors):
                raise AgentError("nixl-invalid-param", "make: index out of range")
        known = self._peers.get(peer.owner)
        if known is None or known[0] != peer.incarnation:
            raise AgentError("nixl-not-found", f"make: stale list of {peer.owner!r}")
        mine, theirs = local.descriptors[local_indices], peer.descriptors[peer_indices]
        if bool((mine[:, 1] != theirs[:, 1]).any()):
            raise AgentError("nixl-mismatch", "make: lengths differ")
        copies = np.stack([theirs[:, 0], mine[:, 0], mine[:, 1]], axis=1)
        copies = _merge(copies) if local.is_dense and peer.is_dense else copies
        agent = self._fabric.find(peer.owner, peer.incarnation)
        return FakeTransfer(agent, copies, notification)

    def post(self, transfer: Handle) -> Progress:
        """Start a transfer."""
        self._live("post")
        transfer = _transfer_of(transfer)
        if transfer.polls_left >= 0 and not transfer.is_done:
            raise AgentError("nixl-active", "post: active already")
        transfer.is_done = False  # a transfer that has ended may be posted again
        transfer.polls_left = self._fabric.latency_polls
        if self._fabric.chance("stall"):
            transfer.polls_left += 50
        return self._advance(transfer)

    def check(self, transfer: Handle) -> Progress:
        """Ask for a posted transfer."""
        self._live("check")
        transfer = _transfer_of(transfer)
        if transfer.polls_left < 0:
            raise AgentError("nixl-not-posted", "check: never posted")
        transfer.polls_left = max(0, transfer.polls_left - 1)
        return self._advance(transfer)

    def _advance(self, transfer: FakeTransfer) -> Progress:
        if transfer.is_done:
            return "done"
        if not transfer.failure and self._fabric.chance("disconnect"):
            transfer.failure = "nixl-disconnected"
        if not transfer.failure and self._fabric.chance("sticky-error"):
            transfer.failure = "nixl-backend"
        peer = transfer.peer
        if not transfer.failure and (peer is None or peer.is_dead):
            transfer.failure = "nixl-disconnected"
        if transfer.failure or peer is None:
            raise AgentError(transfer.failure, "the transfer has failed, and NIXL says so for ever")
        if peer.is_stopped or transfer.polls_left:
            return "in-progress"
        copy_bytes(transfer)
        transfer.is_done = True
        if transfer.notification:
            peer.deliver(self.name, transfer.notification)
        return "done"

    def release(self, transfer: Handle) -> None:
        """Release a transfer; an active one may still write later."""
        self._live("release")
        transfer = _transfer_of(transfer)
        if transfer.polls_left >= 0 and not transfer.is_done and not transfer.failure and not transfer.is_released:
            self._fabric.orphan(transfer)
        transfer.is_released = True

    def backend(self, transfer: Handle) -> str:
        """Name the first back end, which carries everything."""
        _transfer_of(transfer)
        return next(iter(self._parameters), "")

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        """Take what came in."""
        self._live("notifications")
        taken: list[tuple[str, bytes]] = []
        while self._inbox:
            taken.append(self._inbox.popleft())
        return taken

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        """Send a notification."""
        self._live("send_notification")
        known = self._peers.get(agent_name)
        agent = None if known is None else self._fabric.find(agent_name, known[0])
        if agent is None:
            raise AgentError("nixl-not-found", f"send_notification: no agent {agent_name!r}")
        agent.deliver(self.name, payload)

    def close(self) -> None:
        """Leave the fabric."""
        self.is_dead = True

    def deliver(self, sender: str, payload: bytes) -> None:
        """Receive a notification."""
        self._inbox.append((sender, payload))

    def _all_regions(self) -> list[tuple[int, int, int, str]]:
        return [region for regions in self._regions.values() for region in regions]

    def _live(self, call: str) -> None:
        if self.is_dead:
            raise AgentError("agent-closed", f"{call}: the fake agent {self.name!r} is closed or dead")
        self._fabric.hit(call)


def _transfer_of(handle: Handle) -> FakeTransfer:
    if not isinstance(handle, FakeTransfer):
        raise AgentError("nixl-invalid-param", "not a transfer")
    return handle


def _merge(copies: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Join neighbours that follow each other on both sides."""
    ends = copies[:-1, :2] + copies[:-1, 2:]
    starts_run = np.concatenate(([True], (ends != copies[1:, :2]).any(axis=1)))
    first = np.flatnonzero(starts_run)
    lengths = np.add.reduceat(copies[:, 2], first)
    return np.stack([copies[first, 0], copies[first, 1], lengths], axis=1)


def copy_bytes(transfer: FakeTransfer) -> None:
    move: Callable[[int, int, int], object] = ctypes.memmove
    for source, target, length in transfer.copies.tolist():
        move(target, source, length)
