"""The judges themselves: each says no when it must."""

from __future__ import annotations

import pytest
from judging import SLOTS, TRANSFERS, Alone, Reply, assert_no_lease_left, assert_nothing_failed, handed_over

PAGE = f'{TRANSFERS}{{engine="0"}} 3.0\nvllm:nixl_num_failed_transfers_total{{engine="0"}} 0.0\n{SLOTS}{{engine="0"}} 1.0\n'


def test_a_wrong_text_and_a_refused_request_are_told() -> None:
    right = Alone({1: "one", 2: "two"})
    right.assert_same([Reply(1, 200, "one"), Reply(2, 200, "two")])
    with pytest.raises(AssertionError, match="1 of 2 differ"):
        right.assert_same([Reply(1, 200, "one"), Reply(2, 200, "one")])
    with pytest.raises(AssertionError, match="were not answered"):
        right.assert_same([Reply(1, 500, "")])
    with pytest.raises(AssertionError, match="no request"):
        right.assert_same([])


def test_hand_overs_add_up_over_engines() -> None:
    assert handed_over([PAGE, PAGE, ""]) == 6


def test_a_lease_that_stays_is_told() -> None:
    with pytest.raises(AssertionError, match="still held"):
        assert_no_lease_left(lambda: [PAGE], lambda: None, within_s=0)
    assert_no_lease_left(lambda: [PAGE.replace("1.0", "0.0")], lambda: None, within_s=0)


def test_a_failed_read_is_told() -> None:
    assert_nothing_failed([PAGE])
    with pytest.raises(AssertionError, match="nixl_num_failed_transfers"):
        assert_nothing_failed(
            [PAGE.replace('failed_transfers_total{engine="0"} 0.0', 'failed_transfers_total{engine="0"} 2.0')]
        )
