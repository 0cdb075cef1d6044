"""Stages whose pages live in VRAM on one or both sides. Both agents run in this process: one GPU is enough."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kv_nixl_agent import TransferAgent, open_nixl
from kv_nixl_agent.nixl.port import MemoryKind
from kv_nixl_agent.testing import page_pattern

# The checks are those of the package's tests, here on other memory.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "kv-nixl-agent" / "tests"))

from agent_checks.port_checks import CHECKS
from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stage import Stage

__all__ = ["CHECKS", "PAGES", "PAGE_BYTES", "PLACES", "make_stage"]

PAGES, PAGE_BYTES = 64, 65536
PLACES: dict[str, tuple[MemoryKind, MemoryKind]] = {
    "vram-to-vram": ("VRAM", "VRAM"),
    "vram-to-dram": ("DRAM", "VRAM"),
    "dram-to-vram": ("VRAM", "DRAM"),
    "dram-to-dram": ("DRAM", "DRAM"),  # the control
}
"""(consumer, producer) memory kinds by the direction in which data moves."""


class Memory:
    """Pages on the GPU or on the host, read and filled through torch."""

    def __init__(self, torch, kind):
        self._torch = torch
        self.kind = kind
        device = "cuda:0" if kind == "VRAM" else "cpu"
        self.tensor = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8, device=device)
        self.region = (self.tensor.data_ptr(), self.tensor.numel(), 0, kind)
        self.rows = np.array([[self.tensor.data_ptr(), PAGE_BYTES, 0, PAGE_BYTES, PAGES]], dtype=np.uint64)

    def fill(self, seed):
        pattern = np.array(page_pattern(seed, PAGES, PAGE_BYTES))  # torch takes no array that is read alone
        self.tensor.copy_(self._torch.from_numpy(pattern))
        self._settle()

    def read(self):
        self._settle()
        return self.tensor.cpu().numpy()

    def _settle(self):
        if self.kind == "VRAM":
            self._torch.cuda.synchronize()


class LocalProducer:
    """Producer of the checks over an agent of this process."""

    page_bytes, page_count = PAGE_BYTES, PAGES

    def __init__(self, agent, memory):
        self._agent, self._memory = agent, memory
        self.agent_metadata, self.fence, self.rows = agent.agent_metadata(), agent.fence, memory.rows
        self.fill = memory.fill
        self.write_fence = agent.write_fence

    def take_notifications(self):
        return list(self._agent.take_notifications())

    def stop(self):
        raise NotImplementedError("a producer of this process cannot be stopped: FAULT_CHECKS are for other stages")

    resume = kill = stop


def make_stage(torch, place, *, port_factory=open_nixl):
    """Return (stage, close); `close` checks that no handle is left."""
    consumer_kind, producer_kind = PLACES[place]
    mine, theirs = Memory(torch, consumer_kind), Memory(torch, producer_kind)
    theirs.fill(0)
    ports: list[RecordingPort] = []
    factory = recording_factory(port_factory, ports)
    producer = TransferAgent(f"producer-{place}", [theirs.region], port_factory=factory)
    consumer = TransferAgent(f"consumer-{place}", [mine.region], port_factory=factory)
    stage = Stage(consumer, LocalProducer(producer, theirs), mine.read, mine.rows, (consumer_kind, producer_kind))

    def close():
        consumer.close()
        producer.close()
        for port in ports:
            assert port.open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}

    return stage, close
