"""Observations that a worker collects between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fakes import Result

from vllm_adapter.observe.metric_tables import METRICS
from vllm_adapter.observe.recorder import Recorder

if TYPE_CHECKING:
    import pytest


def test_bytes_are_told_by_the_backend_that_moved_them_and_never_by_a_guess() -> None:
    stats = Recorder(ucx_tls="rc,cuda_ipc")
    paths = (("UCX", "VRAM", "DRAM", 30), ("GDS", "DRAM", "DRAM", 20), ("", "DRAM", "DRAM", 10))
    stats.read_done(Result("a", bytes_moved=60, bytes_by_path=paths))
    stats.read_done(Result("b", bytes_moved=0, bytes_by_path=()))
    taken = stats.take()
    assert taken is not None
    assert taken["read_bytes"] == [
        ["UCX", "DRAM->VRAM", "rc,cuda_ipc", 30],
        ["GDS", "DRAM->DRAM", "", 20],
        ["unknown", "DRAM->DRAM", "", 10],
    ]
    assert stats.take() is None


def test_a_kind_of_exception_is_logged_once_whatever_requests_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    for number in range(150):
        recorder.trouble("storing the words of a stream", ValueError("odd"), f"request r{number}")
    recorder.trouble("heartbeat", ValueError("odd"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "request r0: storing the words of a stream failed unexpectedly; the other orders go on",
        "heartbeat failed unexpectedly; the other orders go on",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_further_kinds_than_are_remembered_are_logged_without_traceback_and_limited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    for number in range(150):
        recorder.trouble("heartbeat", type(f"Odd{number}", (Exception,), {})("of a\npeer"))
    traced = [record for record in caplog.records if record.exc_info]
    plain = [record.getMessage() for record in caplog.records if not record.exc_info]
    assert (len(traced), len(plain)) == (100, 10)
    assert plain[0] == "heartbeat failed unexpectedly (Odd100: of a\\npeer); the other orders go on"
    taken = recorder.take()
    assert taken is not None
    assert sum(taken["num_callback_errors"]) == 150


def test_a_handshake_that_fails_by_its_time_limit_has_a_bucket_and_the_hosts_buckets_stay() -> None:
    """Two attempts of 5 s and a pause take more than 10 s."""
    buckets = {metric.key: metric.buckets for metric in METRICS}
    assert buckets["handshake_duration"][-4:] == (5.0, 10.0, 20.0, 60.0)
    assert {max(buckets[key]) for key in ("transfer_duration", "post_duration")} == {5.0}
