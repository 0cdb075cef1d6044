"""Reads while NIXL's progress threads sleep: the transports' events and the reading thread's own polls carry them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_nixl_agent import AgentOptions, BackendOptions, PeerSpec, TransferResult, TransferThread
from kv_nixl_agent.nixl import side_effects
from kv_nixl_agent.testing import PeerProcess, page_pattern

pytestmark = pytest.mark.full
PAGE_BYTES, PAGES = 16384, 2048
ASLEEP_US = 60_000_000
"""Longer than a read may take: nothing that waits for a progress thread to look by itself ends in time."""
READ_WITHIN_S = 20.0
READS = [1] * 21 + [200] * 11 + [PAGES] * 5
"""Pages of one read after the other; the largest are 32 MB."""
MOST_QUARTILE_S = 0.03
"""Of the fastest quarter of the reads of one page, which take about 0.5 ms. Over TCP each was 0.09 s where the producer was left
to poll every 0.1 s."""
SLEEPING_PRODUCER = f"import kv_nixl_agent.nixl.side_effects as progress\nprogress._PERIOD_US = {ASLEEP_US}\n"


class Reader:
    """A transfer thread that reads pages in random order from one producer."""

    def __init__(self, producer: PeerProcess, backend: BackendOptions) -> None:
        self.memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
        self._ended = threading.Event()
        self._results: list[TransferResult] = []
        self.thread = TransferThread(
            "reader",
            [(self.memory.ctypes.data, self.memory.nbytes, 0, "DRAM")],
            on_result=self._note,
            on_notification=lambda *_: None,
            options=AgentOptions(backends=(backend,)),
        )
        self.thread.start()
        here = np.array([[self.memory.ctypes.data, PAGE_BYTES, 0, PAGE_BYTES, PAGES]], np.uint64)
        spec = PeerSpec("p", producer.agent_metadata, here, producer.rows, fence=producer.fence)
        self.thread.call_soon(lambda: self.thread.agent.add_peer(spec))

    def _note(self, result: TransferResult) -> None:
        self._results.append(result)
        self._ended.set()

    def read(self, name: str, ids: np.ndarray) -> None:
        """Read pages and notify the producer; the read must end well within its time."""
        self._ended.clear()
        thread, payload = self.thread, name.encode()
        thread.call_soon(
            lambda: thread.agent.post_read(name, "p", ids, ids, notification=payload, deadline_s=READ_WITHIN_S)
        )
        assert self._ended.wait(READ_WITHIN_S + 5)
        assert self._results[-1].outcome == "done", self._results[-1]


@pytest.fixture
def producer(transport: BackendOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerProcess]:
    monkeypatch.setattr(side_effects, "_PERIOD_US", ASLEEP_US)
    (tmp_path / "sitecustomize.py").write_text(SLEEPING_PRODUCER)
    process = PeerProcess(
        "sleeper",
        page_bytes=PAGE_BYTES,
        page_count=PAGES,
        backend=transport,
        environment={"PYTHONPATH": str(tmp_path)},
    )
    yield process
    process.close()


def test_reads_and_notifications_do_not_wait_for_a_progress_thread_that_sleeps(
    transport: BackendOptions, producer: PeerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader(producer, transport)
    chance = np.random.default_rng(0)
    try:
        reader.read("first", np.arange(4, dtype=np.int32))  # connects the two
        took_s: dict[int, list[float]] = {pages: [] for pages in READS}
        for number, pages in enumerate(READS):
            time.sleep(0.02)  # both progress threads have gone to sleep again
            began_s = time.monotonic()
            reader.read(f"t{number}", chance.permutation(PAGES)[:pages].astype(np.int32))
            took_s[pages].append(time.monotonic() - began_s)
        arrived: set[bytes] = set()
        until_s = time.monotonic() + READ_WITHIN_S
        while len(arrived) <= len(READS) and time.monotonic() < until_s:
            arrived |= {payload for _, payload, _ in producer.notifications()}
            time.sleep(0.05)
    finally:
        reader.thread.close()
    figures = {pages: (round(statistics.median(some), 5), round(max(some), 5)) for pages, some in took_s.items()}
    with capsys.disabled():
        print(f"\nreads by pages, (median, longest) in seconds, {transport or 'default'}: {figures}")
    assert sorted(took_s[1])[len(took_s[1]) // 4] < MOST_QUARTILE_S
    assert arrived == {b"first", *(b"t%d" % number for number in range(len(READS)))}
    np.testing.assert_array_equal(reader.memory, page_pattern(0, PAGES, PAGE_BYTES))
