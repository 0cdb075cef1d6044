"""Old against new: medians, direction, and the second series that must agree before a figure counts as slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from kvdev.comparing import Sample, compare, speed


def source(*values: float, unit: str = "ms") -> Callable[[], Sample]:
    """Return a benchmark that gives these values in turn, then the last one again and again."""
    steps: Iterator[float] = chain(values, repeat(values[-1]))
    return lambda: {"figure": (unit, next(steps), 10.0)}


@pytest.mark.parametrize(
    ("unit", "old", "new", "expected"),
    [("ms", 10.0, 20.0, 0.5), ("bytes", 10.0, 5.0, 2.0), ("MB/s", 10.0, 5.0, 0.5), ("responses/s", 10.0, 20.0, 2.0)],
)
def test_speed_is_above_one_where_new_is_faster(unit: str, old: float, new: float, expected: float) -> None:
    assert speed(unit, old, new) == expected


def test_medians_are_compared_and_one_slow_run_does_not_count() -> None:
    (figure,) = compare(source(10.0), source(10.0, 90.0, 10.0), runs=3)
    assert (figure.old, figure.new, figure.speed, figure.is_slower) == (10.0, 10.0, 1.0, False)


def test_a_figure_is_slower_only_if_a_second_series_agrees() -> None:
    (once,) = compare(source(10.0), source(20.0, 20.0, 20.0, 10.0), runs=3)
    assert (once.speed, once.repeated_speed, once.is_slower) == (0.5, 1.0, False)
    (twice,) = compare(source(10.0), source(20.0), runs=3)
    assert (twice.repeated_speed, twice.is_slower) == (0.5, True)


def test_what_looks_slower_is_told_before_the_second_series(capsys: pytest.CaptureFixture[str]) -> None:
    compare(source(10.0), source(20.0, 20.0, 20.0, 10.0), runs=3)
    said = capsys.readouterr()
    assert "looks slower: figure: 10 ms, now 20: 0.500 (beside its baseline 1.000, now 0.500)" in said.out + said.err


def test_five_per_cent_are_tolerated() -> None:
    (figure,) = compare(source(95.0), source(100.0), runs=3)
    assert figure.repeated_speed is None
    assert not figure.is_slower
