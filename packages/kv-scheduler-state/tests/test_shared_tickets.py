"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_scheduler_state._handovers import HandOver, HandOvers, key_of
from kv_scheduler_state._ticket import HandoffTicket, PeerAddress


class Record:
    """A holder of a ticket, as `HandOvers` sees one."""

    def __init__(self, engine: str, request_id: str, nonce: str) -> None:
        peer = PeerAddress(engine, "127.0.0.1", 5600, 1, 1, 1, None, None)
        self.ticket = HandoffTicket("handoff", peer, request_id, (), nonce=nonce)
        self.state = "queued"
        self.hand_over: HandOver | None = None


@given(
    st.lists(
        st.tuples(st.sampled_from("AB"), st.sampled_from("xy"), st.sampled_from("12"), st.integers(0, 3)), max_size=30
    )
)
def test_holders_are_those_of_equal_tickets(events: list[tuple[str, str, str, int]]) -> None:
    hand_overs, waiting = HandOvers(), list[Record]()
    for engine, request_id, nonce, leaving in events:
        if leaving == 0 and waiting:
            hand_overs.leave(waiting.pop(0))
        else:
            waiting.append(Record(engine, request_id, nonce))
            hand_overs.join(waiting[-1])
        by_key: dict[object, list[Record]] = {}
        for record in waiting:
            by_key.setdefault(key_of(record.ticket), []).append(record)
        assert len(hand_overs) == len(by_key)
        shared = [{id(record.hand_over) for record in records} for records in by_key.values() if len(records) > 1]
        assert all(len(each) == 1 for each in shared)
        assert len(set().union(*shared)) == len(shared)
        for records in by_key.values():
            hand_over = records[0].hand_over
            assert hand_over.waiting == len(records) if hand_over else len(records) == 1
    for record in waiting:
        hand_overs.leave(record)
    assert len(hand_overs) == 0


def test_a_ticket_that_was_read_to_the_end_is_read_by_nobody_else() -> None:
    """As the second child of a request with n > 1 that arrives after the first one's read: a slow machine, or a fast wire."""
    hand_overs = HandOvers()
    first, late, later = Record("A", "x", "1"), Record("A", "x", "1"), Record("A", "x", "1")
    hand_overs.join(first)
    hand_overs.read_ended(first, is_passed=False, is_good=True)
    for record in (late, later):
        hand_overs.join(record)
        assert record.hand_over is not None
        assert record.hand_over.is_spent
        assert record.hand_over.is_wanted_by_others, "the peer is not told a second time"
    hand_overs.leave(late)
    again = Record("A", "x", "2")
    hand_overs.join(again)
    assert again.hand_over is None, "a later hand-over by the same id is another one"
    assert len(hand_overs) == 1


@pytest.mark.parametrize("ending", [{"is_passed": False}, {"is_passed": True}])
def test_a_ticket_whose_read_failed_or_was_passed_on_may_be_read_again(ending: dict[str, bool]) -> None:
    hand_overs = HandOvers()
    first, second = Record("A", "x", "1"), Record("A", "x", "1")
    hand_overs.join(first)
    hand_overs.read_ended(first, **ending)
    hand_overs.join(second)
    assert second.hand_over is None


def test_the_tickets_that_are_remembered_are_bounded() -> None:
    hand_overs = HandOvers()
    for number in range(1025):
        record = Record("A", f"x{number}", "1")
        hand_overs.join(record)
        hand_overs.read_ended(record, is_passed=False, is_good=True)
    oldest, next_one = Record("A", "x0", "1"), Record("A", "x1", "1")
    hand_overs.join(oldest)
    hand_overs.join(next_one)
    assert oldest.hand_over is None
    assert next_one.hand_over is not None
    assert len(hand_overs) == 1
