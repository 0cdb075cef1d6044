"""The consumer's coordinator: meeting engines, posting, and exactly one end per request whatever happens."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from fakes import CodedFailure, Metadata, Outcome, Plan, Stall, heartbeat, order, peer
from read_bench import KEY, Bench

from vllm_adapter.cache.vllm_peer import PeerPlanner


def test_a_failed_handshake_fails_what_waited_and_the_next_read_tries_again(bench: Bench) -> None:
    bench.reads.read(order())
    bench.start(order(request_id="r2"), peers={}, code="peer-silent", message="no answer")
    assert bench.codes() == {"r1": "peer-silent", "r2": "peer-silent"}
    bench.reads.read(order(request_id="r3"))
    assert len(bench.handshakes.asked) == 2


def test_hostile_parallel_sizes_fail_the_request(bench: Bench) -> None:
    bench.reads.read(order(peer=peer(tp=10**9)))
    assert bench.handshakes.asked == []
    assert bench.codes() == {"r1": "too-many-ranks"}
    assert bench.reads.snapshot() == {"engines": 0, "transfers": 0}


def test_pages_that_may_still_be_written_are_not_reported(bench: Bench) -> None:
    bench.start()
    bench.finish(outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    assert bench.ends == []
    assert bench.counts["num_quarantined_reads"] == 1
    bench.reads.memory_quiet("r1/0.0")
    bench.reads.memory_quiet("r1/0.0")
    assert bench.codes() == {"r1": "deadline-exceeded"}


def test_stalled_reads_are_reported_once_and_by_engine(bench: Bench) -> None:
    bench.start(*(order(f"r{number}") for number in range(1, 7)))
    bench.now_s += 7
    bench.reads.maintain()
    assert bench.counts["num_stalled_reads"] == 0
    bench.agent.stalled = [Stall(f"r{number}/0.0", since_s=100.0 + number) for number in (2, 1, 3, 4, 5)]
    bench.agent.stalled.append(Stall("ended-long-ago/0.0", since_s=1.0))
    bench.log.clear()
    for _ in range(3):
        bench.reads.maintain()
    (line,) = bench.log
    assert "no read from it has made progress for 6.0 s (reads: 5, bytes left: 20480, " in line
    assert "requests: r1, r2, r3, r4 and others" in line
    assert bench.counts["num_stalled_reads"] == 5
    bench.agent.stalled.append(Stall("r6/0.0", since_s=106.0))
    bench.reads.maintain()
    assert bench.log[1:] != []
    assert "no read from it has made progress for 1.0 s (reads: 1, " in bench.log[1]
    assert "requests: r6)" in bench.log[1]
    assert bench.counts["num_stalled_reads"] == 6
    assert bench.ends == []


def test_a_fence_that_moved_voids_the_read_but_not_the_engine(bench: Bench) -> None:
    bench.start()
    bench.finish(outcome="fence-rejected", code="fence-mismatch")
    assert bench.codes() == {"r1": "fence-mismatch"}
    assert bench.counts["num_fence_rejections"] == 1
    bench.reads.read(order(request_id="r2"))
    assert "r2/0.0" in bench.agent.posts


def test_without_a_fence_a_read_after_the_lease_is_void_unless_it_was_renewed(bench: Bench) -> None:
    bench.start(peers={(0, 0): Metadata(fence=None)})
    assert bench.agent.posts["r1/0.0"]["fence"] is None
    bench.reads.read(order(request_id="r2", peer_request_id="p-r2"))
    bench.now_s += 25
    bench.reads.heartbeat(heartbeat(("p-r2", "")))
    bench.now_s += 10
    bench.finish("r1/0.0")
    bench.finish("r2/0.0")
    assert bench.codes() == {"r1": "read-after-expiry", "r2": ""}


@pytest.mark.parametrize(
    ("capabilities", "secret", "prefix"), [((), "", ""), (("nonce",), "", "P/"), ((), "SECRET", "P/")]
)
def test_agents_of_our_kind_must_bear_their_engines_name(capabilities: Any, secret: str, prefix: str) -> None:
    """Those of another kind may have any name, unless the fleet has a secret and so all are ours."""
    bench = Bench(ticket_secrets=secret)
    bench.start(peers={(0, 0): Metadata(capabilities=capabilities, streams=(0xA000, 0, 64, 8192))})
    assert bench.agent.peers[KEY].agent_prefix == prefix
    assert bench.agent.peers[KEY].streams == (0xA000, 0, 64, 8192)


def test_an_engine_whose_agents_name_was_taken_over_is_met_anew(bench: Bench) -> None:
    bench.start()
    bench.finish()
    bench.agent.remove_peer(KEY)
    bench.reads.read(order(request_id="r2"))
    assert len(bench.handshakes.asked) == 2
    bench.handshakes.answer(Outcome())
    assert "r2/0.0" in bench.agent.posts


def test_a_forged_generation_fails_its_own_request_and_disturbs_nobody(bench: Bench) -> None:
    bench.start(order(peer=peer(generation=1)))
    forged = order(request_id="r2", peer=peer(generation=99))
    bench.start(forged, code="generation-mismatch", message="the engine is at 1")
    assert bench.handshakes.asked[1]["generation"] == 99
    assert bench.codes() == {"r2": "generation-mismatch"}
    bench.reads.read(order(request_id="r3", peer=peer(generation=1)))
    assert len(bench.handshakes.asked) == 2
    assert "r3/0.0" in bench.agent.posts


@pytest.mark.parametrize("engine_ttl", [3600, 0])
def test_an_unused_engine_is_forgotten_but_never_while_it_is_read_from(engine_ttl: float) -> None:
    """A time to live of 0 means never, as in vLLM's own connector."""
    bench = Bench(engine_ttl=engine_ttl)
    bench.start()
    bench.now_s += 4000
    bench.reads.maintain()
    assert bench.agent.has_peer(KEY)
    bench.finish()
    bench.reads.maintain()
    assert bench.agent.has_peer(KEY) == (not engine_ttl)


