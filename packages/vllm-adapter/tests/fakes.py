"""Recording stand-ins for the threads and planner that the coordinators talk to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Order:
    request_id: str = "r1"
    peer_engine_id: str = "P"
    peer_request_id: str = "p-r1"
    peer_host: str = "10.0.0.1"
    peer_port: int = 5600
    peer_tp: int = 1
    peer_pp: int = 1
    peer_dcp: int = 1
    peer_generation: int | None = None
    peer_block_ids: tuple[tuple[int, ...], ...] = ((7, 8),)
    local_block_ids: tuple[tuple[int, ...], ...] = ((1, 2),)
    fence: tuple[int, int] | None = (3, 99)
    lease_s: float | None = 30.0
    is_reported: bool = True
    external_tokens: int = 256
    local_computed_blocks: tuple[int, ...] = ()
    peer_dialect: int | None = 14


@dataclass(frozen=True)
class Heartbeat:
    peer_engine_id: str = "P"
    peer_host: str = "10.0.0.1"
    peer_port: int = 5600
    peer_tp: int = 1
    peer_pp: int = 1
    peer_dcp: int = 1
    peer_dialect: int | None = 14
    peer_generation: int | None = None
    peer_request_ids: tuple[str, ...] = ("p-r1",)


@dataclass(frozen=True)
class Result:
    transfer_id: str
    outcome: str = "done"
    code: str = ""
    message: str = ""
    is_memory_quiet: bool = True
    bytes_moved: int = 100
    descriptor_count: int = 1
    post_s: float = 0.0
    wire_s: float = 0.001
    queue_s: float = 0.0
    fence_s: float = 0.0
    bytes_by_path: tuple[tuple[str, Any, Any, int], ...] = (("UCX", "DRAM", "DRAM", 100),)


@dataclass(frozen=True)
class Metadata:
    generation: int | None = 1
    fence: tuple[int, int, int] | None = (0xF000, 0, 16)
    agent_metadata: bytes = b"agent"
    geometry: bytes | None = b"{}"
    region_mem_types: tuple[str, ...] | None = ("DRAM",)


@dataclass(frozen=True)
class Outcome:
    is_ok: bool = True
    peers: dict[tuple[int, int], Metadata] = field(default_factory=lambda: {(0, 0): Metadata()})
    code: str = ""
    message: str = ""
    elapsed_s: float = 0.01


class CodedFailure(Exception):  # noqa: N818
    def __init__(self, code: str) -> None:
        super().__init__(f"refused: {code}")
        self.code = code


@dataclass
class Plan:
    producer_ranks: tuple[tuple[int, int], ...] = ((0, 0),)
    notify_only_ranks: tuple[tuple[int, int], ...] = ()
    is_staged: bool = False
    bytes_per_token: float = 8.0

    def reader_count(self, producer_rank: tuple[int, int]) -> int:
        return 1

    def local_rows(self, producer_rank: tuple[int, int]) -> Any:
        return np.zeros((1, 5), np.uint64)

    peer_rows = local_rows

    def indices(self, producer_rank: tuple[int, int], local_blocks: Any, peer_blocks: Any, **alignment: Any) -> Any:
        if any(block > 1000 for group in peer_blocks for block in group):
            raise CodedFailure("block-out-of-range")
        return np.array([b for g in local_blocks for b in g], np.int32), np.array(
            [b for g in peer_blocks for b in g], np.int32
        )


class FakePlanner:
    def __init__(self) -> None:
        self.made = Plan()
        self.refusal: CodedFailure | None = None

    def target_ranks(self, local: Any, *, peer_tp: int, peer_pp: int, peer_dcp: int) -> Any:
        if peer_tp > 64:
            raise CodedFailure("too-many-ranks")
        return [*self.made.producer_ranks, *self.made.notify_only_ranks]

    def plan(self, local: Any, peers: Any, *, peer_tp: int) -> Plan:
        if self.refusal is not None:
            raise self.refusal
        return self.made


class FakeHandshakes:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def request(self, **asked: Any) -> None:
        self.asked.append(asked)

    def answer(self, outcome: Outcome, number: int = -1) -> None:
        self.asked[number]["on_done"](outcome)

    def close(self) -> None:
        pass


@dataclass
class Stall:
    transfer_id: str
    since_s: float
    bytes_left: int = 4096


class FakeAgent:
    """An owner thread that runs what it is given at once, and remembers it all."""

    fence = (0xF000, 0, 16)
    is_alive = True

    def __init__(self) -> None:
        self.peers: dict[str, dict[str, Any]] = {}
        self.posts: dict[str, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.notified: list[tuple[str, bytes]] = []
        self.fences: list[tuple[int, int]] = []
        self.refuse_post = False
        self.deaf_peers: set[str] = set()
        self.stalled: list[Stall] = []

    def call_soon(self, function: Any) -> None:
        function()

    def add_peer(self, peer: str, agent_metadata: bytes, **facts: Any) -> None:
        assert peer not in self.peers
        self.peers[peer] = facts

    def remove_peer(self, peer: str) -> None:
        del self.peers[peer]

    def has_peer(self, peer: str) -> bool:
        return peer in self.peers

    def post_read(self, transfer_id: str, peer: str, local: Any, remote: Any, **facts: Any) -> None:
        if self.refuse_post:
            raise CodedFailure("post-refused")
        assert peer in self.peers
        assert transfer_id not in self.posts
        self.posts[transfer_id] = {"peer": peer, "local": local.tolist(), "remote": remote.tolist(), **facts}

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def send_notification(self, peer: str, payload: bytes) -> bool:
        self.notified.append((peer, payload))
        return peer not in self.deaf_peers

    def stalls(self) -> list[Stall]:
        return self.stalled

    def write_fence(self, slot: int, generation: int) -> None:
        self.fences.append((slot, generation))


class FakeCodec:
    def read_complete(self, request_id: str, reader_count: int) -> bytes:
        return f"{request_id}:{reader_count}".encode()

    def heartbeats(self, request_ids: Any) -> list[bytes]:
        return [b"HB:" + ",".join(request_ids).encode()]
