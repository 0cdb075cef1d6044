"""The producer's coordinator with the real lease table and wire, and a clock of its own."""

from __future__ import annotations

import math
from typing import Any

from fakes import FakeAgent, FakeRecorder

from kv_handshake import Codec
from kv_nixl_agent import PeerSpec
from kv_scheduler_state import FenceOrder, GrantOrder, LeaseTable, StepPlan
from vllm_adapter.config import Settings
from vllm_adapter.worker.transfer.leases import LeaseKeeper
from vllm_adapter.worker.transfer.records import TransferParts

FENCE = (3, 77)


class Bench:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.sent: list[str] = []
        self.agent = FakeAgent()
        self.recorder = FakeRecorder()
        self.counts, self.log = self.recorder.counts, self.recorder.lines
        untyped: Any = (self.agent, None, self.recorder)
        agent, handshakes, recorder = untyped
        parts = TransferParts(agent, handshakes, Codec(), recorder, lambda: self.now_s, "P", PeerSpec, Settings(), 14)
        self.leases = LeaseKeeper(parts, LeaseTable(max_pause_s=math.inf), self.sent.append)

    @property
    def lags(self) -> list[float]:
        return [value for key, value in self.recorder.observed if key == "heartbeat_lag_seconds"]

    def expect(self, request_id: str = "r") -> None:
        self.leases.apply(StepPlan(expects=(request_id,), fences=(FenceOrder(request_id, *FENCE),)))

    def grant(self, request_id: str = "r", lease_s: float = 30.0, nonce: str = "") -> None:
        self.leases.apply(StepPlan(grants=(GrantOrder(request_id, lease_s, FENCE, nonce),)))

    def lease(self, *request_ids: str, **grant: Any) -> None:
        """Announce and grant."""
        for request_id in request_ids or ("r",):
            self.expect(request_id)
            self.grant(request_id, **grant)

    def beat(self, after_s: float, *request_ids: str, reader: str = "D", nonce: str = "") -> None:
        self.now_s += after_s
        for payload in Codec().heartbeats([(name, nonce) for name in request_ids or ("r",)]):
            self.leases.notified(reader, payload)

    def read(self, request_id: str = "r", *, reader: str = "D", count: int = 1, nonce: str = "") -> None:
        self.leases.notified(
            reader, Codec().read_complete(request_id, count, nonce=nonce, consumer=nonce and "engine D")
        )
