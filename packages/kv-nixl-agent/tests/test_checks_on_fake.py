"""The checks of the port on the fake fabric; one failure of any call of the port, at any moment, leaks nothing."""

from typing import Any

import pytest
from agent_checks.port_checks import CHECKS, FAULT_CHECKS
from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stage import Stage
from helpers import Pages, make_pair, order

from kv_nixl_agent import AgentError, TransferAgent
from kv_nixl_agent.testing import FakeFabric, page_pattern

PAGES, PAGE_BYTES = 32, 64


class InProcessProducer:
    """Producer of the checks over an agent of the same process."""

    page_bytes, page_count = PAGE_BYTES, PAGES

    def __init__(self, fabric, factory):
        self._fabric = fabric
        self._pages = Pages(PAGES, PAGE_BYTES)
        self.fill(0)
        self._agent = TransferAgent("producer", [self._pages.region], port_factory=factory)
        self.write_fence, port = self._agent.write_fence, fabric.agent("producer")
        self.kill = port.die
        self.agent_metadata, self.fence = self._agent.agent_metadata(), self._agent.fence
        self.rows = self._pages.rows

    def fill(self, seed):
        self._pages.memory[:] = page_pattern(seed, PAGES, PAGE_BYTES).ravel()

    def take_notifications(self):
        return list(self._agent.take_notifications())


@pytest.mark.parametrize("latency_polls", [0, 1, 7])
@pytest.mark.parametrize("check", [*CHECKS, *FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, latency_polls):
    fabric = FakeFabric(latency_polls=latency_polls)
    ports: list[RecordingPort] = []
    producer = InProcessProducer(fabric, fabric.port)
    local = Pages(PAGES, PAGE_BYTES)
    memory = local.memory.reshape(PAGES, PAGE_BYTES)
    consumer = TransferAgent("consumer", [local.region], port_factory=recording_factory(fabric.port, ports))
    agents = [fabric.agent(name) for name in ("consumer", "producer")]
    stage = Stage(consumer, producer, lambda: memory, local.rows)
    stage.open_sockets = lambda: sum(agent.sockets for agent in agents)
    check(stage)
    consumer.close()
    (port,) = ports
    assert isinstance(port, RecordingPort)
    assert port.open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
    assert (port.peers, port.double_releases, port.is_closed) == (set(), 0, True)


@pytest.mark.parametrize("call", ["register", "add_peer", "prepare", "make", "post", "check"])
def test_one_failure_anywhere_leaks_nothing(call: str) -> None:
    for skip in range(6):
        pair = make_pair()
        hits = [skip]
        original = pair.fabric.hit

        def hit(name, original=original, hits=hits):
            if name == call:
                hits[0] -= 1
                if hits[0] == -1:
                    raise AgentError("nixl-backend", "injected")
            original(name)

        fabric: Any = pair.fabric
        fabric.hit = hit
        refused = None
        try:
            pair.connect()
            pair.consumer.submit(order("a", [0], [1], notification=b"n", deadline_s=0.5))
            pair.run(20, step_s=0.1)
            assert "a" in pair.results
        except AgentError as error:
            refused = error.code
        pair.fabric.hit = original
        pair.consumer.close()
        assert pair.ports[1].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}, (call, skip)
        assert pair.ports[1].peers == set()
        assert refused in {None, "metadata-rejected", "rows-unregistered", "peer-rows-unregistered", "bad-fence"}
