"""Observations that a worker collects between two steps."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from fakes import Result
from test_explain import NO_CODES, STEPS, words_of

from kv_handshake.errors import CODES
from kv_nixl_agent.errors import ERROR_CODES
from kv_scheduler_state import FinishDecision
from kv_scheduler_state.plan import NoReason
from vllm_adapter.codes import codes_of
from vllm_adapter.observe.metric_tables import METRICS
from vllm_adapter.observe.recorder import Recorder


def test_bytes_are_labelled_by_the_backend_that_moved_them_and_never_by_a_guess() -> None:
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


def test_a_kind_of_exception_is_limited_whatever_requests_it_is_about(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(now_s=lambda: 0.0)
    for number in range(150):
        recorder.trouble("storing the words of a stream", ValueError("odd"), f"request r{number}")
    recorder.trouble("heartbeat", ValueError("odd"))
    lines = [record.getMessage() for record in caplog.records]
    assert (
        lines[0]
        == "request r0: storing the words of a stream failed unexpectedly; the other orders go on (ValueError: odd)"
    )
    assert lines[10:] == ["heartbeat failed unexpectedly; the other orders go on (ValueError: odd)"]
    assert [bool(record.exc_text) for record in caplog.records] == [True, *[False] * 9, True], (
        "one traceback of each kind"
    )
    taken = recorder.take()
    assert taken is not None
    assert sum(taken["num_callback_errors"]) == 151


def test_subjects_that_are_remembered_are_bounded() -> None:
    recorder = Recorder()
    assert [recorder.is_first("peer", f"p{number}") for number in range(300)] == [number < 256 for number in range(300)]
    assert not recorder.is_first("peer", "p0")


def test_a_handshake_that_fails_by_its_time_limit_has_a_bucket_and_the_hosts_buckets_stay() -> None:
    """Two attempts of 5 s and a pause take more than 10 s."""
    buckets = {metric.key: metric.buckets for metric in METRICS}
    assert buckets["handshake_duration"][-4:] == (5.0, 10.0, 20.0, 60.0)
    assert {max(buckets[key]) for key in ("transfer_duration", "post_duration")} == {5.0}


# ------------------------------------------------------------------------------------------------------ labels with a zero

ENDS_NO_READ = """backend-unavailable bind-failed registration-failed
    malformed-query not-ready oversized-query pipeline-stages unknown-command unknown-rank wrong-arity wrong-frames wrong-type
    ask-repeated first-rank-refused recently-failed"""
"""Library codes at the start, of a listener (`refused` for its peer), and those that another code replaces."""


def test_every_code_that_a_counter_can_have_is_shown_from_the_start() -> None:
    """The fixture of all tests here compares the codes that occur; this, the words of the sources."""
    failed, torn, unstreamed, refused, withheld = (
        set(codes_of(f"num_{key}"))
        for key in ("failed_reads", "torn_streams", "unstreamed_prompts", "refused_tickets", "withheld_tickets")
    )
    words = words_of("kv_scheduler_state") | words_of("vllm_adapter")
    assert refused == {word for word in words if re.fullmatch(r"ticket-[a-z-]+", word)}
    assert {word for word in words if re.fullmatch(r"stream-[a-z]+", word)} - NO_CODES - STEPS <= torn <= failed
    assert set(get_args(NoReason)) <= unstreamed | torn
    assert withheld == set(re.findall(r"`([a-z-]+)`", (FinishDecision.__doc__ or "").partition("withheld_code")[2]))
    others = {code for table in (CODES, ERROR_CODES) for code, facts in table.items() if facts.fault != "local"}
    missing = {code for code in others - failed - unstreamed if not code.startswith("nixl-")}
    assert missing == set(ENDS_NO_READ.split())