def test_a_handshake_that_never_ends_fails_what_waits_for_it(bench: Bench) -> None:
    bench.reads.read(order())
    bench.now_s += 14
    bench.reads.maintain()
    assert bench.ends == []
    bench.now_s += 2
    bench.reads.maintain()
    assert bench.codes() == {"r1": "handshake-overdue"}
    bench.handshakes.answer(Outcome(code="timed-out"))  # too late: nobody waits for it any more
    bench.reads.maintain()
    assert bench.counts["num_failed_handshakes"] == 1
    assert bench.agent.peers == {}


def test_a_lying_address_never_lends_its_engine_to_an_honest_ticket(bench: Bench) -> None:
    bench.start(order(peer=peer(host="6.6.6.6")))
    bench.finish()
    bench.reads.read(order(request_id="r2"))
    assert bench.handshakes.asked[1]["host"] == "10.0.0.1"
    bench.handshakes.answer(Outcome())
    assert bench.agent.posts["r2/0.0"]["peer"] == KEY
    assert list(bench.agent.peers) == [KEY]  # the idle alias gave the agent's name back


def test_heartbeats_meet_an_engine_early(bench: Bench) -> None:
    bench.reads.heartbeat(heartbeat())
    assert len(bench.handshakes.asked) == 1
    assert bench.counts["num_unsent_heartbeats"] == 1
    bench.handshakes.answer(Outcome())
    bench.reads.heartbeat(heartbeat())
    assert bench.agent.notified == [(KEY, b"HB:p-r1")]
    assert bench.counts["num_unsent_heartbeats"] == 1


def test_an_abort_while_waiting_ends_the_request(bench: Bench) -> None:
    bench.reads.read(order())
    bench.reads.cancel("r1")
    bench.reads.cancel("r1")
    assert bench.codes() == {"r1": "cancelled"}
    bench.handshakes.answer(Outcome())
    assert bench.agent.posts == {}
    assert len(bench.ends) == 1
    assert len(bench.agent.notified) == 1, "the producer hears that its blocks are not needed"


def test_all_reads_end_with_one_code_when_their_pages_are_quiet(bench: Bench) -> None:
    bench.start()
    bench.reads.read(order(request_id="waits", peer=peer(engine_id="Q")))
    bench.reads.read(order(request_id="aborted", peer=peer(engine_id="Q")))
    bench.reads.cancel("aborted")
    bench.reads.end_all("asleep", "good night")
    assert bench.codes() == {"aborted": "cancelled", "waits": "asleep"}
    assert bench.agent.cancelled == ["r1/0.0"]
    bench.finish(outcome="done")  # its data arrived before the order to cancel it: the pages are about to be lost
    assert bench.codes()["r1"] == "asleep"
    bench.handshakes.answer(Outcome())
    assert [end.order.request_id for end in bench.ends] == ["aborted", "waits", "r1"]


