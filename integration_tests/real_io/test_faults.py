"""Real processes that die, freeze, restart and give memory away, each within a time bound."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from agent_checks.pauses import check_renewals_count_before_timers, events_since, watch_timer
from agent_checks.stage import count_sockets, make_order
from agent_checks.stream_rewriter import close_agent

from kv_nixl_agent import AgentError, AgentOptions, BackendOptions, PeerSpec, TransferAgent
from kv_nixl_agent.nixl.port import MemoryKind
from kv_nixl_agent.testing import PeerProcess, page_pattern

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


def warm(stage):
    """Connect a stage and read once."""
    stage.connect()
    assert stage.read("warm", [0], [0]).outcome == "done"
    return stage


def wait_quiet(stage, transfer_id, limit_s=60.0):
    result = stage.wait(transfer_id)
    stage.run_until(lambda: result.is_memory_quiet or transfer_id in stage.quiet, limit_s, "quiet memory")
    return result


def test_killed_before_posting(make_stage):
    stage = warm(make_stage())
    stage.producer.kill()
    assert stage.read("r", [1], [1]).code == "peer-disconnected"
    wait_quiet(stage, "r")
    assert not stage.consumer.peers()["p"]["is_connected"]


def test_killed_while_posting(make_stage, transport):
    options = AgentOptions(backends=(transport,), chunk_rows=256)
    stage = warm(make_stage(page_bytes=16384, page_count=4096, options=options))
    ids = np.random.default_rng(1).permutation(4096)
    stage.consumer.post(make_order("r", ids, ids, deadline_s=50.0))
    for _ in range(3):
        stage.consumer.advance()
    killer = threading.Thread(target=stage.producer.kill)
    killer.start()
    result = wait_quiet(stage, "r")
    killer.join()
    assert result.outcome in {"failed", "done"}  # done only if all bytes were read before the kill
    if result.outcome == "done":
        stage.expect_pages(0, ids.tolist(), ids.tolist())
    else:
        assert result.code == "peer-disconnected"


def test_killed_after_posting(make_stage):
    stage = warm(make_stage(page_bytes=1 << 20, page_count=128))
    ids = np.random.default_rng(1).permutation(128)
    stage.consumer.post(make_order("r", ids, ids, deadline_s=50.0))
    stage.consumer.advance()
    stage.producer.kill()
    result = wait_quiet(stage, "r")
    assert result.code in {"", "peer-disconnected"}


def test_late_writes_of_a_stopped_producer_are_caught(make_stage, transport):
    stage = warm(make_stage(page_bytes=65536, page_count=512))
    stage.producer.fill(9)
    ids = np.random.default_rng(1).permutation(512)
    stage.producer.stop()
    stage.consumer.post(make_order("r", ids, ids, deadline_s=0.5))
    result = stage.wait("r")
    if transport:  # over TCP the producer itself sends, so nothing can have arrived
        assert result.outcome == "timed-out"
    if result.outcome != "done":
        assert not result.is_memory_quiet
        with pytest.raises(AgentError) as error:
            stage.consumer.post(make_order("r", ids, ids))
        assert error.value.code == "duplicate-transfer"
        stage.consumer.remove_peer("p")
        for _ in range(200):
            stage.consumer.advance()
            time.sleep(0.001)
        assert stage.consumer.quarantine(), "removing the peer made the memory quiet"
    stage.producer.resume()
    if result.outcome != "done":
        stage.run_until(lambda: "r" in stage.quiet, 60.0, "quiet memory")
        at_rest = np.array(stage.read_pages())
        time.sleep(0.5)
        assert np.array_equal(stage.read_pages(), at_rest), "memory was written after it was reported quiet"


def test_a_read_from_a_stopped_producer_is_reported_as_stalled(make_stage):
    """Over TCP, where the producer's own process must send."""
    tcp = {"TLS": "tcp"}
    options = AgentOptions(backends=(BackendOptions(engine_config=tcp),), stall_after_s=0.4)
    stage = warm(make_stage(page_bytes=65536, page_count=64, options=options))
    assert not stage.consumer.stalls()
    stage.producer.stop()
    began_s = time.monotonic()
    stage.consumer.post(make_order("r", [1, 2], [1, 2], deadline_s=60.0))
    stage.run_until(stage.consumer.stalls, 50.0, "a stall")
    assert time.monotonic() - began_s >= 0.4
    (entry,) = stage.consumer.stalls()
    assert (entry.transfer_id, entry.bytes_left) == ("r", 2 * 65536)
    stage.producer.resume()
    assert stage.wait("r").outcome == "done"
    assert not stage.consumer.stalls()


