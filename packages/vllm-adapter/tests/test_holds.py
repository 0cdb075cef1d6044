"""The producer's coordinator: leases, fences and notifications, with the real lease table and wire."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakeAgent
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_handshake import Codec
from kv_scheduler_state import FenceOrder, GrantOrder, LeaseTable, StepPlan
from vllm_adapter.worker.transfer.leases import HoldCoordinator, HoldObserver

FENCE = (3, 77)


class Bench:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.sent: list[str] = []
        self.counts: Counter[str] = Counter()
        self.agent = FakeAgent()
        self.lags: list[float] = []
        self.log: list[str] = []
        observer = HoldObserver(
            self.sent.append,
            lambda key: self.counts.update([key]),
            lambda _, lag_s: self.lags.append(lag_s),
            self.log.append,
        )
        self.holds = HoldCoordinator(
            LeaseTable(max_pause_s=1e9), Codec(), observer, heartbeat_s=5.0, now_s=lambda: self.now_s
        )
        self.holds.attach(self.agent)  # type: ignore[arg-type]

    def expect(self, request_id: str = "r") -> None:
        self.holds.apply(StepPlan(expects=(request_id,), fences=(FenceOrder(request_id, *FENCE),)))

    def grant(self, request_id: str = "r", lease_s: float = 30.0) -> None:
        self.holds.apply(StepPlan(grants=(GrantOrder(request_id, lease_s, FENCE),)))

    def beat(self, after_s: float, *request_ids: str, reader: str = "D") -> None:
        self.now_s += after_s
        for payload in Codec().heartbeats(request_ids or ("r",)):
            self.holds.notified(reader, payload)

    def read(self, request_id: str = "r", *, reader: str = "D", count: int = 1) -> None:
        self.holds.notified(reader, Codec().read_complete(request_id, count))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_read_ends_the_lease_after_the_fence_was_bumped(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.read()
    assert bench.sent == []
    bench.holds.tick()
    assert bench.sent == ["r"]
    ((slot, generation),) = bench.agent.fences
    assert slot == FENCE[0]
    assert generation != FENCE[1]


def test_a_reader_quicker_than_the_grant_is_counted(bench: Bench) -> None:
    bench.expect()
    bench.read()
    bench.grant()
    bench.holds.tick()
    assert bench.sent == ["r"]


def test_all_readers_must_report_and_none_counts_twice(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.read(reader="D0", count=2)
    bench.read(reader="D0", count=2)
    bench.holds.tick()
    assert bench.sent == []
    bench.read(reader="D1", count=2)
    bench.holds.tick()
    assert bench.sent == ["r"]


def test_heartbeats_keep_a_lease_and_silence_ends_it(bench: Bench) -> None:
    bench.expect()
    bench.grant(lease_s=30)
    bench.now_s += 25
    for payload in Codec().heartbeats(["r", "unknown"]):
        bench.holds.notified("D", payload)
    bench.now_s += 19
    bench.holds.tick()
    assert bench.sent == []
    bench.now_s += 2
    bench.holds.tick()
    assert bench.sent == ["r"]
    assert bench.counts["num_kv_expired_reqs"] == 1
    bench.read()
    assert bench.counts["num_notifications_after_expiry"] == 1


def test_heartbeats_on_time_have_no_lag_and_late_ones_what_exceeds_the_interval(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.beat(12.0)  # the ticket was on its way
    assert bench.lags == []
    bench.beat(5.0)
    bench.beat(4.5)
    bench.beat(11.5)
    assert bench.lags == [0.0, 0.0, 6.5]


def test_any_readers_heartbeat_breaks_the_silence_and_strangers_do_not(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.beat(1.0, reader="D0")
    bench.beat(6.0, reader="D1")
    bench.beat(0.5, reader="D0")
    bench.beat(9.0, "unknown")
    assert bench.lags == [1.0, 0.0]


def test_a_heartbeat_for_several_leases_is_as_late_as_for_the_most_neglected(bench: Bench) -> None:
    for request_id in ("a", "b", "c"):
        bench.expect(request_id)
        bench.grant(request_id)
    bench.beat(0.0, "a", "b")
    bench.beat(6.0, "b")
    bench.beat(2.0, "c", "a", "b")
    assert bench.lags == [1.0, 3.0]


def test_the_silence_in_which_a_lease_ends_counts_and_is_logged(bench: Bench) -> None:
    for request_id in ("heard", "unheard"):
        bench.expect(request_id)
        bench.grant(request_id)
    bench.beat(29.0, "heard")
    bench.now_s += 20.5
    bench.holds.tick()
    assert bench.sent == ["heard", "unheard"]
    assert bench.lags == [15.5]
    assert "last heartbeat 20.5 s ago" in bench.log[0]
    assert "no heartbeat ever came" in bench.log[1]


def test_a_request_id_that_comes_again_has_no_past(bench: Bench) -> None:
    for _ in range(2):
        bench.expect()
        bench.grant()
        bench.beat(20.0)
        bench.read()
        bench.holds.tick()
    assert bench.lags == []


def test_a_request_that_was_never_handed_over_is_not_reported(bench: Bench) -> None:
    bench.expect()
    bench.holds.apply(StepPlan(releases=("r",)))
    bench.holds.tick()
    assert bench.sent == []


def test_a_revoked_lease_is_reported(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.holds.apply(StepPlan(revokes=("r",)))
    bench.holds.tick()
    assert bench.sent == ["r"]


def test_an_order_that_contradicts_the_table_does_not_stop_the_others(bench: Bench) -> None:
    bench.holds.apply(
        StepPlan(expects=("a", "a"), grants=(GrantOrder("ghost", 3.0, None), GrantOrder("a", 30.0, None)))
    )
    bench.read("a")
    bench.holds.tick()
    assert bench.sent == ["a"]


@given(st.binary(max_size=64))
def test_no_notification_raises_or_frees_anything(payload: bytes) -> None:
    assume(not payload.startswith(b"r:"))  # that one is the request's own
    bench = Bench()
    bench.expect()
    bench.grant()
    bench.holds.notified("stranger", payload)
    bench.holds.tick()
    assert bench.sent == []


def test_all_leases_end_at_once_fences_first_and_are_reported_once(bench: Bench) -> None:
    bench.expect("granted")
    bench.grant("granted")
    bench.expect("expected")
    bench.holds.end_all()
    assert bench.sent == ["granted"], "nobody waits for a request that was never handed over"
    assert bench.agent.fences == [(FENCE[0], FENCE[1] | 1 << 63)]
    bench.read("granted")
    bench.holds.end_all()
    bench.holds.tick()
    assert bench.sent == ["granted"]
    assert bench.holds.live_count() == 0


def test_all_leases_end_also_without_a_fence_array(bench: Bench) -> None:
    bench.expect()
    bench.grant()
    bench.holds.end_all(has_fences=False)
    assert (bench.sent, bench.agent.fences) == (["r"], [])


def test_a_grant_of_lost_pages_ends_at_once(bench: Bench) -> None:
    bench.holds.expect(["r"])
    bench.holds.apply(StepPlan(grants=(GrantOrder("r", 30.0, FENCE), GrantOrder("good", 30.0, None))), ["r"])
    bench.holds.tick()
    assert bench.sent == ["r"]
    assert bench.holds.live_count() == 1
