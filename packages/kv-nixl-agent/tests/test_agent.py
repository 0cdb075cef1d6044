"""The agent on the fake fabric: bytes, results, fences, peers."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers import code_of, connected, order

from kv_nixl_agent import AgentOptions


def test_reads_of_a_stopped_peer_are_reported_as_stalled_and_go_on():
    pair = connected(options=AgentOptions(stall_after_s=2.0, chunk_rows=2))
    pair.consumer.post(order("moves", [0, 1], [0, 1], deadline_s=100.0))
    assert pair.run(40, step_s=0.25)["moves"].outcome == "done"
    assert pair.consumer.stalls() == []
    pair.fabric.agent("producer").stop()
    posted_s = pair.clock[0]
    pair.consumer.post(order("s", [0, 1, 2], [0, 1, 2], deadline_s=100.0))
    pair.run(8, step_s=0.25)
    assert pair.consumer.stalls() == [], "not yet"
    pair.run(8, step_s=0.25)
    (entry,) = pair.consumer.stalls()
    assert (entry.transfer_id, entry.peer, entry.bytes_left) == ("s", "p", 3 * 64)
    assert 0.0 <= entry.since_s - posted_s <= 0.5
    pair.run(40, step_s=0.25)
    assert "s" not in pair.results, "its deadline ends it, not the stall"
    pair.fabric.agent("producer").resume()
    assert pair.run(40, step_s=0.25)["s"].outcome == "done"
    assert pair.consumer.stalls() == []


def test_an_end_of_one_part_is_progress():
    pair = connected(
        turns=40, options=AgentOptions(stall_after_s=2.0, chunk_rows=1, max_inflight_bytes=64), latency_polls=6
    )
    pages = list(range(8))
    pair.consumer.post(order("slow", pages, pages, deadline_s=1000.0))
    seen = 0
    while "slow" not in pair.results:
        pair.run(1, step_s=0.25)
        seen += len(pair.consumer.stalls())
    assert pair.clock[0] - 100.0 > 4 * 2.0, "it took several times the limit"
    assert seen == 0


def test_a_stopped_peer_times_out_into_quarantine_and_leaves_it_when_it_resumes():
    pair = connected()
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("s", [0], [0], deadline_s=1.0))
    pair.run(5, step_s=0.5)
    assert pair.results["s"].outcome == "timed-out"
    assert not pair.results["s"].is_memory_quiet
    assert [entry.transfer_id for entry in pair.consumer.quarantine()] == ["s"]
    assert pair.consumer.take_quiet() == []
    assert code_of(lambda: pair.consumer.post(order("s", [0], [0]))) == "duplicate-transfer"
    pair.fabric.agent("producer").resume()
    pair.run(5, step_s=0.5)
    assert pair.consumer.take_quiet() == ["s"]
    assert not pair.consumer.quarantine()


def test_close_lets_what_is_on_the_wire_end():
    """UCX aborts the process when a copy is interrupted by the end of its worker."""
    pair = connected(turns=30, latency_polls=20)
    pair.consumer.post(order("midway", [3], [4]))
    pair.consumer.advance()
    pair.consumer.close()
    assert pair.fabric.land_late_writes() == 0, "the agent was closed in the middle of a copy"
    assert np.array_equal(pair.local.page(3), pair.remote.page(4))
    assert pair.consumer.take_quiet() == ["midway"]


@pytest.mark.parametrize("wait_s", [0.0, 0.3])
def test_close_waits_for_a_stopped_peer_no_longer_than_it_was_told(wait_s, monkeypatch):
    """Under a clock of its own: only what the close itself sleeps counts, not what a busy machine adds."""
    now_s = [50.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda pause_s: now_s.append(now_s.pop() + pause_s))
    pair = connected(turns=0, options=AgentOptions(close_wait_s=wait_s))
    pair.fabric.agent("producer").stop()
    pair.consumer.post(order("stuck", [0], [0]))
    pair.consumer.advance()
    monkeypatch.setattr("kv_nixl_agent.transfers.handles.time", clock)
    pair.consumer.close()
    assert wait_s <= now_s[0] - 50.0 < wait_s + 0.01
    assert pair.consumer.take_quiet() == ["stuck"]
