"""Stages over real NIXL: the consumer in the test process, the producer in a process of its own."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kv_nixl_agent import AgentOptions, BackendOptions, TransferAgent, open_nixl
from kv_nixl_agent.testing import PeerProcess

sys.path.insert(0, str(Path(__file__).parent))
# The checks are those of the package's tests, here on real NIXL.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "kv-nixl-agent" / "tests"))

from agent_checks.recording import RecordingPort, recording_factory
from agent_checks.stage import Stage, count_sockets

CHECKS = sys.path[-1]
TRANSPORTS = {
    "default": BackendOptions(),
    "tcp": BackendOptions(engine_config={"TLS": "tcp"}),
    "libfabric": BackendOptions("LIBFABRIC", num_threads=0),
}


class RemoteProducer:
    """Producer of the checks over a `PeerProcess`."""

    def __init__(self, process):
        self.process = process
        self.agent_metadata, self.fence, self.rows = process.agent_metadata, process.fence, process.rows
        self.page_bytes, self.page_count = process.page_bytes, process.page_count
        self.stop, self.resume, self.kill = process.stop, process.resume, process.kill
        self.write_fence = process.write_fence

    def fill(self, seed):
        self.process.call("fill", seed)

    def take_notifications(self):
        return [(sender, payload) for sender, payload, _ in self.process.notifications()]


@pytest.fixture(params=["default", pytest.param("tcp", marks=pytest.mark.full)])
def transport(request):
    if request.param == "libfabric":
        probe = open_nixl("probe", [])
        if not probe.plugins().get("LIBFABRIC"):
            pytest.skip("NIXL's LIBFABRIC plugin does not load here: it needs libfabric, hwloc and CUDA's libraries")
        probe.close()
    return TRANSPORTS[request.param]


@pytest.fixture
def make_stage(transport):
    """Return a maker of stages; everything made is closed, and no handle may be left."""
    made = []

    def make(*, page_bytes=4096, page_count=64, options=None, name="producer"):
        process = PeerProcess(
            name,
            page_bytes=page_bytes,
            page_count=page_count,
            backend=transport,
            environment={"PYTHONPATH": os.pathsep.join([CHECKS, os.environ.get("PYTHONPATH", "")])},
        )
        memory = np.zeros((page_count, page_bytes), dtype=np.uint8)
        rows = np.array([[memory.ctypes.data, page_bytes, 0, page_bytes, page_count]], dtype=np.uint64)
        ports: list[RecordingPort] = []
        consumer = TransferAgent(
            "consumer",
            [(memory.ctypes.data, memory.nbytes, 0, "DRAM")],
            options or AgentOptions(backends=(transport,)),
            port_factory=recording_factory(open_nixl, ports),
        )
        made.append((consumer, process, ports[0], memory))
        return Stage(
            consumer,
            RemoteProducer(process),
            lambda: memory,
            rows,
            open_sockets=lambda: count_sockets(os.getpid()) + count_sockets(process.pid),
        )

    yield make
    for consumer, process, port, _ in made:
        consumer.close()
        process.close()
        assert port.open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
        assert port.double_releases == 0