def test_a_read_ends_although_its_producer_cannot_be_notified(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.start()
    monkeypatch.setattr(bench.agent, "send_notification", Mock(side_effect=CodedFailure("agent-closed")))
    bench.finish(outcome="cancelled", code="cancelled")
    assert bench.codes() == {"r1": "cancelled"}
    assert bench.counts["num_failed_notifications"] == 1


def test_a_ticket_without_a_generation_uses_the_record_that_there_is(bench: Bench) -> None:
    bench.start(order(peer=peer(generation=1)))
    bench.reads.read(order(request_id="r2", peer=peer(generation=None)))
    assert len(bench.handshakes.asked) == 1
    assert bench.agent.posts["r2/0.0"]["fence"] == (3, 99), "which its fence then proves to be of this life"


# Order in which ranks are asked: without seals a ticket is a client's word, and the first rank tells the engine's sizes.


def test_ranks_that_a_ticket_names_are_asked_for_only_if_the_first_rank_agrees(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener of vLLM itself ends on a query for a rank that it does not have; without seals a ticket is a client's word."""
    bench.planner.made = Plan(((0, 2), (0, 3)))
    bench.reads.read(order(peer=peer(tp=4)))
    assert [asked["ranks"] for asked in bench.handshakes.asked] == [[(0, 2), (0, 3)]]
    both = Outcome(peers={(0, 2): Metadata(), (0, 3): Metadata()})
    with monkeypatch.context() as lie:
        lie.setattr(PeerPlanner, "check_sizes", Mock(side_effect=CodedFailure("page-bytes-differ")))
        assert not bench.handshakes.answer_first(Metadata(), both), "no rank that is not there is asked for"
    assert bench.codes() == {"r1": "page-bytes-differ"}
    assert len(bench.handshakes.asked) == 1
    assert bench.counts["num_failed_handshakes"] == 1
    assert bench.reads.snapshot() == {"engines": 0, "transfers": 0}

    bench.reads.read(order(request_id="r2", peer=peer(tp=4)))
    assert bench.handshakes.answer_first(Metadata(), both)
    assert set(bench.agent.posts) == {"r2/0.2", "r2/0.3"}


def test_sealed_tickets_are_believed_about_ranks() -> None:
    bench = Bench(ticket_secrets=("env:SECRET",))
    bench.planner.made = Plan(((0, 1),))
    bench.reads.read(order())
    assert [asked["ranks"] for asked in bench.handshakes.asked] == [[(0, 1)]]
    assert bench.handshakes.asked[0]["check_first"] is None


def test_each_handshake_is_measured_once_with_all_its_ranks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.planner.made = Plan(((0, 2), (0, 3)))
    bench.reads.read(order(peer=peer(tp=4)))
    bench.handshakes.answer_first(Metadata(), Outcome(peers={(0, 2): Metadata(), (0, 3): Metadata()}, elapsed_s=0.75))
    bench.reads.read(order(request_id="r2", peer=peer(tp=2)))
    monkeypatch.setattr(PeerPlanner, "check_sizes", Mock(side_effect=CodedFailure("page-bytes-differ")))
    bench.handshakes.answer_first(Metadata(), Outcome())
    again = {"code": "recently-failed", "context": {"last_code": "hash-mismatch"}}
    bench.start(order(request_id="r3", peer=peer(tp=8)), peers={}, elapsed_s=0.0, **again)
    assert bench.codes()["r3"] == "hash-mismatch", "the label is the cause"
    durations = [value for key, value in bench.recorder.observed if key == "handshake_duration"]
    assert durations == [0.75, 0.01], "one that was not asked has no duration"
    assert bench.counts["num_failed_handshakes"] == 1, "the one that was refused, not the one that was never made"
    assert bench.counts["num_unasked_engines"] == 1


@pytest.mark.parametrize("code", ["cancelled", "peer-disconnected"])
def test_a_transfer_that_fails_after_its_read_was_cancelled_is_no_failed_transfer(bench: Bench, code: str) -> None:
    bench.start()
    bench.reads.cancel("r1")
    bench.finish(outcome="failed", code=code)
    assert bench.counts["num_failed_transfers"] == 0
    bench.reads.read(order(request_id="r2"))
    if bench.handshakes.asked[1:]:
        bench.handshakes.answer(Outcome())
    bench.finish("r2/0.0", outcome="failed", code="transfer-failed")
    assert bench.counts["num_failed_transfers"] == 1
