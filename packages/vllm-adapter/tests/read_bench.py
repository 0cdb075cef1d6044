"""The consumer's coordinator between recording fakes, with a clock of its own."""

from __future__ import annotations

from typing import Any

from fakes import FakeAgent, FakeHandshakes, FakePlanner, FakeRecorder, Outcome, Result, order

from kv_handshake import Codec
from kv_nixl_agent import PeerSpec
from kv_scheduler_state import ReadOrder, StepPlan
from kv_scheduler_state.streams import StreamReaders
from vllm_adapter.cache.vllm_peer import PeerPlanner
from vllm_adapter.config import Settings
from vllm_adapter.steps import ReadEnd
from vllm_adapter.worker.registration import Registration
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import TransferParts
from vllm_adapter.worker.transfer.stream_parts import StreamShape

KEY, OTHER_KEY = "P@10.0.0.1:5600/1.1.1/0.0", "P@10.0.0.1:5600/1.1.1/0.1"


DOCUMENT: Any = {"groups": []}
"""Nothing to compare: the coordinator only passes the document on."""


class Bench:
    """A coordinator between recording fakes, with a clock of its own."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.agent, self.handshakes, self.planner = FakeAgent(), FakeHandshakes(), FakePlanner()
        self.ends: list[ReadEnd] = []
        self.recorder = FakeRecorder()
        self.counts, self.log = self.recorder.counts, self.recorder.lines
        untyped: Any = (self.agent, self.handshakes, self.recorder, self.planner)
        agent, handshakes, recorder, plans = untyped
        configured = Settings(**{"read_timeout_s": 60, "read_retries": 0, **settings})
        parts = TransferParts(agent, handshakes, Codec(), recorder, lambda: self.now_s, "D", PeerSpec, configured, 14)
        planner = PeerPlanner(DOCUMENT, (), plans, plans, "DRAM")
        readers, shape = StreamReaders(configured.read_timeout_s), StreamShape([(16, 0)])
        self.reads = ReadCoordinator(parts, planner, self.ends.append, readers, shape)

    def start(self, read: ReadOrder | None = None, *more: ReadOrder, **outcome: Any) -> None:
        """Order reads, and let the handshake end."""
        for each in (read or order(), *more):
            self.reads.read(each)
        self.handshakes.answer(Outcome(**outcome))

    def order(self, *reads: ReadOrder, leases: Any = None, **orders: Any) -> None:
        """Carry out a step's orders."""
        unused: Any = None
        recorder: Any = self.recorder
        Registration(unused, unused, self.reads, leases, recorder, b"").apply(StepPlan(reads=reads, **orders))

    def finish(self, transfer_id: str = "r1/0.0", **facts: Any) -> None:
        self.reads.transfer_ended(Result(transfer_id, **facts))

    def codes(self) -> dict[str, str]:
        return {end.order.request_id: end.code for end in self.ends}
