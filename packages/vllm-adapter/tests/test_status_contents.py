"""Contents of an answer to `vllm-adapter status`: what the scheduler and the workers tell, and what they keep."""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from factories import facts
from fakes import Outcome, Stall, order
from lease_bench import Bench as LeaseBench
from read_bench import Bench
from scheduler_engine import TEXT, Engine

from kv_nixl_agent.testing import FakeFabric
from vllm_adapter.config import Settings
from vllm_adapter.observe.answers import Answer
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.wiring import make_worker
from vllm_adapter.worker.registration import Registration

# ------------------------------------------------------------------------------------------------------- the scheduler


def test_a_scheduler_tells_leases_and_why_requests_wait_but_nothing_that_would_end_a_lease() -> None:
    engine = Engine("P")
    ticket = engine.prefill("r1", TEXT)
    assert ticket is not None
    reader = Engine("D")
    reader.admit("r2", ticket, TEXT)
    reported = json.loads(json.dumps(engine.side.status()))
    assert (reported["leases"], reported["served_ranks"]) == (1, 1)
    assert reported["leased_blocks"] == 3
    assert (reported["fence_slots_used"], reported["stream_slots_used"], reported["stream_blocks_held"]) == (1, 0, 0)
    assert reported["requests_by_state"] == {"producer-leased": 1}
    (request,) = reported["oldest_requests"]
    assert request["waits_for"] == "the workers, to report that its readers are done or its lease has expired"
    assert ticket["kv_nonce"] not in json.dumps(reported)
    assert "fence" not in request
    (waiting,) = json.loads(json.dumps(reader.side.status()))["oldest_requests"]
    assert (waiting["state"], waiting["peer_engine_id"]) == ("queued", "P")
    assert waiting["waits_for"] == "the engine, to allocate blocks for the read"


def test_a_look_from_another_thread_never_fails_while_the_engine_works() -> None:
    engine = Engine("P", fence_slots=64)
    failures: list[Exception] = []
    looks = 0
    is_over = threading.Event()

    def look() -> None:
        nonlocal looks
        while not is_over.is_set():
            try:
                # Beside the whole status, which looks again if a table has changed, the two looks that must not need that.
                engine.state.state_counts()
                engine.state.snapshot(now_s=0.0)
                looks += bool(engine.side.status()["requests_by_state"])
            except Exception as error:
                failures.append(error)
                return

    watcher = threading.Thread(target=look)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    watcher.start()
    until_s = time.monotonic() + 1.5
    number = 0
    while not failures and (time.monotonic() < until_s or looks <= 20):
        number += 1
        engine.now_s += 0.001
        engine.prefill(f"r{number}", TEXT)
        if number > 40:
            engine.report(sent=(f"r{number - 40}",))
    is_over.set()
    watcher.join()
    sys.setswitchinterval(interval_s)
    assert failures == []


def test_many_requests_are_all_counted_and_the_oldest_described() -> None:
    engine = Engine("P", fence_slots=256)
    for number in range(120):
        engine.prefill(f"r{number}", TEXT)
    reported = engine.side.status()
    assert reported["leases"] == 120
    described: Any = reported["oldest_requests"]
    assert [entry["request_id"] for entry in described] == [f"r{number}" for number in range(50)]


# --------------------------------------------------------------------------------------------------------- the workers


def test_the_levels_of_a_step_are_those_after_the_ends_that_it_reports() -> None:
    """A read that is quarantined ends when its pages are quiet; no step may follow the one that reports it."""
    worker, left = make_worker(facts(), Settings()), list[int]()
    seen: Any = SimpleNamespace(check=lambda _engine_id: left.append(len(worker._ends.reads)))
    worker._registration = seen
    worker._ends.reads.append(ReadEnd(order(), "timed-out", "no answer", ReadTimes(0.0), 1.0))
    assert worker.take_report().failed == {"r1"}
    assert left == [0]


