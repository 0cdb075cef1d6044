"""Requests with the same ticket share one hand-over, requests with another one never do, whatever their ids."""

from __future__ import annotations

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
