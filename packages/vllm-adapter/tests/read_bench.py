"""The consumer's coordinator between recording fakes, with a clock of its own."""

from __future__ import annotations

from typing import Any

from fakes import FakeAgent, FakeCodec, FakeHandshakes, FakePlanner, FakeRecorder, Result

from kv_nixl_agent import PeerSpec
from kv_scheduler_state.streams import StreamReaders
from vllm_adapter.cache.vllm_peer import PeerGeometry
from vllm_adapter.steps import ReadEnd
from vllm_adapter.worker.transfer.planner import PeerPlanner
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import Limits, TransferParts
from vllm_adapter.worker.transfer.stream_records import StreamShape

KEY, OTHER_KEY = "P@10.0.0.1:5600/1.1.1/0.0", "P@10.0.0.1:5600/1.1.1/0.1"


DOCUMENT: Any = {}
"""No regions: the coordinator only hands the document on."""


class Bench:
    """A coordinator between recording fakes, with a clock of its own."""

    def __init__(self, *, retries: int = 0, codec: Any = None, only_ours: bool = False, streams: bool = False) -> None:
        self.now_s = 100.0
        self.agent, self.handshakes, self.planner = FakeAgent(), FakeHandshakes(), FakePlanner()
        self.ends: list[ReadEnd] = []
        self.recorder = FakeRecorder()
        self.counts, self.log = self.recorder.counts, self.recorder.lines
        untyped: Any = (self.agent, self.handshakes, codec or FakeCodec(), self.recorder, self.planner)
        agent, handshakes, codec, recorder, plans = untyped
        parts = TransferParts(agent, handshakes, codec, recorder, lambda: self.now_s, "D", PeerSpec)
        planner = PeerPlanner(DOCUMENT, PeerGeometry(plans, ()), plans, "DRAM")
        limits = Limits(60, 30, 20, 15, 3600, 14, only_ours=only_ours, retries=retries)
        self.streamed: list[ReadEnd] = []
        self.reads = ReadCoordinator(parts, planner, limits, self.ends.append)
        if streams:
            self.reads.use_streams(StreamReaders(60), StreamShape([(16, 0)]), self.streamed.append)

    def finish(self, transfer_id: str = "r1/0.0", **facts: Any) -> None:
        self.reads.transfer_ended(Result(transfer_id, **facts))

    def codes(self) -> dict[str, str]:
        return {end.order.request_id: end.code for end in self.ends}
