"""The engine thread's half of a worker: it hands over, takes away, and says once what went wrong."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from factories import facts
from fakes import Order

from kv_scheduler_state import EMPTY_PLAN
from vllm_adapter.worker.engine_thread import WorkerSide
from vllm_adapter.worker.transfer.reads import ReadEnd


def _worker() -> WorkerSide:
    return WorkerSide(facts(), parts=SimpleNamespace(ucx_tls="unset"))  # type: ignore[arg-type]


def _end(code: str = "", **order: Any) -> ReadEnd:
    times: Any = SimpleNamespace()
    return ReadEnd(Order(**order), code, code and "the peer said nothing", times, 1.0)  # type: ignore[arg-type]


def test_a_failed_read_is_reported_and_logged_once_with_who_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    worker = _worker()
    worker._ends.extend([_end("peer-silent"), _end(request_id="r2", peer_request_id="p-r2")])
    with caplog.at_level(logging.ERROR):
        results = worker.take_results()
    assert (results.received, results.failed) == ({"r1", "r2"}, {"r1"})
    (record,) = caplog.records
    for part in ("r1", "p-r1", "engine P", "10.0.0.1:5600", "the peer said nothing", "peer-silent"):
        assert part in record.getMessage()
    assert worker.take_results().received == set()


def test_a_notification_that_failed_is_logged_but_no_request_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    worker = _worker()
    worker._ends.append(_end("peer-lost", is_reported=False))
    results = worker.take_results()
    assert (results.received, results.failed) == (set(), set())
    assert "could not be told" in caplog.text
    assert "peer-lost" in caplog.text
    assert "not taken over" not in caplog.text
    stats = worker.take_stats()
    assert stats is not None
    assert stats["num_failed_notifications"] == [1]
    assert not stats["read_failure_codes"]


def test_what_the_scheduler_could_not_order_is_reported_as_failed() -> None:
    worker = _worker()
    worker.start_step(EMPTY_PLAN, ("o1",))  # type: ignore[arg-type]
    results = worker.take_results()
    assert (results.received, results.failed) == ({"o1"}, {"o1"})


def test_handing_a_step_over_waits_for_no_peer() -> None:
    """The transfer thread may be busy: only the fence words are written at once, so that no ticket is ahead of them."""
    worker, queued, fences = _worker(), [], []
    agent = SimpleNamespace(
        call_soon=queued.append, write_fence=lambda slot, generation: fences.append((slot, generation)), is_alive=True
    )
    worker._registration = SimpleNamespace(  # type: ignore[assignment]
        agent=agent, perform=lambda *_orders: threading.Event().wait(60)
    )
    fence = SimpleNamespace(request_id="p1", slot=3, generation=9)
    plan: Any = SimpleNamespace(
        is_empty=False, fences=(fence,), reads=(Order(),), grants=(), expects=(), releases=(), cancels=(), heartbeats=()
    )
    began_s = time.monotonic()
    worker.start_step(plan)
    assert time.monotonic() - began_s < 5  # not 60
    assert fences == [(3, 9)]
    assert len(queued) == 1
