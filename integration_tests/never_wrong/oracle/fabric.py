"""A small NIXL in numpy: agents with address spaces of their own, one-sided reads, notifications. Implements `NixlPort`.

Each agent is a process of its own: the same address may mean different memory in two agents, and only registered memory can be
reached. A rank's cache is an array at an invented address; anything else (the fence array) is this process's real memory.
A posted read moves its bytes after a few polls, drawn from the case's seed, all at once.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_nixl_agent import AgentError
from oracle.memory import RankMemory

Array = np.ndarray[Any, Any]
_MAGIC = b"never-wrong "


@dataclass
class Fabric:
    """Finds agents by name and counts the bytes that moved."""

    random: random.Random
    most_polls: int = 2
    agents: dict[str, NumpyPort] = field(default_factory=dict)
    bytes_moved: int = 0
    blips: int = 0
    """Reads of pages that are still to fail as if their peer had gone, which it has not."""

    def factory(self, memory: RankMemory) -> Any:
        """Return the port factory of a rank."""

        def make(agent_name: str, _: object, **__: object) -> NumpyPort:
            port = NumpyPort(self, agent_name, memory)
            self.agents[agent_name] = port
            return port

        return make


@dataclass
class _List:
    owner: str
    kind: str
    address: NDArray[np.uint64]
    length: NDArray[np.uint64]


@dataclass
class _Transfer:
    peer: str
    here: tuple[_List, NDArray[np.int32]]
    there: tuple[_List, NDArray[np.int32]]
    notification: bytes
    polls: int = -1
    is_done: bool = False


@dataclass(frozen=True)
class _Features:
    implementation: str = "numpy"
    strided_rows: bool = True
    telemetry: bool = False
    backends: tuple[str, ...] = ("UCX",)
    backend_parameters: Any = field(default_factory=dict)


class NumpyPort:
    """An agent."""

    features = _Features()

    def __init__(self, fabric: Fabric, name: str, memory: RankMemory) -> None:
        self.fabric, self.name, self.memory = fabric, name, memory
        self.regions: dict[int, list[tuple[int, int, str, Array]]] = {}
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.known: set[str] = set()
        self.is_closed = False

    # ------------------------------------------------------------------------------------------------------ memory

    def register(self, kind: str, ranges: NDArray[np.uint64]) -> object:
        handle = len(self.regions) + 1
        self.regions[handle] = [(int(a), int(a) + int(n), kind, self._bytes(int(a), int(n))) for a, n, _ in ranges]
        return handle

    def _bytes(self, address: int, length: int) -> Array:
        base, data = self.memory.base, self.memory.data
        if base <= address < base + len(data):
            if address + length > base + len(data):
                raise AgentError("nixl-invalid-param", f"{address:#x}+{length} ends outside the cache")
            return data[address - base : address - base + length]
        return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))

    def deregister(self, registration: object) -> None:
        assert isinstance(registration, int)
        del self.regions[registration]

    def spot(self, address: int, length: int, kind: str) -> Array:
        """Return registered bytes, or raise what NIXL raises."""
        for ranges in self.regions.values():
            for start, stop, region_kind, data in ranges:
                if region_kind == kind and start <= address and address + length <= stop:
                    return data[address - start : address - start + length]
        raise AgentError("nixl-not-found", f"{self.name}: {kind} {address:#x}+{length} is not registered")

    # ------------------------------------------------------------------------------------------------------- peers

    def agent_metadata(self) -> bytes:
        return b"nixlSerDes|Agent" + len(self.name).to_bytes(8, "little") + self.name.encode() + b"|"

    def add_peer(self, agent_metadata: bytes) -> str:
        length = int.from_bytes(agent_metadata[16:24], "little")
        name = agent_metadata[24 : 24 + length].decode()
        if name not in self.fabric.agents:
            raise AgentError("nixl-mismatch", f"no agent {name!r}")
        self.known.add(name)
        return name

    def remove_peer(self, agent_name: str) -> None:
        self.known.discard(agent_name)

    def prepare(self, agent_name: str | None, kind: str, rows: NDArray[np.uint64]) -> object:
        owner = self if agent_name is None else self.fabric.agents[agent_name]
        counts = rows[:, 4].astype(np.int64)
        number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        address = np.repeat(rows[:, 0], counts) + np.repeat(rows[:, 3], counts) * number.astype(np.uint64)
        for first, length, _, stride, count in rows.tolist():
            if count:
                owner.spot(first, stride * (count - 1) + length, kind)
        return _List(owner.name, kind, address, np.repeat(rows[:, 1], counts))

    def release_prepared(self, prepared: object) -> None:
        assert isinstance(prepared, _List)

    # --------------------------------------------------------------------------------------------------- transfers

    def make(
        self, local: object, local_indices: NDArray[np.int32], peer: object, peer_indices: NDArray[np.int32],
        notification: bytes,
    ) -> object:  # fmt: skip
        assert isinstance(local, _List)
        assert isinstance(peer, _List)
        if len(local_indices) != len(peer_indices) or not len(local_indices):
            raise AgentError("nixl-invalid-param", f"{len(local_indices)} against {len(peer_indices)} indices")
        for indices, prepared in ((local_indices, local), (peer_indices, peer)):
            if int(indices.min()) < 0 or int(indices.max()) >= len(prepared.address):
                raise AgentError("nixl-invalid-param", "an index is out of range")
        if (local.length[local_indices] != peer.length[peer_indices]).any():
            raise AgentError("nixl-mismatch", "lengths differ")
        return _Transfer(peer.owner, (local, local_indices), (peer, peer_indices), notification)

    def post(self, transfer: object) -> str:
        assert isinstance(transfer, _Transfer)
        transfer.polls = self.fabric.random.randint(0, self.fabric.most_polls)
        return self._move(transfer)

    def check(self, transfer: object) -> str:
        assert isinstance(transfer, _Transfer)
        transfer.polls -= 1
        return self._move(transfer)

    def _move(self, transfer: _Transfer) -> str:
        if transfer.is_done:
            return "done"
        if transfer.polls > 0:
            return "in-progress"
        owner = self.fabric.agents[transfer.peer]
        if owner.is_closed:
            raise AgentError("nixl-disconnected", "the peer's agent is closed")
        (here, mine), (there, theirs) = transfer.here, transfer.there
        if self.fabric.blips and self._is_cache(here) and self.fabric.random.random() < 0.5:
            self.fabric.blips -= 1
            raise AgentError("nixl-disconnected", "a blip: the peer's agent seems to be gone")
        targets, sources, lengths = (
            here.address[mine].tolist(),
            there.address[theirs].tolist(),
            here.length[mine].tolist(),
        )
        for target, source, length in zip(targets, sources, lengths, strict=True):
            self.spot(target, length, here.kind)[:] = owner.spot(source, length, there.kind)
        self.fabric.bytes_moved += sum(lengths)
        transfer.is_done = True
        if transfer.notification:
            owner.inbox.append((self.name, transfer.notification))
        return "done"

    def _is_cache(self, prepared: _List) -> bool:
        first = int(prepared.address[0])
        return self.memory.base <= first < self.memory.base + len(self.memory.data)

    def release(self, transfer: object) -> None:
        assert isinstance(transfer, _Transfer)

    def telemetry(self, transfer: object) -> None:
        return None

    def notifications(self) -> Sequence[tuple[str, bytes]]:
        return [self.inbox.popleft() for _ in range(len(self.inbox))]

    def send_notification(self, agent_name: str, payload: bytes) -> None:
        if agent_name not in self.known:
            raise AgentError("nixl-not-found", f"no agent {agent_name!r}")
        self.fabric.agents[agent_name].inbox.append((self.name, payload))

    def close(self) -> None:
        self.is_closed = True
