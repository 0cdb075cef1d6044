"""The checks of the port on the fake fabric."""

import numpy as np
import pytest
from agent_checks.port_checks import CHECKS, FAULT_CHECKS
from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stage import Stage

from kv_nixl_agent import TransferAgent
from kv_nixl_agent.testing import FakeFabric, page_pattern
from kv_nixl_agent.values import MemoryRegion

PAGES, PAGE_BYTES = 32, 64


class InProcessProducer:
    """Producer of the checks over an agent of the same process."""

    page_bytes, page_count = PAGE_BYTES, PAGES

    def __init__(self, fabric, factory):
        self._fabric = fabric
        self.memory = np.zeros((PAGES, PAGE_BYTES), dtype=np.uint8)
        self.fill(0)
        region: MemoryRegion = (self.memory.ctypes.data, self.memory.nbytes, 0, "DRAM")
        self._agent = TransferAgent("producer", [region], port_factory=factory)
        self.agent_metadata, self.fence = self._agent.agent_metadata(), self._agent.fence
        self.rows = np.array([[self.memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], dtype=np.uint64)

    def fill(self, seed):
        self.memory[:] = page_pattern(seed, PAGES, PAGE_BYTES)

    def write_fence(self, slot, generation):
        self._agent.write_fence(slot, generation)

    def take_notifications(self):
        return list(self._agent.take_notifications())

    def stop(self):
        self._fabric.agent("producer").stop()

    def resume(self):
        self._fabric.agent("producer").resume()
        self._fabric.land_late_writes()

    def kill(self):
        self._fabric.agent("producer").die()


@pytest.mark.parametrize("latency_polls", [0, 1, 7])
@pytest.mark.parametrize("check", [*CHECKS, *FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, latency_polls):
    fabric = FakeFabric(latency_polls=latency_polls)
    ports: list[RecordingPort] = []
    producer = InProcessProducer(fabric, fabric.port)
    memory = np.zeros((PAGES, PAGE_BYTES), dtype=np.uint8)
    rows = np.array([[memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], dtype=np.uint64)
    consumer = TransferAgent(
        "consumer",
        [(memory.ctypes.data, memory.nbytes, 0, "DRAM")],
        port_factory=recording_factory(fabric.port, ports),
    )
    agents = [fabric.agent(name) for name in ("consumer", "producer")]
    check(Stage(consumer, producer, lambda: memory, rows, open_sockets=lambda: sum(agent.sockets for agent in agents)))
    consumer.close()
    (port,) = ports
    assert isinstance(port, RecordingPort)
    assert port.open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
    assert (port.peers, port.double_releases, port.is_closed) == (set(), 0, True)
