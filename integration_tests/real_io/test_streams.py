"""Checks of streams on real NIXL between two processes, over the default transports and over TCP alone."""

import numpy as np
import pytest

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferAgent
from kv_nixl_agent.port import open_nixl
from kv_nixl_agent.testing import PeerProcess, RecordingPort, recording_factory
from kv_nixl_agent.testing._stream_checks import STREAM_CHECKS, STREAM_FAULT_CHECKS, StreamStage

NOTHING = np.empty((0, 5), dtype=np.uint64)
SLOTS = 16


class RemoteStreams:
    """`StreamControl` over a `PeerProcess`."""

    def __init__(self, process):
        self._process = process
        self.stop, self.resume, self.kill = process.stop, process.resume, process.kill

    def stream(self, method, *arguments):
        self._process.call("stream", method, *arguments)

    def begin_rewriting(self, duration_s, seed):
        self._process.begin("rewrite_streams", duration_s, seed)

    def finish_rewriting(self):
        return self._process.finish()

    def deregister(self):
        self._process.call("deregister")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("check", [*STREAM_CHECKS, *STREAM_FAULT_CHECKS], ids=lambda check: check.__name__)
def test_check(check, transport):
    process = PeerProcess("producer", page_count=1, engine_config=transport, stream_slots=SLOTS)
    ports: list[RecordingPort] = []
    consumer = TransferAgent(
        "consumer",
        [],
        AgentOptions(backends=(BackendOptions(engine_config=transport),), stream_slots=SLOTS, stream_poll_s=2e-5),
        port_factory=recording_factory(open_nixl, ports),
    )

    def spec(location):
        return PeerSpec("p", process.agent_metadata, NOTHING, NOTHING, fence=process.fence, streams=location)

    assert process.streams is not None
    try:
        check(StreamStage(consumer, RemoteStreams(process), spec, process.streams))
    finally:
        consumer.close()
        process.close()
    assert ports[0].open_handles() == {"registration": 0, "prepared": 0, "transfer": 0}
    assert ports[0].double_releases == 0
