"""Stands for NIXL: one-sided reads that take time, tear, stall, fail late or land after they were given up.

Lists, memory checks and handles are those of `kv_nixl_agent.testing`'s fake; time, wires and deaths are the simulation's. A read
moves the first half of its bytes halfway through and the rest at its end, so a page that changes meanwhile is torn. A connection
that ended as disconnected stays so until the peer's agent is unloaded and loaded anew, as an endpoint of UCX does.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from network import damaged
from plan import FleetPlan
from world import Process, World

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.testing import FakeNixl, FakeTransfer

_RETRY_S = 0.05
_WORD_BYTES = 8
_PAYLOADS = {b"HB:": "heartbeat", b"KVH": "read complete"}
_CATCH_UP_S = 0.1
"""Longest time from the end of a stop until the notifications that came meanwhile are there."""


@final
class Fabric:
    """All agents of the world, by name and incarnation.

    Attributes:
        blocks_reads_of_stopped: Whether a stopped process stops reads of its memory, as over TCP; CMA goes on.
        notice_s: Longest time until the loss of a process is noticed.
        tears_words: Whether a read of several words may be torn, too.
        patience_s: How long a transfer waits for a cut link before it ends as disconnected.
    """

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.world: World = fleet.world
        plan: FleetPlan = fleet.plan.fleet
        self.blocks_reads_of_stopped, self.tears_words = plan.blocks_reads_of_stopped, plan.stream_slots > 0
        self.notice_s, self.patience_s = plan.notice_s, plan.patience_s
        self.agents: dict[str, SimNixl] = {}
        self.transfers: dict[SimTransfer, None] = {}
        self.latency_polls = 0
        self.agents_unloaded_alive = 0
        self._incarnations = 0

    def disconnect(self, reader: Process, owner: Process) -> None:
        """End the connection by which a process reads another one's memory, and all reads on it."""
        for transfer in list(self.transfers):
            if transfer.owner.process is reader and transfer.peer is not None and transfer.peer.process is owner:
                transfer.fail("nixl-disconnected")

    def hit(self, call: str) -> None:
        """Raise no fault of calls."""

    def chance(self, fault: str) -> bool:
        """Let no fault happen by polls."""
        return False

    def orphan(self, transfer: FakeTransfer) -> None:
        """Do nothing: what was released goes on by itself."""

    def find(self, name: str, incarnation: int) -> FakeNixl | None:
        """Return an agent that lives."""
        agent = self.agents.get(name)
        return agent.inner if agent is not None and agent.inner.incarnation == incarnation and agent.is_alive else None

    def port(
        self, agent_name: str, backends: Sequence[tuple[str, Mapping[str, str]]], *, progress_thread: bool
    ) -> SimNixl:
        """Make the agent of the running process."""
        self._incarnations += 1
        process = self.world.current
        assert process is not None
        fabric: Any = self
        inner = FakeNixl(fabric, agent_name, self._incarnations, {name: dict(given) for name, given in backends})
        agent = self.agents[agent_name] = SimNixl(self, process, inner)
        agent.moved = self.fleet.counter_of(process) if self.tears_words else None
        return agent


