"""Recording stand-ins for the threads and planner that the coordinators talk to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import kv_handshake
from kv_nixl_agent import PeerSpec, StallEntry, TransferResult
from kv_scheduler_state import BlockList, HandoffTicket, HeartbeatOrder, PeerAddress, ReadOrder
from vllm_adapter.observe.hand_overs import HandOverLog


def peer(engine_id: str = "P", host: str = "10.0.0.1", port: int = 5600, **changes: Any) -> PeerAddress:
    return PeerAddress(**{"engine_id": engine_id, "host": host, "port": port, "dialect": 14, **changes})


def blocks(*ids: int) -> BlockList:
    return BlockList(ids, 0, 0)


def order(request_id: str = "r1", **changes: Any) -> ReadOrder:
    """A read of 256 tokens in two blocks, with a fence and a lease of 30 s."""
    ticket = HandoffTicket("handoff", peer(), "p-r1", (blocks(7, 8),), lease_s=30.0, fence=(3, 99))
    values: dict[str, Any] = {"local_blocks": (blocks(1, 2),), "tokens": 256, "is_reported": True, **changes}
    promised = {name: values.pop(name) for name in HandoffTicket._fields if name in values}
    return ReadOrder(request_id, ticket._replace(**promised), **values)


def heartbeat(*readers: tuple[str, str]) -> HeartbeatOrder:
    return HeartbeatOrder(peer(), readers or (("p-r1", ""),))


Result: Any = partial(
    TransferResult, peer="P", outcome="done", bytes_moved=100, descriptor_count=1, wire_s=0.001,
    bytes_by_path=(("UCX", "DRAM", "DRAM", 100),),
)  # fmt: skip
"""A transfer's good result, unless a test changes it."""


@dataclass(frozen=True)
class Metadata:
    generation: int | None = 1
    fence: tuple[int, int, int] | None = (0xF000, 0, 16)
    streams: tuple[int, int, int, int] | None = None
    agent_metadata: bytes = b"agent"
    geometry: bytes | None = b"{}"
    region_mem_types: tuple[str, ...] | None = ("DRAM",)
    capabilities: tuple[str, ...] = ()


_ONE_RANK: Any = {(0, 0): Metadata()}
Outcome: Any = partial(kv_handshake.Outcome, peers=_ONE_RANK, elapsed_s=0.01)
"""The end of a handshake with one rank, good unless it has a code."""


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
        if producer_rank in self.notify_only_ranks:
            return np.zeros((0, 5), np.uint64)
        assert producer_rank in self.producer_ranks, f"no part of the plan: {producer_rank}"
        return np.zeros((1, 5), np.uint64)

    peer_rows = local_rows

    def indices(self, producer_rank: tuple[int, int], local: Any, peer: Any, *, tokens: int) -> Any:
        assert producer_rank in self.producer_ranks, f"nothing is read from {producer_rank}"
        if any(block > 1000 for blocks in peer for block in blocks.ids):
            raise CodedFailure("block-out-of-range")
        return tuple(np.array([b for blocks in side for b in blocks.ids], np.int32) for side in (local, peer))

    def route(self, local: Any, peer: Any, *, tokens: int) -> Any:
        return {rank: self.indices(rank, local, peer, tokens=tokens) for rank in self.producer_ranks}, ()


class FakePlanner:
    def __init__(self) -> None:
        self.made = Plan()
        self.refusal: CodedFailure | None = None
        self.read: list[tuple[int, int]] = []
        self.misfit = -1
        """Number of the document that does not fit."""

    def target_ranks(self, local: Any, *, peer_tp: int, peer_pp: int, peer_dcp: int) -> Any:
        if peer_tp > 64:
            raise CodedFailure("too-many-ranks")
        return [*self.made.producer_ranks, *self.made.notify_only_ranks]

    def geometry(self, document: Any, rank: Any) -> Any:
        self.read.append(rank)
        if len(self.read) == self.misfit:
            raise CodedFailure("document-malformed")
        return document

    def plan(self, local: Any, peers: Any, *, peer_tp: int, casts: Any) -> Plan:
        if self.refusal is not None:
            raise self.refusal
        return self.made


