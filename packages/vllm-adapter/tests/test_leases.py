"""The producer's coordinator: leases, fences and notifications, with the real lease table and wire."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from lease_bench import FENCE, Bench
from scheduler_engine import Engine

from kv_handshake import Codec
from kv_scheduler_state import StepPlan


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_read_ends_the_lease_after_the_fence_was_bumped(bench: Bench) -> None:
    bench.lease()
    bench.read()
    assert bench.sent == ["r"], "at once: the timer's next turn may be 50 ms away"
    ((slot, generation),) = bench.agent.fences
    assert slot == FENCE[0]
    assert generation != FENCE[1]


@pytest.mark.parametrize("count", [0, 2])
def test_what_is_said_of_a_reader_in_push_mode_is_what_becomes_of_the_lease(bench: Bench, count: int) -> None:
    """Other ranks of a reader that has begun to report count on; only a lease that nobody has read ends at once."""
    bench.lease("c-7-5f0c11d2")
    if count:
        bench.read("c-7-5f0c11d2", reader="D0", count=count)
    bench.leases.notified("push", b"PUSH_REG:" + msgspec.msgpack.encode({"request_id": "c-7-91b7aa03"}))
    assert bench.sent == ([] if count else ["c-7-5f0c11d2"])
    (line,) = bench.log
    assert ("is left to expire" if count else "ends now") in line


def test_silence_ends_a_lease_and_late_reports_are_counted(bench: Bench) -> None:
    bench.lease(lease_s=30)
    bench.now_s += 31
    bench.leases.tick()
    bench.read()
    assert bench.sent == ["r"]
    assert bench.counts == {"num_kv_expired_reqs": 1, "num_notifications_after_expiry": 1}


def test_heartbeats_on_time_have_no_lag_and_late_ones_what_exceeds_the_interval(bench: Bench) -> None:
    bench.lease()
    bench.beat(12.0)  # the ticket was on its way
    assert bench.lags == []
    bench.beat(5.0)
    bench.beat(4.5)
    bench.beat(11.5)
    assert bench.lags == [0.0, 0.0, 6.5]


def test_a_heartbeat_for_several_leases_is_as_late_as_for_the_most_neglected(bench: Bench) -> None:
    bench.lease("a", "b", "c")
    bench.beat(0.0, "a", "b")
    bench.beat(6.0, "b")
    bench.beat(2.0, "c", "a", "b")
    assert bench.lags == [1.0, 3.0]


@pytest.mark.never_wrong("B12")
def test_the_silence_in_which_a_lease_ends_counts_and_is_logged(bench: Bench) -> None:
    bench.lease("heard", "unheard")
    bench.beat(29.0, "heard")
    bench.now_s += 20.5
    bench.leases.tick()
    assert bench.sent == ["unheard", "heard"]
    assert bench.lags == [15.5]
    assert "no heartbeat ever came" in bench.recorder.warnings[0]
    assert "last heartbeat 20.5 s ago" in bench.recorder.warnings[1]


def test_a_revoked_lease_is_reported(bench: Bench) -> None:
    bench.lease()
    bench.beat(4.0)
    bench.now_s += 3.2
    bench.leases.apply(StepPlan(revokes=("r",)))
    bench.leases.tick()
    assert bench.sent == ["r"]
    assert bench.counts == {"num_lease_renewals": 1, "num_revoked_leases": 1}, "it did not expire"
    (line,) = bench.log
    assert "request r: this engine revoked its lease before it was read (last heartbeat 3.2 s ago)" in line


@given(st.binary(max_size=64))
def test_no_notification_raises_or_frees_anything(payload: bytes) -> None:
    assume(not payload.startswith(b"r:"))  # that one is the request's own
    bench = Bench()
    bench.lease()
    bench.leases.notified("stranger", payload)
    bench.leases.tick()
    assert bench.sent == []


def test_all_leases_end_at_once_fences_first_and_are_reported_once(bench: Bench) -> None:
    bench.lease("granted")
    bench.expect("expected")
    bench.leases.end_all()
    assert bench.sent == ["granted"], "nobody waits for a request that was never handed over"
    assert bench.agent.fences == [(FENCE[0], FENCE[1] | 1 << 63)]
    bench.read("granted")
    bench.leases.end_all()
    bench.leases.tick()
    assert bench.sent == ["granted"]
    assert bench.leases._leases.live_count() == 0


def test_all_leases_end_also_without_a_fence_array(bench: Bench) -> None:
    bench.lease()
    bench.leases.end_all(has_fences=False)
    assert (bench.sent, bench.agent.fences) == (["r"], [])


# ---------------------------------------------------------------------------------------------- nonces


def test_a_heartbeat_before_the_grant_renews_nothing_and_counts_as_no_sign_of_a_reader(bench: Bench) -> None:
    bench.expect()
    bench.beat(1.0, reader="stranger")
    assert bench.counts["num_lease_renewals"] == 0
    bench.grant(nonce="mine")
    bench.now_s += 31
    bench.leases.tick()
    assert "no heartbeat ever came" in bench.recorder.warnings[0]
    assert bench.lags == []


def test_the_thread_may_poll_slowly_only_while_no_reader_has_anything_to_tell(bench: Bench) -> None:
    bench.leases.tick()
    assert bench.agent.may_poll_slowly
    bench.expect()
    assert bench.agent.may_poll_slowly, "a prompt that is still computed has no reader that could tell anything"
    bench.grant()
    assert not bench.agent.may_poll_slowly
    bench.leases.tick()
    assert not bench.agent.may_poll_slowly
    bench.read()
    assert bench.agent.may_poll_slowly


def test_an_order_of_the_own_scheduler_that_is_refused_is_no_notification_of_a_peer() -> None:
    bench = Bench()
    bench.grant()
    bench.grant()
    assert "request r: the order to grant its lease was refused" in bench.recorder.warnings[0]
    assert (bench.counts["num_callback_errors"], bench.counts["num_refused_notifications"]) == (1, 0)


@pytest.mark.never_wrong("B2")
@given(st.text(min_size=1), st.text(min_size=1))
@example("r" * 513, "r")
@example("r" * 3000, "r" * 3001)
@example("\u4f60\u597d".encode().decode("latin-1"), "tab\there")
@example("\x1b[31m", "no-break\u00a0space")
@example("kv-id-0", "a,b:1")
def test_whatever_id_a_client_chooses_its_prompt_is_read_and_its_lease_ends(request_id: str, other: str) -> None:
    """Truth: the id that the engine gave is reported as sent, and only when its reader is done."""
    assume(request_id != other and not request_id.startswith(("HB:", "PUSH_REG:")))
    assume(not other.startswith(("HB:", "PUSH_REG:")))
    writer, reader, bench = Engine("P"), Engine("D"), Bench()
    writer.side.serve({(0, 0): b"envelope"})
    for name in (other, request_id):
        ticket = json.loads(json.dumps(writer.prefill(name, "x" * 40)))
        bench.leases.apply(writer.step())
    reader.admit("d", ticket, "x" * 40)
    assert reader.refusals() == []
    reader.now_s += 6
    for beat in reader.step().heartbeats:
        for payload in Codec().heartbeats(list(beat.readers)):
            bench.leases.notified("D", payload)
    assert bench.counts["num_lease_renewals"] == 1
    reader.allocate("d", [1, 2, 3], external=40)
    (read,) = reader.step().reads
    bench.leases.notified(
        "D", Codec().read_complete(read.ticket.peer_request_id, 1, nonce=read.ticket.nonce, consumer="D")
    )
    assert bench.sent == [request_id]
    assert read.ticket.peer_request_id.isascii()
    writer.report(sent=(request_id,))
    assert bench.counts["num_refused_notifications"] == 0


@pytest.mark.parametrize("nonce", ["", "n"])
def test_a_heartbeat_of_too_many_requests_renews_the_first_and_reports_the_others(bench: Bench, nonce: str) -> None:
    names = [f"r{number}" for number in range(8193)]
    for name in (names[0], names[8191], names[8192]):
        bench.lease(name, nonce=nonce)
    pairs = ",".join(f'["{name}","{nonce}"]' for name in names)
    payload = f"HB:,KVH:[{pairs}]" if nonce else "HB:" + ",".join(names)
    for renewed, refused in ((2, 1), (4, 2)):
        bench.leases.notified("D", payload.encode())
        assert bench.counts["num_lease_renewals"] == renewed
        assert bench.counts["num_refused_notifications"] == refused
    (line,) = [line for line in bench.log if "heartbeat" in str(line)]
    assert "more requests than are read (1)" in line