@final
class SimTransfer:
    """A transfer on its way."""

    def __init__(self, owner: SimNixl, inner: FakeTransfer, peer_name: str) -> None:
        self.owner, self.inner, self.peer_name = owner, inner, peer_name
        self.copies: list[list[int]] = (
            _torn(inner.copies.tolist()) if owner.fabric.tears_words else inner.copies.tolist()
        )
        self.peer: SimNixl | None = owner.fabric.agents.get(peer_name) if inner.peer is not None else None
        self.is_posted = self.is_done = self.is_seen = False
        self.failure = ""
        self.moved = 0
        self.waited_s = 0.0

    @property
    def content(self) -> str:
        """Kind of memory that is read, in words: a word (a fence, a probe) or pages."""
        size, source = sum(copy[2] for copy in self.copies), self.peer_name.split("/")[0]
        return f"a word of {source}" if size == _WORD_BYTES else f"{size} bytes of {source}"

    @property
    def is_on_the_wire(self) -> bool:
        """Whether it may still write."""
        return self.is_posted and not self.is_done and not self.failure

    def step(self) -> None:
        """Go on: halfway, or to the end, or wait, or fail."""
        fabric, peer = self.owner.fabric, self.peer
        if not self.is_on_the_wire or not self.owner.is_alive:
            fabric.transfers.pop(self, None)
            return
        if peer is None or not peer.is_alive:
            draw = fabric.world.random(f"notice {self.owner.process.name}")
            fabric.world.after(draw.random() * fabric.notice_s, lambda: self.fail("nixl-disconnected"))
            return
        network, here, there = fabric.fleet.network, self.owner.process.name, peer.process.name
        is_cut = network.link(here, there).is_cut or network.link(there, here).is_cut
        if is_cut or (peer.process.is_stopped and fabric.blocks_reads_of_stopped):
            self.waited_s += _RETRY_S
            if self.waited_s > fabric.patience_s and is_cut:
                self.fail("nixl-disconnected")
            else:
                fabric.world.after(_RETRY_S, self.step)
            return
        if self.moved == 0 and len(self.copies) > 1:
            self._move(len(self.copies) // 2)
            fabric.world.note(here, f"half is read: {self.content}")
            fabric.world.after(network.delay_s(there, here, "read"), self.step)
            return
        self._move(len(self.copies))
        fabric.world.note(here, f"read ends: {self.content}")
        self.is_done = True
        fabric.transfers.pop(self, None)

    def _move(self, until: int) -> None:
        for process in (self.owner.process, self.peer.process if self.peer is not None else None):
            if process is not None and process.is_asleep:
                self.owner.fabric.world.violated(
                    "unmapped", f"{process.name}: a read touches memory that was given back"
                )
        for source, target, length in self.copies[self.moved : until]:
            ctypes.memmove(target, source, length)
        if self.owner.moved is not None:
            self.owner.moved(self.copies[self.moved : until])
        self.moved = until

    def fail(self, code: str) -> None:
        """End it with an error, unless it is over."""
        if self.is_on_the_wire:
            self.failure = code
            self.owner.broken.add(self.peer_name)
            self.owner.fabric.transfers.pop(self, None)


def _torn(copies: list[list[int]]) -> list[list[int]]:
    """Return a read of one run of words as two, so that it may be torn between them.

    Example: 64 bytes from 1000 to 2000 are 32 from 1000 to 2000 and 32 from 1032 to 2032.
    """
    if len(copies) != 1 or copies[0][2] < 2 * _WORD_BYTES:
        return copies
    source, target, size = copies[0]
    half = size // (2 * _WORD_BYTES) * _WORD_BYTES
    return [[source, target, half], [source + half, target + half, size - half]]


@final
class SimNixl:
    """The port of one agent.

    Attributes:
        broken: Agents whose connection has ended as disconnected and that were not unloaded since.
        moved: Called with the copies that a read of its has made, if there is something.
        unloaded_alive: Agents of living processes that were unloaded over a good connection; with real NIXL that leaks sockets.
    """

    def __init__(self, fabric: Fabric, process: Process, inner: FakeNixl) -> None:
        self.fabric, self.process, self.inner = fabric, process, inner
        self.name, self.implementation = inner.name, inner.implementation
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.is_closed = False
        self.handles: dict[object, str] = {}
        self.register, self.deregister = inner.register, inner.deregister
        self.agent_metadata, self.add_peer = inner.agent_metadata, inner.add_peer
        self.prepare, self.release_prepared = inner.prepare, inner.release_prepared
        self.broken: set[str] = set()
        self.unloaded_alive: list[str] = []
        self.moved: Any = None

    @property
    def is_alive(self) -> bool:
        """Whether its process lives and it is open."""
        return not self.is_closed and not self.process.is_dead

    def make(self, local: Any, local_indices: Any, peer: Any, peer_indices: Any, notification: bytes) -> SimTransfer:
        inner = self.inner.make(local, local_indices, peer, peer_indices, notification)
        assert isinstance(inner, FakeTransfer)
        transfer = SimTransfer(self, inner, peer.owner)
        self.handles[transfer] = peer.owner
        return transfer

    def remove_peer(self, agent_name: str) -> None:
        """Unload an agent; a connection to it is made anew afterwards."""
        known = self.inner._peers.get(agent_name)
        if known is not None and agent_name not in self.broken and self.fabric.find(agent_name, known[0]) is not None:
            self.unloaded_alive.append(agent_name)
        self.inner.remove_peer(agent_name)
        self.broken.discard(agent_name)

    def post(self, transfer: SimTransfer) -> str:
        if transfer.is_seen:  # a handle may be posted again once it is done
            transfer.is_done = transfer.is_seen = False
            transfer.moved, transfer.waited_s = 0, 0.0
        transfer.is_posted = True
        if transfer.peer_name in self.broken:
            transfer.failure = "nixl-disconnected"
            return "in-progress"
        self.fabric.transfers[transfer] = None
        there = transfer.peer.process.name if transfer.peer is not None else ""
        size = sum(copy[2] for copy in transfer.copies)
        self.fabric.world.note(self.process.name, f"read begins: {transfer.content}")
        delay_s = self.fabric.fleet.network.delay_s(there, self.process.name, "read", size)
        self.fabric.world.after(delay_s, transfer.step)
        return "in-progress"

    def check(self, transfer: SimTransfer) -> str:
        if transfer.failure:
            raise AgentError(transfer.failure, "the transfer has failed")
        if not transfer.is_done:
            return "in-progress"
        if not transfer.is_seen:
            transfer.is_seen = True
            if transfer.inner.notification and transfer.peer is not None:
                self._notify(transfer.peer, transfer.inner.notification)
        return "done"

    def release(self, transfer: SimTransfer) -> None:
        self.handles.pop(transfer, None)

    def backend(self, transfer: SimTransfer) -> str:
        return self.inner.backend(transfer.inner)

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        known = self.inner._peers.get(agent_name)
        agent = self.fabric.agents.get(agent_name)
        if known is None or agent is None or agent.inner.incarnation != known[0] or not agent.is_alive:
            raise AgentError("nixl-not-found", f"send_notification: no agent {agent_name!r}")
        if agent_name in self.broken:
            raise AgentError("nixl-disconnected", f"send_notification: agent {agent_name!r} is disconnected")
        self._notify(agent, payload)

    def _notify(self, peer: SimNixl, payload: bytes) -> None:
        fabric, network = self.fabric, self.fabric.fleet.network
        here, there = self.process.name, peer.process.name
        link, draw = network.link(here, there), network.draws(here, there, "notification faults")
        if link.is_cut or draw.random() < link.loss:
            fabric.fleet.fault("notification-loss")
            return
        if draw.random() < link.damage:
            fabric.fleet.fault("notification-damage")
            payload = damaged(payload, draw)
        copies = 1
        if draw.random() < link.doubling:
            fabric.fleet.fault("notification-doubling")
            copies = 2
        for _ in range(copies):
            delay_s = network.delay_s(here, there, "notification")
            text = _PAYLOADS.get(payload[:3], "notification")
            fabric.world.note(here, text, there, fabric.world.time_s + delay_s)
            fabric.world.after(delay_s, lambda: peer.deliver(self.name, payload))

    def deliver(self, sender: str, payload: bytes) -> None:
        """Take a notification in; in a stopped process it waits in the transport until NIXL's thread runs again."""
        if not self.is_alive:
            return
        if not self.process.is_stopped:
            self.inbox.append((sender, payload))
            return
        world = self.fabric.world
        wait_s = _CATCH_UP_S * world.random(f"catch up {self.name}").random()
        world.after(0.0, lambda: world.after(wait_s, lambda: self.deliver(sender, payload)), self.process)

    def close(self) -> None:
        self.is_closed = True
        self.inner.is_dead = True
        self.unloaded_alive.clear()  # everything is unloaded before the end
        for transfer in [one for one in self.fabric.transfers if one.owner is self]:
            self.fabric.transfers.pop(transfer)