class FakeHandshakes:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def request(self, **asked: Any) -> None:
        self.asked.append(asked)

    def answer(self, outcome: Any, number: int = -1) -> None:
        self.asked[number]["on_done"](outcome)

    def answer_first(self, first: Any, rest: Any, number: int = -1) -> bool:
        """Answer for rank (0, 0), and for the others unless the asker refuses that; return whether they were asked for."""
        try:
            self.asked[number]["check_first"](first)
        except CodedFailure as error:
            self.answer(Outcome(peers={}, code="first-rank-refused", message=str(error)), number)
            return False
        self.answer(rest, number)
        return True

    def close(self) -> None:
        pass


Stall: Any = partial(StallEntry, peer="P", bytes_left=4096)


class FakeWatch:
    """A subscription whose findings the test makes up."""

    def __init__(self, slot: int, listener: Any, tokens: int) -> None:
        self.slot, self.listener, self.tokens = slot, listener, tokens
        self.asked: list[tuple[int, int, int]] = []
        self.is_ended = False

    def read_table(self, tag: int, first: int, stop: int) -> None:
        self.asked.append((tag, first, stop))

    def end(self) -> None:
        self.is_ended = True

    def tell(self) -> None:
        """Tell the tables that were asked for: the id at place p is 500 + p."""
        asked, self.asked = self.asked, []
        for tag, first, stop in asked:
            self.listener.table(tag, first, tuple(range(500 + first, 500 + stop)))


class FakeAgent:
    """An owner thread that runs what it is given at once, and remembers it all."""

    fence = (0xF000, 0, 16)
    streams = None
    stream_words = None
    is_alive = True

    def __init__(self) -> None:
        self.peers: dict[str, PeerSpec] = {}
        self.posts: dict[str, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.probes: dict[str, str] = {}
        self.notified: list[tuple[str, bytes]] = []
        self.fences: list[tuple[int, int]] = []
        self.refuse_post = False
        self.deaf_peers: set[str] = set()
        self.stalled: list[StallEntry] = []
        self.may_poll_slowly = False
        self.watches: dict[str, FakeWatch] = {}

    def watch_stream(self, peer: str, slot: int, listener: Any, *, tokens: int = 0) -> FakeWatch:
        self.watches[peer] = watch = FakeWatch(slot, listener, tokens)
        return watch

    @property
    def agent(self) -> Any:
        return self

    def allow_slow_polling(self, allowed: bool) -> None:
        self.may_poll_slowly = allowed

    def call_soon(self, function: Any) -> None:
        function()

    def add_peer(self, spec: PeerSpec) -> None:
        assert spec.key not in self.peers
        assert len(spec.local_rows) == len(spec.peer_rows)
        self.peers[spec.key] = spec

    def remove_peer(self, peer: str) -> None:
        del self.peers[peer]

    def has_peer(self, peer: str) -> bool:
        return peer in self.peers

    def post_read(self, transfer_id: str, peer: str, local: Any, remote: Any, **facts: Any) -> None:
        if self.refuse_post:
            raise CodedFailure("post-refused")
        assert len(self.peers[peer].local_rows), "a peer without rows can only be notified"
        assert transfer_id not in self.posts
        self.posts[transfer_id] = {"peer": peer, "local": local.tolist(), "remote": remote.tolist(), **facts}

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def probe(self, transfer_id: str, peer: str, *, deadline_s: float) -> None:
        assert peer in self.peers
        self.probes[transfer_id] = peer

    def send_notification(self, peer: str, payload: bytes) -> bool:
        self.notified.append((peer, payload))
        return peer not in self.deaf_peers

    def stalls(self) -> list[StallEntry]:
        return self.stalled

    def write_fence(self, slot: int, generation: int) -> None:
        self.fences.append((slot, generation))


class FakeRecorder:
    """Counts and keeps what is reported to it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.errors: list[tuple[str, Exception]] = []
        self.observed: list[tuple[str, Any]] = []
        self.done_bytes: list[int] = []
        self.hand_overs = HandOverLog()

    def read_done(self, result: Any) -> None:
        self.counts["done"] += 1
        self.done_bytes.append(result.bytes_moved)

    def count(self, key: str, times: int = 1) -> None:
        self.counts[key] += times

    def observe(self, key: str, value: Any) -> None:
        self.observed.append((key, value))

    def info(self, _cause: str, line: str) -> None:
        self.lines.append(line)

    def warning(self, _cause: str, line: str) -> None:
        self.lines.append(line)
        self.warnings.append(line)

    def trouble(self, action: str, error: Exception, detail: str = "") -> None:
        self.counts["num_callback_errors"] += 1
        self.errors.append((f"{detail}: {action}" if detail else action, error))

    @contextmanager
    def guarded(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.trouble(action, error)