def test_reads_are_listed_by_stage_and_peers_by_phase() -> None:
    bench = Bench()
    bench.reads.read(order())
    bench.now_s += 2
    reported: Any = bench.reads.describe(10)
    assert (reported["reads"], reported["reads_waiting_for_a_peer"]) == (1, 1)
    (read,), (peer,) = reported["oldest_reads"], reported["peer_engines"]
    assert (read["request_id"], read["stage"], read["age_s"]) == ("r1", "waits for its peer", 2.0)
    assert (peer["engine_id"], peer["phase"], peer["reads_waiting"]) == ("P", "wiring", 1)
    bench.handshakes.answer(Outcome())
    reported = bench.reads.describe(10)
    (read,), (peer,) = reported["oldest_reads"], reported["peer_engines"]
    assert (read["stage"], read["deadline_in_s"], read["transfers_left"]) == ("on the wire", 60.0, 1)
    assert (peer["phase"], peer["ranks_read"], peer["reads_in_flight"]) == ("ready", ["0.0"], 1)
    bench.finish(outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    reported = bench.reads.describe(10)
    assert (reported["oldest_reads"][0]["stage"], reported["oldest_reads"][0]["code"]) == (
        "in quarantine",
        "deadline-exceeded",
    )
    assert bench.reads.describe(0)["oldest_reads"] == []


def test_leases_are_listed_with_the_time_left_and_without_their_nonce() -> None:
    bench = LeaseBench()
    bench.lease(nonce="a-secret-nonce")
    bench.beat(4.0, nonce="a-secret-nonce")
    bench.now_s += 1
    (lease,) = bench.leases.describe(10)["oldest_leases"] or []
    assert lease["last_heartbeat_s"] == 1.0
    assert lease["state"] == "granted"
    assert isinstance(lease["left_s"], float)
    assert "secret" not in json.dumps(lease)


def test_a_transfer_thread_that_does_not_answer_is_shown_by_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_adapter.worker.registration._ANSWER_S", 0.01)
    health = SimpleNamespace(
        state="stuck", calls_waiting=7, callback_errors=1, loop_errors=2, last_error="E: x", ucx_requests="off"
    )
    agent: Any = SimpleNamespace(
        health=lambda: health,
        quarantine=lambda: [SimpleNamespace(bytes_at_risk=4096)],
        stalls=lambda: [Stall("r1/0.0", since_s=1.0)],
        statistics=lambda: {"transfers_done": 3.0},
        call_soon=lambda _function: None,
    )
    untyped: Any = None
    registration = Registration(agent, untyped, untyped, untyped, untyped, b"")
    reported: Any = registration.describe()
    assert reported["thread"] == {
        "state": "stuck",
        "calls_waiting": 7,
        "errors": 3,
        "last_error": "E: x",
        "ucx_requests": "off",
    }
    assert reported["is_silent"] is True
    assert (reported["quarantined_transfers"], reported["quarantined_bytes"]) == (1, 4096)
    assert (reported["stalled_transfers"], reported["stalled_bytes"]) == (1, 4096)
    assert reported["figures"] == {"transfers_done": 3.0}


# -------------------------------------------------------------------------------------------------------- its shape


def test_all_that_this_version_tells_has_the_shape_that_commands_read() -> None:
    producer, consumer, bench, leases = Engine("P"), Engine("D"), Bench(), LeaseBench()
    consumer.admit("r2", producer.prefill("r1", TEXT), TEXT)
    leases.lease()
    bench.reads.read(order())
    waiting = bench.reads.describe(10)
    bench.handshakes.answer(Outcome())
    posted = bench.reads.describe(10)
    bench.finish(outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    worker = make_worker(facts(), Settings(), port_factory=FakeFabric().port)
    reported = [side.status() for side in (producer.side, consumer.side)] + [worker.status(), worker.hand_overs()]
    reported += [side.hand_overs() for side in (producer.side, consumer.side)]
    reported += [waiting, posted, bench.reads.describe(10), leases.leases.describe(10)]
    assert sum(bool(answer.get("hand_overs")) for answer in reported) == 2
    peers: list[Any] = [answer.get("peer_engines", ()) for answer in reported]
    assert sum(map(len, peers)) >= 2
    for answer in reported:
        msgspec.convert(json.loads(json.dumps(answer, default=str)), Answer)