def test_deregistered_under_a_reader(make_stage):
    stage = make_stage()
    stage.connect()
    stage.producer.write_fence(0, 5)
    assert stage.read("before", [0], [0], fence=(0, 5)).outcome == "done"
    stage.producer.process.call(close_agent)
    result = stage.read("after", [1], [1], fence=(0, 5), deadline_s=5.0)
    assert result.outcome != "done", "data of deregistered memory was taken for good"
    wait_quiet(stage, "after")


def test_lease_expiring_between_post_and_completion_is_always_caught(make_stage):
    """The word is voided after the order is accepted and before its fence can be read: 1000 of 1000 are voided."""
    stage = make_stage()
    stage.connect()
    ids = np.arange(8)
    rejected = 0
    for number in range(1000):
        stage.producer.write_fence(1, 2 * number + 1)
        stage.consumer.post(make_order(f"r{number}", ids, ids, fence=(1, 2 * number + 1), deadline_s=10.0))
        stage.producer.write_fence(1, 2 * number + 2)
        rejected += stage.wait(f"r{number}").outcome == "fence-rejected"
    assert rejected == 1000


def test_racing_leases_never_pass_void_data(make_stage):
    """The producer rewrites its pages as soon as it has voided the fence; whatever passes must be the old content."""
    stage = make_stage(page_bytes=16384, page_count=64)
    stage.connect()
    ids, outcomes = np.arange(64), []
    old, rounds = page_pattern(1, 64, 16384), 120
    for number in range(rounds):
        stage.producer.fill(1)
        stage.producer.write_fence(2, 2 * number + 1)
        stage.producer.process.begin("write_fence", 2, 2 * number + 2)  # ends the lease while the read is on its way
        if number % 3:
            time.sleep(0.0001 * (number % 3))
        stage.consumer.post(make_order(f"r{number}", ids, ids, fence=(2, 2 * number + 1), deadline_s=10.0))
        result = stage.wait(f"r{number}")
        stage.producer.process.finish()
        outcomes.append(result.outcome)
        if result.outcome == "done":
            assert np.array_equal(stage.read_pages(), old)
    assert set(outcomes) <= {"done", "fence-rejected"}
    assert "fence-rejected" in outcomes


