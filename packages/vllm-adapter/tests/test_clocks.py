"""Clocks of processes, aligned by messages alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapter.cli.clocks import Clocks

MOMENTS = st.floats(0, 60)
SHIFTS = st.floats(-1e5, 1e5)


def test_messages_both_ways_give_the_difference_and_how_certain_it_is() -> None:
    clocks = Clocks()
    clocks.before("P", 10.000, "D", 3.002)
    assert clocks.difference("P", "D") is None, "a message one way bounds one side only"
    clocks.before("D", 3.004, "P", 10.008)
    found = clocks.difference("P", "D")
    assert found == pytest.approx((-7.001, 0.003))
    assert clocks.difference("D", "P") == pytest.approx((7.001, 0.003))
    assert clocks.difference("P", "P") == (0.0, 0.0)
    assert clocks.difference("P", "X") is None


def test_of_several_messages_the_fastest_counts() -> None:
    clocks = Clocks()
    for way_s in (0.5, 0.001, 0.9):
        clocks.before("P", 1.0, "D", 1.0 + way_s)
        clocks.before("D", 2.0, "P", 2.0 + way_s)
    assert clocks.difference("P", "D") == pytest.approx((0.0, 0.001))


def test_a_third_clock_connects_two_that_never_met() -> None:
    clocks = Clocks()
    for name, shift_s in (("P", 100.0), ("D", -50.0)):
        clocks.before("desk", 1.0, name, shift_s + 1.001)
        clocks.before(name, shift_s + 1.001, "desk", 1.002)
    assert clocks.difference("P", "D") == pytest.approx((-150.0, 0.002))
    assert clocks.contradiction_s() == 0.0


def test_bounds_that_cannot_all_hold_are_told() -> None:
    clocks = Clocks()
    clocks.before("P", 1.0, "D", 0.5)
    clocks.before("D", 0.5, "P", 0.9)
    assert clocks.contradiction_s() == pytest.approx(0.1)


@given(st.lists(SHIFTS, min_size=3, max_size=3), st.lists(st.tuples(MOMENTS, st.floats(0, 1)), min_size=3, max_size=20))
def test_the_truth_is_always_within_the_uncertainty(shifts: list[float], messages: list[tuple[float, float]]) -> None:
    names = ("P", "D", "R")
    clocks = Clocks()
    for number, (sent_s, way_s) in enumerate(messages):
        sender, receiver = number % 3, (number + 1 + number // 3 % 2) % 3
        clocks.before(names[sender], sent_s + shifts[sender], names[receiver], sent_s + way_s + shifts[receiver])
    for one in range(3):
        for other in range(3):
            found = clocks.difference(names[one], names[other])
            if found is not None:
                assert abs(shifts[other] - shifts[one] - found[0]) <= found[1] + 1e-6
    assert clocks.contradiction_s() < 1e-5
