"""Survivors of many deaths: they keep reading, and hold no more than before."""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from campaigns import campaign

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.testing import PeerProcess
from kv_nixl_agent.tools.producer import count_sockets

pytestmark = pytest.mark.skipif(os.environ.get("KVDEV_LONG") != "1", reason="takes minutes: dev.py test --long chaos")

PAGE_BYTES, PAGES = 65536, 256
FIRST_PORT, LAST_PORT = 42100, 42107
"""For UCX's listeners, one a worker: an agent has five, so a restarted one takes ports that the former one had."""
RESTARTS, STOPS = int(os.environ.get("KVDEV_RESTARTS", "10")), 5
MOST_KIB_A_KILL = 400
"""UCX does not return the requests of a dead reader: 256 pages that waited cost 320 bytes each, 80 KiB."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings", [{}, {"UCX_TLS": "tcp"}], ids=["default", "tcp"])
def test_a_producer_whose_readers_are_killed_holds_no_more_than_before(
    settings: dict[str, str], figure: Callable[[str], None]
) -> None:
    census = campaign("own", "kill", 160, settings, "--census", "20")["census"]
    assert len(census) == 8, "the producer did not survive"
    first, last = census[1], census[-1]
    kills = last["harmed"] - first["harmed"]
    grown = {name: (last[name] - first[name]) / kills for name in ("memory_kib", "descriptors", "sockets")}
    figure(f"{settings or 'default transports'}: from {first} to {last}")
    assert grown["sockets"] < 0.1, grown
    assert grown["descriptors"] < 0.1, grown
    assert grown["memory_kib"] < MOST_KIB_A_KILL, grown


def listening() -> set[int]:
    """Return the ports of UCX's range on which somebody listens. Example of a row: `0: 0100007F:A474 00000000:0000 0A`."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}
    return {port for port in ports if FIRST_PORT <= port <= LAST_PORT}


class Reader:
    """A transfer thread whose producer dies, comes back under the same name and ports, and stands still at times."""

    def __init__(self, tls: dict[str, str]) -> None:
        self._memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self._results: queue.SimpleQueue[TransferResult] = queue.SimpleQueue()
        self._number = 0
        self.thread = TransferThread(
            "survivor",
            [(self._memory.ctypes.data, self._memory.nbytes, 0, "DRAM")],
            on_result=self._results.put,
            on_notification=lambda *_: None,
            options=AgentOptions(backends=(BackendOptions(engine_config=tls),)),
        )
        self.thread.start()

    def meet(self, producer: PeerProcess) -> None:
        """Know a producer, in place of an earlier one of that name."""
        here = np.array([[self._memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], np.uint64)
        spec = PeerSpec("p", producer.agent_metadata, here, producer.rows, fence=producer.fence)
        self.thread.call_soon(lambda: self.thread.agent.replace_peer(spec))

    def post(self, deadline_s: float = 20.0) -> None:
        """Order all pages in random order."""
        self._number += 1
        ids = np.random.default_rng(self._number).permutation(PAGES).astype(np.int32)
        number = self._number
        self.thread.call_soon(lambda: self.thread.agent.post_read(f"r{number}", "p", ids, ids, deadline_s=deadline_s))

    def outcome(self) -> str:
        """Return how the oldest order ended: `done`, or its code."""
        result = self._results.get(timeout=40.0)
        return result.outcome if result.outcome == "done" else str(result.code)


@pytest.fixture(params=[{}, {"TLS": "tcp"}], ids=["default", "tcp"])
def tls(request: pytest.FixtureRequest) -> dict[str, str]:
    chosen: dict[str, str] = request.param
    return chosen


@pytest.fixture
def producers(tls: dict[str, str]) -> Iterator[Callable[[], PeerProcess]]:
    made: list[PeerProcess] = []
    ports = {"UCX_TCP_PORT_RANGE": f"{FIRST_PORT}-{LAST_PORT}"}

    def start() -> PeerProcess:
        made.append(
            PeerProcess("served", page_bytes=PAGE_BYTES, page_count=PAGES, engine_config=tls, environment=ports)
        )
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.timeout(900)
def test_a_reader_outlives_a_producer_that_is_killed_and_stopped_again_and_again(
    tls: dict[str, str], producers: Callable[[], PeerProcess], figure: Callable[[str], None]
) -> None:
    reader = Reader(tls)
    outcomes: Counter[str] = Counter()
    sockets: list[int] = []
    ports: list[set[int]] = []
    try:
        for number in range(RESTARTS):
            producer = producers()
            reader.meet(producer)
            ports.append(listening())
            for _ in range(3):
                reader.post()
                assert reader.outcome() == "done"
            for _ in range(STOPS if number == 0 else 1):
                producer.stop()
                reader.post(deadline_s=0.5)
                outcomes[reader.outcome()] += 1
                producer.resume()
                reader.post()
                assert reader.outcome() == "done"
            reader.post()
            producer.kill()
            outcomes[reader.outcome()] += 1
            producer.close()  # the test's own line to it
            sockets.append(count_sockets(os.getpid()))
        figure(f"{tls or 'default transports'}: {dict(outcomes)}, sockets after each death {sockets}")
        assert ports[0], "UCX listens elsewhere, so this showed nothing of restarts on the same ports"
        assert all(ports[0] & each for each in ports), ports
        assert set(outcomes) <= {"done", "deadline-exceeded", "peer-disconnected"}
        assert sockets[-1] <= sockets[0] + 4, sockets
    finally:
        reader.thread.close()
