"""A read whose peer was lost is made once more while the lease holds: the peer is met anew, what has arrived stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import Metadata, Outcome, Plan, order, peer
from read_bench import KEY, OTHER_KEY, Bench

TWO_RANKS = {(0, 0): Metadata(), (0, 1): Metadata()}


@pytest.fixture
def bench() -> Bench:
    return Bench(read_retries=1)


def start(bench: Bench, ranks: int = 1, **changes: Any) -> None:
    bench.planner.made = Plan(tuple((0, rank) for rank in range(ranks)))
    bench.start(order(**changes), peers=dict(list(TWO_RANKS.items())[:ranks]))


@pytest.mark.never_wrong("B5")
def test_one_lost_peer_is_met_anew_and_read_once_more(bench: Bench) -> None:
    start(bench)
    bench.now_s += 10
    bench.finish(outcome="failed", code="peer-disconnected")
    assert bench.ends == []
    assert len(bench.handshakes.asked) == 2
    bench.handshakes.answer(Outcome())
    assert bench.agent.posts["r1/0.0+"]["deadline_s"] == 50  # of 60: the first attempt's ten seconds are gone
    bench.finish("r1/0.0+")
    assert bench.codes() == {"r1": ""}
    assert bench.counts["num_retried_reads"] == 1


@pytest.mark.never_wrong("B5")
def test_a_rank_whose_completion_has_left_is_neither_read_nor_notified_again(bench: Bench) -> None:
    start(bench, ranks=2)
    bench.finish("r1/0.0")
    bench.finish("r1/0.1", outcome="failed", code="peer-disconnected")
    bench.handshakes.answer(Outcome(peers=TWO_RANKS))
    assert "r1/0.0+" not in bench.agent.posts
    bench.finish("r1/0.1+", outcome="failed", code="peer-disconnected")
    assert bench.codes() == {"r1": "peer-disconnected"}, "a second failure is the request's"
    assert bench.counts["num_retried_reads"] == 1
    assert KEY not in [peer for peer, _ in bench.agent.notified]


@pytest.mark.never_wrong("B5")
def test_ranks_that_are_done_are_not_notified_of_the_failure_of_others(bench: Bench) -> None:
    start(bench, ranks=2)
    bench.finish("r1/0.0")
    bench.finish("r1/0.1", outcome="fence-rejected", code="fence-mismatch")
    assert bench.codes() == {"r1": "fence-mismatch"}
    assert [peer for peer, _ in bench.agent.notified] == [OTHER_KEY]


@pytest.mark.never_wrong("B5")
@pytest.mark.parametrize(
    ("outcome", "code", "after_s", "fence"),
    [
        ("fence-rejected", "fence-mismatch", 0, (3, 99)),
        ("timed-out", "deadline-exceeded", 0, (3, 99)),
        ("cancelled", "cancelled", 0, (3, 99)),
        ("failed", "peer-disconnected", 31, (3, 99)),
        ("failed", "peer-disconnected", 0, None),
    ],
    ids=["fence", "time", "cancelled", "the lease may have ended", "a restart would not be noticed"],
)
def test_what_a_new_meeting_cannot_mend_is_not_read_again(
    bench: Bench, outcome: str, code: str, after_s: float, fence: tuple[int, int] | None
) -> None:
    """A restart of vLLM's own peers is not noticed: no fence words, and no generation in the ticket."""
    bench.start(order(fence=fence), peers={(0, 0): Metadata(fence=fence and (0xF000, 0, 16))})
    bench.now_s += after_s
    bench.finish(outcome=outcome, code=code)
    assert bench.codes() == {"r1": code}
    assert bench.counts["num_retried_reads"] == 0


def test_a_peer_that_the_own_agent_has_let_go_is_met_anew_and_read_once_more(bench: Bench) -> None:
    start(bench)
    bench.agent.remove_peer(KEY)
    bench.finish(outcome="failed", code="peer-removed")
    bench.handshakes.answer(Outcome(), 1)
    bench.finish("r1/0.0+")
    assert bench.codes() == {"r1": ""}
    assert (bench.counts["num_retried_reads"], bench.counts["num_dropped_engines"]) == (1, 0)


def test_pages_in_quarantine_are_not_read_into_again_before_they_are_quiet(bench: Bench) -> None:
    start(bench, ranks=2)
    bench.finish("r1/0.0", outcome="failed", code="peer-disconnected", is_memory_quiet=False)
    bench.finish("r1/0.1", outcome="failed", code="peer-disconnected")
    assert len(bench.handshakes.asked) == 1
    bench.reads.memory_quiet("r1/0.0")
    bench.handshakes.answer(Outcome(peers=TWO_RANKS))
    assert {"r1/0.0+", "r1/0.1+"} <= set(bench.agent.posts)


def test_an_engine_that_cannot_be_met_anew_ends_the_read_with_the_reason(bench: Bench) -> None:
    start(bench)
    bench.finish(outcome="failed", code="peer-disconnected")
    bench.handshakes.answer(Outcome(peers={}, code="connection-refused", message="nobody listens"))
    assert bench.codes() == {"r1": "connection-refused"}


def test_an_abort_between_the_attempts_ends_the_read_once_and_tells_the_producer(bench: Bench) -> None:
    start(bench)
    bench.finish(outcome="failed", code="peer-disconnected")
    bench.reads.cancel("r1")
    assert bench.codes() == {"r1": "cancelled"}
    bench.handshakes.answer(Outcome())
    assert bench.agent.notified == [(KEY, b"p-r1:1")]
    assert "r1/0.0+" not in bench.agent.posts
    assert len(bench.ends) == 1


def test_an_engine_that_came_back_with_another_plan_is_not_mixed_with_what_has_arrived(bench: Bench) -> None:
    start(bench, ranks=2, peer=peer(generation=1))
    bench.finish("r1/0.0")
    bench.finish("r1/0.1", outcome="failed", code="peer-disconnected")
    bench.planner.made = replace(bench.planner.made, producer_ranks=((0, 1),))
    assert bench.handshakes.answer_first(Metadata(), Outcome(peers={(0, 1): Metadata()}))
    assert bench.codes() == {"r1": "peer-changed"}


def test_a_second_attempt_never_outlasts_the_deadline(bench: Bench) -> None:
    start(bench, lease_s=1000.0)
    bench.now_s += 59
    bench.finish(outcome="failed", code="peer-disconnected")
    bench.now_s += 2
    bench.handshakes.answer(Outcome())
    assert bench.codes() == {"r1": "transfer-timed-out"}


def test_a_refused_post_is_not_tried_again(bench: Bench) -> None:
    bench.reads.read(order())
    bench.agent.refuse_post = True
    bench.handshakes.answer(Outcome())
    assert bench.codes() == {"r1": "post-refused"}
