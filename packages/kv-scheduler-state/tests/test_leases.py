"""Leases on one worker."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.invariants import problems

from kv_scheduler_state import GrantOrder, LeaseTable, StepPlan
from kv_scheduler_state.clock import ObservedClock
from kv_scheduler_state.errors import InvalidConfig, InvalidEvent


def granted(lease_s=30.0, *, at=0.0, **changes):
    table = LeaseTable(**changes)
    table.grant("p1", lease_s=lease_s, fence=(0, 7), now_s=at)
    return table


def test_a_renewal_moves_the_deadline_and_never_back():
    table = granted(max_pause_s=math.inf)
    assert table.renew("p1", now_s=1.0)
    assert table.snapshot(now_s=1.0)[0]["left_s"] == 29.0
    assert table.renew("p1", now_s=20.0)
    assert table.snapshot(now_s=20.0)[0]["left_s"] == 20.0
    assert not table.renew("p2", now_s=20.0)
    for now_s in (25.0, 30.0, 35.0, 39.9):
        assert table.take_ended(now_s=now_s) == ()
    (end,) = table.take_ended(now_s=40.0)
    assert (end.reason, end.fence, end.is_revoked, end.readers_done) == ("expired", (0, 7 | 1 << 63), False, 0)
    assert table.snapshot(now_s=40.0) == ()
    assert table.read_complete("p1", reader="r", reader_count=1, now_s=41.0) == "expired"


def test_a_clock_that_is_set_back_or_forth_ends_nothing_and_stops_nothing():
    table = granted(at=1000.0)
    assert table.take_ended(now_s=9000.0) == ()
    assert table.take_ended(now_s=10.0) == ()
    ends = [end for now_s in range(11, 41) for end in table.take_ended(now_s=float(now_s))]
    assert [end.request_id for end in ends] == ["p1"]


READINGS = st.one_of(st.floats(0, 1e9), st.floats(0, 10), st.integers(0, 100))


@given(st.lists(READINGS, min_size=2, max_size=30), st.sampled_from((0.5, 5.0, math.inf)))
def test_observed_time_never_runs_backwards_nor_jumps(readings, max_step_s):
    clock = ObservedClock(max_step_s)
    assert clock.observed_s == 0.0
    before, observed = readings[0], clock.observe(readings[0])
    assert observed == readings[0]
    for reading in readings[1:]:
        expected = min(max(0.0, reading - before), max_step_s)
        after = clock.observe(reading)
        assert after == clock.observed_s >= observed
        assert after - observed == pytest.approx(expected, abs=1e-6)
        before, observed = reading, after


def test_readers_count_once_each_and_only_as_announced():
    table = granted()
    calls = [("a", 3), ("a", 3), ("b", 2), ("b", 0), ("b", True), ("", 3), (7, 3), ("b", 5000), ("b", 3)]
    verdicts = [table.read_complete("p1", reader=reader, reader_count=count, now_s=0.0) for reader, count in calls]
    refused = ["bad-count"] * 3 + ["bad-reader"] * 2 + ["bad-count"]
    assert verdicts == ["counted", "duplicate", *refused, "counted"]
    assert table.read_complete("p1", reader="c", reader_count=3, now_s=0.0) == "complete"
    assert table.take_ended(now_s=0.0)[0].readers_done == 3
    assert table.read_complete("p1", reader="c", reader_count=3, now_s=0.0) == "duplicate"
    assert table.read_complete("p9", reader="c", reader_count=3, now_s=0.0) == "unknown"


def test_readers_that_are_faster_than_the_grant_count():
    table = LeaseTable()
    table.expect("p1", now_s=0.0)
    assert not table.renew("p1", now_s=0.0)
    assert table.read_complete("p1", reader="a", reader_count=1, now_s=0.0) == "complete"
    assert table.read_complete("p1", reader="b", reader_count=1, now_s=0.0) == "bad-count"
    assert table.take_ended(now_s=1.0) == ()
    table.grant("p1", lease_s=30.0, fence=(0, 7), now_s=2.0)
    assert [end.reason for end in table.take_ended(now_s=2.0)] == ["read"]


def test_a_lease_that_is_taken_back_ends_at_once_and_one_that_has_ended_is_no_mistake():
    table = LeaseTable()
    for index in range(4):
        table.grant(f"p{index}", lease_s=30.0, fence=None, now_s=float(index))
    table.read_complete("p3", reader="a", reader_count=2, now_s=4.0)
    assert not table.apply(StepPlan(revokes=("p2", "gone-already")), now_s=4.0)
    (end,) = table.take_ended(now_s=4.0)
    assert (end.request_id, end.reason, end.is_revoked, end.is_reported, end.fence) == (
        "p2", "expired", True, True, None
    )  # fmt: skip
    assert not table.apply(StepPlan(grants=(GrantOrder("p4", 30.0, None),), revokes=("p4",)), now_s=4.0)
    assert [(end.request_id, end.is_revoked) for end in table.take_ended(now_s=4.0)] == [("p4", True)], "not too early"


def test_mistakes_of_the_caller_are_refused_and_change_nothing():
    table = granted()
    for lease_s in (0.0, -1.0, math.nan, math.inf, True, "30"):
        with pytest.raises(InvalidEvent):
            table.grant("p2", lease_s=lease_s, fence=None, now_s=0.0)
    for now_s in (-1.0, math.nan, math.inf, None, "0", True):
        with pytest.raises(InvalidEvent):
            table.take_ended(now_s=now_s)
    plan = StepPlan(expects=("p1", "p2"), grants=(GrantOrder("p3", -1.0, None),))
    refusals = table.apply(plan, now_s=0.0)
    assert [(refusal.request_id, refusal.order, refusal.code) for refusal in refusals] == [
        ("p1", "expect", "illegal-transition"),
        ("p3", "grant", "invalid-event"),
    ]
    assert "lease request 'p1' in state 'granted'" in refusals[0].message
    assert table.live_count() == 2


def test_ends_are_forgotten_in_the_end():
    table = LeaseTable()
    names = [f"p{number}" for number in range(1025)]
    for request_id in names:
        table.grant(request_id, lease_s=1.0, fence=None, now_s=0.0)
        table.read_complete(request_id, reader="a", reader_count=1, now_s=0.0)
    verdicts = [table.read_complete(name, reader="a", reader_count=1, now_s=0.0) for name in names[:2]]
    assert verdicts == ["unknown", "duplicate"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("gnrt"), st.integers(0, 5), st.floats(0.1, 4.0)), max_size=60))
def test_a_lease_ends_exactly_when_its_last_deadline_passes(events):
    table = LeaseTable(max_pause_s=math.inf)
    deadlines, now_s, ended = {}, 0.0, []
    for kind, index, value in events:
        name = f"p{index}"
        if kind == "g" and name not in deadlines:
            table.grant(name, lease_s=3 * value, fence=None, now_s=now_s)
            deadlines[name] = now_s + 3 * value, 2 * value
        elif kind == "n":
            assert table.renew(name, now_s=now_s) == (name in deadlines)
            if name in deadlines:
                at_s, extension_s = deadlines[name]
                deadlines[name] = max(at_s, now_s + 3 * (extension_s / 2) * (2 / 3)), extension_s
        elif kind == "r" and name in deadlines:
            table.release(name, now_s=now_s)
            assert [end.request_id for end in table.take_ended(now_s=now_s)][-1] == name
            del deadlines[name]
        else:
            now_s += value
            ended = [end.request_id for end in table.take_ended(now_s=now_s)]
            due = sorted((at_s, name) for name, (at_s, _) in deadlines.items() if at_s <= now_s + 1e-9)
            assert set(ended) <= {name for _, name in due}
            assert {name for at_s, name in due if at_s < now_s - 1e-9} <= set(ended)
            for name in ended:
                del deadlines[name]
        assert problems(table) == []


def test_a_clock_that_cannot_advance_is_refused():
    with pytest.raises(InvalidConfig):
        ObservedClock(0.0)


def test_leases_that_end_early_leave_nothing_until_their_deadlines():
    table = LeaseTable()
    for number in range(1000):
        table.expect(f"r{number}", now_s=0.0)
        table.grant(f"r{number}", lease_s=86_400.0, fence=None, now_s=0.0)
        table.read_complete(f"r{number}", reader="d", reader_count=1, now_s=0.0)
        table.take_ended(now_s=0.0)
    assert len(table._due) < 100
    table.expect("last", now_s=0.0)
    table.grant("last", lease_s=30.0, fence=None, now_s=0.0)
    for _ in range(2000):
        table.expect("other", now_s=0.0)
        table.grant("other", lease_s=86_400.0, fence=None, now_s=0.0)
        table.read_complete("other", reader="d", reader_count=1, now_s=0.0)
        table.take_ended(now_s=0.0)
    ends = [end for now_s in range(32) for end in table.take_ended(now_s=float(now_s))]
    assert [(end.request_id, end.reason) for end in ends] == [("last", "expired")]
