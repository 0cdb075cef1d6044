"""Moments of hand-overs as processes keep them: which, how many, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fakes import Outcome, order
from lease_bench import Bench as LeaseBench
from prompts import Prompt
from read_bench import Bench
from scheduler_engine import PREFILL, TEXT, Engine

from kv_scheduler_state import UNBOUND, StepPlan
from vllm_adapter.observe.hand_overs import MOST_HAND_OVERS, HandOverLog, short_id
from vllm_adapter.observe.recorder import Recorder
from vllm_adapter.scheduler.followed import Arrival, FollowedRequests
from vllm_adapter.steps import StepReport


def only(log: HandOverLog) -> Any:
    (entry,) = log.describe()
    return entry


def test_a_log_forgets_the_oldest_and_keeps_ids_short() -> None:
    log = HandOverLog()
    for number in range(MOST_HAND_OVERS + 40):
        log.mark(f"r{number}", "arrived", float(number), role="consumer")
        for stage in ("allocated", "ordered", "reported", "scheduled", "first_token"):
            log.mark(f"r{number}", stage, float(number))
    announced = log.describe()
    assert len(announced) == MOST_HAND_OVERS
    assert announced[0]["request_id"] == "r40"
    log.mark("r50", "freed", 0.0)
    assert log.describe()[0]["request_id"] == "r41", "a hand-over whose beginning is forgotten is not described"
    long = "x" * 70_000 + "-suffix"
    log.mark(long, "arrived", 1.0, role="consumer")
    log.mark(long, "allocated", 2.0)
    last: Any = log.describe()[-1]
    assert len(last["request_id"]) < 170
    assert last["request_id"].endswith("-suffix")
    assert last["moments"] == {"arrived": 1.0, "allocated": 2.0}
    assert short_id("cmpl-1") == "cmpl-1"


def test_the_first_moment_of_a_stage_counts_and_unknown_requests_cost_nothing() -> None:
    log = HandOverLog()
    log.mark("nobody", "arrived", 1.0)
    assert log.describe() == []
    log.mark("r", "arrived", 1.0, role="producer")
    log.mark("r", "scheduled", 2.0)
    log.mark("r", "scheduled", 9.0)
    assert only(log)["moments"] == {"arrived": 1.0, "scheduled": 2.0}
    log.mark("r", "arrived", 11.0, role="producer")
    assert only(log)["moments"] == {"arrived": 11.0}, "an id that is used again is another hand-over"


def test_a_scheduler_stamps_the_way_of_a_prompt_that_it_hands_over() -> None:
    engine = Engine("P")
    engine.side.arrived(Arrival("r1", PREFILL, len(TEXT), Prompt(TEXT), frontend_s=0.25))
    engine.now_s = 1.0
    engine.allocate("r1", [1, 2, 3])
    engine.step()
    engine.now_s = 2.0
    assert engine.end("r1", TEXT, [1, 2, 3]) is not None
    engine.now_s = 3.0
    engine.report(sent=("r1",))
    announced: Any = engine.side.hand_overs()
    (entry,) = announced["hand_overs"]
    assert entry["moments"] == {"arrived": 0.0, "scheduled": 1.0, "answered": 2.0, "freed": 3.0}
    assert (entry["role"], entry["frontend_s"], entry["tokens"]) == ("producer", 0.25, len(TEXT))
    assert TEXT not in json.dumps(announced)


def taken_over(count: Callable[[], int]) -> Engine:
    """Return a decode engine that has read a hand-over and scheduled its first step at 5 s; `count` counts its output."""
    ticket = Engine("P").prefill("p1", TEXT)
    engine = Engine("D")
    engine.side.arrived(Arrival("r1", ticket, len(TEXT), Prompt(TEXT), output_tokens=count))
    engine.now_s = 1.0
    engine.allocate("r1", [1, 2, 3], external=len(TEXT))
    engine.now_s = 2.0
    engine.step()
    engine.now_s = 4.0
    engine.report(received=("r1",))
    engine.side.take_stats()
    engine.now_s = 5.0
    engine.allocate("r1", [1, 2, 3])
    return engine


def test_a_scheduler_stamps_the_way_of_a_prompt_that_it_takes_over_up_to_its_first_token() -> None:
    tokens: list[int] = []
    engine = taken_over(lambda: len(tokens))
    engine.now_s = 6.0
    engine.side.take_stats()  # the end of an earlier step, as with asynchronous scheduling: no token of this request yet
    tokens.append(7)
    engine.now_s = 7.0
    engine.side.take_stats()
    engine.now_s = 8.0
    engine.side.take_stats()
    entry = only(engine.side._recorder.hand_overs)
    assert entry["moments"] == {
        "arrived": 0.0,
        "allocated": 1.0,
        "ordered": 2.0,
        "reported": 4.0,
        "scheduled": 5.0,
        "first_token": 7.0,
    }
    assert (entry["peer_engine_id"], entry["peer_request_id"]) == ("P", "p1")


def test_a_request_whose_first_token_is_its_last_has_one_too_and_nothing_is_kept_of_it() -> None:
    engine = taken_over(lambda: 1)
    engine.now_s = 6.0
    engine.end("r1", TEXT, [1, 2, 3])
    entry = only(engine.side._recorder.hand_overs)
    assert entry["moments"]["first_token"] == 6.0
    requests = engine.side._requests
    assert (requests.live, requests._starting) == ({}, {}), "the host's request is not kept alive"


def test_requests_that_take_part_in_no_hand_over_leave_nothing() -> None:
    engine = Engine("D")
    engine.side.arrived(Arrival("r1", None, len(TEXT), Prompt(TEXT), output_tokens=lambda: 1))
    engine.end("r1", TEXT, [1, 2, 3])
    assert engine.side.hand_overs()["hand_overs"] == []


def test_a_read_shows_handshake_and_plan_only_at_first_contact() -> None:
    bench = Bench()
    bench.reads.read(order())
    bench.now_s = 101.0
    bench.handshakes.answer(Outcome())
    bench.now_s = 105.0
    bench.finish(queue_s=0.5, fence_s=0.25)
    first = bench.ends[0]
    assert (first.times.connected_s, first.times.planned_s, first.times.posted_s) == (101.0, 101.0, 101.0)
    log = HandOverLog()
    log.read_ended(first, 106.0, 107.0)
    entry = only(log)
    assert entry["moments"] == {
        "ordered": 100.0,
        "connected": 101.0,
        "planned": 101.0,
        "posted": 101.0,
        "started": 101.5,
        "data": 104.75,
        "fence": 105.0,
        "ended": 105.0,
        "taken": 106.0,
        "completed": 107.0,
    }
    assert (entry["bytes"], entry["tokens"], entry["code"]) == (100, 256, "")
    bench.reads.read(order("r2"))
    bench.finish("r2/0.0")
    assert bench.ends[1].times.connected_s is None


def test_a_rank_that_is_read_from_stamps_grant_read_and_release() -> None:
    bench = LeaseBench()
    bench.lease()
    bench.now_s += 2.0
    bench.read()
    bench.leases.tick()
    moments = only(bench.recorder.hand_overs)["moments"]
    assert set(moments) == {"granted", "read", "freed"}
    assert moments["read"] - moments["granted"] == 2.0


def test_a_host_that_cannot_count_tokens_costs_a_moment_and_no_step() -> None:
    def count() -> int:
        raise AttributeError("num_output_tokens")

    engine = taken_over(count)
    engine.side.take_stats()
    engine.end("r1", TEXT, [1, 2, 3])
    assert "first_token" not in only(engine.side._recorder.hand_overs)["moments"]


def test_only_traced_requests_have_links_and_each_lease_is_reported_once() -> None:
    announced: list[str] = []
    requests = FollowedRequests(Recorder(), float, lambda _link, name, _ns: announced.append(name))
    headers = {"traceparent": "00-aa-bb-01"}
    for name, sent, keeps in (("a", headers, True), ("b", headers, False), ("c", None, True)):
        requests.begin(
            Arrival(name, PREFILL, 16, identity=UNBOUND, trace_headers=sent), "producer", 0.0, is_early=False
        )
        requests.finished(name, is_error=False, keeps_blocks=keeps)
    for sent_ids in (("a", "b", "c"), ("a",)):
        requests.take(StepReport(sent=sent_ids))
    assert announced == ["a"]
    for name, sent in (("traced", headers), ("plain", None)):
        requests.begin(Arrival(name, {}, 16, identity=UNBOUND, trace_headers=sent), "consumer", 0.0, is_early=False)
    assert requests.ordered(StepPlan(reads=(order("traced", is_reported=False),)), 0.0) == {}
    assert list(requests.ordered(StepPlan(reads=(order("plain"), order("traced"))), 0.0)) == ["traced"]
