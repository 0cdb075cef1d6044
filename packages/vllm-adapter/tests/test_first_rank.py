"""Order in which ranks are asked: without seals a ticket is a client's word, and the first rank tells the engine's sizes."""

from __future__ import annotations

import pytest
from fakes import CodedFailure, Metadata, Outcome, Plan, order, peer
from read_bench import Bench

from vllm_adapter.worker.transfer.planner import PeerPlanner


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_ranks_that_a_ticket_names_are_asked_for_only_if_the_first_rank_agrees(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener of vLLM itself ends on a query for a rank that it does not have; without seals a ticket is a client's word."""
    bench.planner.made = Plan(((0, 2), (0, 3)))
    bench.reads.read(order(peer=peer(tp=4)))
    assert [asked["ranks"] for asked in bench.handshakes.asked] == [[(0, 2), (0, 3)]]
    both = Outcome(peers={(0, 2): Metadata(), (0, 3): Metadata()})
    with monkeypatch.context() as lie:
        lie.setattr(PeerPlanner, "check_sizes", lambda *_: (_ for _ in ()).throw(CodedFailure("page-bytes-differ")))
        assert not bench.handshakes.answer_first(Metadata(), both), "no rank that is not there is asked for"
    assert bench.codes() == {"r1": "page-bytes-differ"}
    assert len(bench.handshakes.asked) == 1
    assert bench.counts["num_failed_handshakes"] == 1
    assert bench.reads.snapshot() == {"engines": 0, "transfers": 0}

    bench.reads.read(order(request_id="r2", peer=peer(tp=4)))
    assert bench.handshakes.answer_first(Metadata(), both)
    assert set(bench.agent.posts) == {"r2/0.2", "r2/0.3"}


def test_a_first_rank_that_cannot_be_met_fails_the_request(bench: Bench) -> None:
    bench.planner.made = Plan(((0, 1),))
    bench.reads.read(order())
    bench.handshakes.answer(Outcome(is_ok=False, peers={}, code="peer-silent", message="no answer"))
    assert bench.codes() == {"r1": "peer-silent"}
    assert len(bench.handshakes.asked) == 1


def test_sealed_tickets_are_believed_about_ranks() -> None:
    bench = Bench(ticket_secret_variable="SECRET")
    bench.planner.made = Plan(((0, 1),))
    bench.reads.read(order())
    assert [asked["ranks"] for asked in bench.handshakes.asked] == [[(0, 1)]]
    assert bench.handshakes.asked[0]["check_first"] is None


def test_each_handshake_is_measured_once_with_all_its_ranks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.planner.made = Plan(((0, 2), (0, 3)))
    bench.reads.read(order(peer=peer(tp=4)))
    bench.handshakes.answer_first(Metadata(), Outcome(peers={(0, 2): Metadata(), (0, 3): Metadata()}, elapsed_s=0.75))
    bench.reads.read(order(request_id="r2", peer=peer(tp=2)))
    monkeypatch.setattr(PeerPlanner, "check_sizes", lambda *_: (_ for _ in ()).throw(CodedFailure("page-bytes-differ")))
    bench.handshakes.answer_first(Metadata(), Outcome())
    bench.reads.read(order(request_id="r3", peer=peer(tp=8)))
    bench.handshakes.answer(Outcome(is_ok=False, peers={}, code="recently-failed", elapsed_s=0.0))
    durations = [value for key, value in bench.recorder.observed if key == "handshake_duration"]
    assert durations == [0.75, 0.01], "one that was not asked has no duration"
    assert bench.counts["num_failed_handshakes"] == 1, "the one that was refused, not the one that was never made"
    assert bench.counts["num_unasked_engines"] == 1