@pytest.mark.parametrize("transport_name", ["default", "tcp"])
def test_closing_in_the_middle_of_copies_leaves_the_process_alive(transport_name):
    """In a process of its own, because UCX ends the whole process where this goes wrong (every other time)."""
    script = Path(__file__).with_name("closing_midway.py")
    done = subprocess.run(
        [sys.executable, script, transport_name, "8"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = done.stdout.splitlines()[-1].split()
    assert len(outcomes) == 8
    assert "cancelled" in outcomes, "every read had ended before its agent was closed, so this showed nothing"


def open_sockets():
    return count_sockets(os.getpid())


@contextlib.contextmanager
def replaced(stage, name, backend):
    """Let another process take the producer's place as the consumer's peer."""
    size = {"page_bytes": stage.producer.page_bytes, "page_count": stage.producer.page_count}
    with contextlib.closing(PeerProcess(name, backend=backend, **size)) as again:
        stage.consumer.remove_peer("p")
        stage.consumer.add_peer(PeerSpec("p", again.agent_metadata, stage.local_rows, again.rows, fence=again.fence))
        yield again


def test_a_closed_agent_holds_no_connection_though_its_object_lives_on(make_stage):
    """Else its peers wait for it until their deadlines, as when an engine sleeps: the process is there, but does not answer."""
    before = open_sockets()
    stage = warm(make_stage())
    assert open_sockets() > before + 2
    stage.consumer.close()
    assert open_sockets() <= before + 1, "the one left is the test's line to its producer process"
    assert stage.consumer.statistics()["inflight"] == 0


@pytest.mark.parametrize("transport", ["default"], indirect=True)  # it connects by TCP, too
def test_sockets_of_peers_that_die_do_not_add_up(make_stage, transport):
    """Reads of few descriptors never wake UCX's worker threads, which hold a socket or two each for every peer."""
    stage = make_stage()
    stage.connect()
    held = []
    for number in range(8):
        with replaced(stage, f"next-{number}", transport) as again:
            assert stage.read(f"read-{number}", [2, 3], [7, 8]).outcome == "done"
            again.kill()
        assert stage.read(f"lost-{number}", [2, 3], [7, 8]).outcome != "done"
        held.append(open_sockets())
    # The system chooses which threads take their turn at once, so those of a few lost peers may be held. Without turns each
    # lost peer adds 4 sockets, over TCP 8: 28 or 56 in this test.
    assert held[-1] <= held[0] + 16, f"sockets after each lost peer: {held}"


@pytest.mark.never_wrong("C5")
def test_a_producer_killed_and_replaced_between_two_polls_is_found_disconnected(make_stage, transport):
    stage = warm(make_stage(page_bytes=65536, page_count=64))
    stage.producer.stop()
    ids = np.arange(32)
    stage.consumer.post(make_order("stuck", ids, ids, deadline_s=0.2))
    stuck = stage.wait("stuck")
    stage.producer.kill()
    with replaced(stage, "producer", transport):
        assert stage.read("second", [40, 41], [7, 8]).outcome == "done"
        assert stuck.is_memory_quiet or "stuck" in stage.quiet, stage.consumer.quarantine()
        assert not stage.consumer.quarantine()
        stage.consumer.remove_peer("p")


def test_a_peer_that_is_kept_loaded_is_read_from_memory_that_it_registered_later(transport):
    """Nothing is unloaded when a peer is removed, so its fresh metadata must be taken beside the former."""
    options = AgentOptions(backends=(transport,))
    pages = [np.full((8, 4096), number, dtype=np.uint8) for number in range(3)]
    kind: MemoryKind = "DRAM"
    regions = [(memory.ctypes.data, memory.nbytes, 0, kind) for memory in pages]
    mine, first, second = [np.array([[memory.ctypes.data, 4096, 0, 4096, 8]], dtype=np.uint64) for memory in pages]
    consumer, producer = TransferAgent("reader", regions[:1], options), TransferAgent("grows", regions[1:2], options)

    def read(number):
        consumer.post(make_order(f"r{number}", np.arange(8), np.arange(8)))
        end_s = time.monotonic() + 60.0
        while time.monotonic() < end_s:
            consumer.advance()
            producer.take_notifications()
            for result in consumer.take_results():
                return result.outcome
        return "no result"

    consumer.add_peer(PeerSpec("p", producer.agent_metadata(), mine, first))
    assert (read(1), pages[0][0, 0]) == ("done", 1)
    consumer.remove_peer("p")
    assert consumer.statistics()["agents_waiting"] == 1
    producer._memory.register(regions[2:])
    consumer.add_peer(PeerSpec("p", producer.agent_metadata(), mine, second))
    assert (read(2), pages[0][0, 0]) == ("done", 2)
    consumer.close()
    producer.close()


class StoppedOwner:
    """Paused owner of the check over a stage: the owner thread of the producer's process."""

    def __init__(self, stage):
        self._consumer, self._producer = stage.consumer, stage.producer
        self._stopped_s = 0.0
        self.wait, self.resume = time.sleep, self._producer.resume

    def watch_timer(self, period_s):
        self._producer.process.call(watch_timer, period_s)

    def stop(self):
        self._producer.stop()
        self._stopped_s = time.monotonic()

    def notify(self, payload):
        assert self._consumer.send_notification("p", payload.encode())

    def events_since_stop(self, event):
        return self._producer.process.call(events_since, self._stopped_s, event)


@pytest.mark.never_wrong("C4")
def test_a_renewal_that_came_while_the_process_was_stopped_counts_before_its_timers(make_stage):
    stage = warm(make_stage())
    check_renewals_count_before_timers(StoppedOwner(stage))
