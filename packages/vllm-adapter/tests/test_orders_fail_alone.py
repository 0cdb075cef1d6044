"""An order can only fail itself: the others of its step go on, and the failing one ends with a code."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from fakes import FakeAgent, Metadata, Outcome, Plan, blocks, heartbeat, order, peer
from hypothesis import given
from hypothesis import strategies as st
from read_bench import KEY, OTHER_KEY, Bench

from kv_handshake import Codec
from kv_scheduler_state import BlockList
from vllm_adapter.worker.transfer.reads import refusal
from vllm_adapter.worker.transfer.records import PeerEngine

IDS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(Codec().reserved_prefixes).flatmap(lambda prefix: st.text(max_size=20).map(prefix.__add__)),
    st.sampled_from(["", ":", "a:1", "\ud800", "\x00", "x" * 5000, "r:\n", "\u0661:2"]),
)


@pytest.mark.never_wrong("B2")
@given(st.lists(IDS, min_size=1, max_size=4), st.sampled_from(["", "n", "\ud800", ":", "n" * 500]))
def test_whatever_ids_and_nonces_tickets_have_each_order_ends_and_an_honest_one_is_read(
    ids: list[str], nonce: str
) -> None:
    bench = Bench()
    orders = [order(f"r{n}", peer_request_id=text, nonce=nonce) for n, text in enumerate(ids)]
    beats = tuple(heartbeat((text, nonce)) for text in ids)
    bench.order(*orders, order("honest"), heartbeats=beats)
    bench.handshakes.answer(Outcome())
    for transfer_id in list(bench.agent.posts):
        bench.finish(transfer_id)
    assert bench.codes()["honest"] == ""
    assert len(bench.ends) == len(orders) + 1


@pytest.mark.parametrize(("claimed", "asked"), [(4, 14), (2, 14), (13, 13), (15, 15), (None, 14)])
def test_a_ticket_never_picks_the_shape_of_a_query(bench: Bench, claimed: int | None, asked: int) -> None:
    """A listener of vLLM itself ends on a query of another shape than its own."""
    bench.order(order(peer=peer(dialect=claimed)))
    assert bench.handshakes.asked[0]["dialect"] == asked


def test_a_bug_in_the_producers_part_does_not_stop_the_reads(bench: Bench) -> None:
    leases = Mock()
    leases.apply.side_effect = RuntimeError("a bug in the producer's part")
    bench.order(order(), leases=leases, revokes=("p1",))
    assert len(bench.handshakes.asked) == 1
    assert bench.counts["num_callback_errors"] == 1


class Unreadable:
    """An address that nobody can look up."""

    def __hash__(self) -> int:
        raise OverflowError("a number that nobody thought of")


@pytest.mark.never_wrong("B2")
def test_an_order_that_raises_ends_and_the_next_is_made(bench: Bench) -> None:
    bench.order(order("evil", peer=Unreadable()), order("honest"))
    assert bench.codes() == {"evil": "OverflowError"}
    assert len(bench.handshakes.asked) == 1
    ((_, error),) = [entry for entry in bench.recorder.errors if isinstance(entry[1], OverflowError)]
    assert error.__traceback__ is not None


def test_a_heartbeat_that_raises_does_not_stop_the_next(bench: Bench) -> None:
    bench.start()
    broken: Any = object()
    bench.order(heartbeats=(broken, heartbeat()))
    assert bench.agent.notified == [(KEY, b"HB:p-r1")]


@pytest.mark.never_wrong("B2")
def test_an_exception_while_a_result_is_taken_in_ends_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start()
    monkeypatch.setattr(bench.recorder, "read_done", Mock(side_effect=ValueError("no such statistic")))
    bench.finish()
    assert bench.codes() == {"r1": "ValueError"}
    assert bench.reads.snapshot()["transfers"] == 0


def test_orders_behind_one_handshake_do_not_share_its_fate(bench: Bench) -> None:
    bench.reads.read(order("evil", peer_blocks=(blocks(5000),)))
    bench.start(order("honest"))
    assert bench.codes() == {"evil": "block-out-of-range"}
    assert set(bench.agent.posts) == {"honest/0.0"}
    assert bench.agent.notified == [(KEY, b"p-r1:1")], "the producer can give the blocks back"


# ------------------------------------------------------------------------------------------- tickets against engines


@pytest.mark.never_wrong("A3")
@pytest.mark.parametrize("capabilities", [frozenset(), frozenset({"prompt-digest"})])
@pytest.mark.parametrize("has_our_blocks", [True, False])
@pytest.mark.parametrize("listed", [BlockList((5, 6), 0, 0), BlockList((5, 6), 32, 0), BlockList((0, 6), 0, 0)])
def test_a_list_that_was_placed_by_our_block_size_is_refused_where_the_peers_is_another(
    capabilities: frozenset[str], has_our_blocks: bool, listed: BlockList
) -> None:
    """Where a list of vLLM's own connector begins follows from the peer's block size, which only the handshake shows."""
    engine = PeerEngine(peer(), 0.0, 0.0)
    engine.capabilities, engine.has_our_blocks = capabilities, has_our_blocks
    is_placed = listed.first_token > 0 or 0 in listed.ids
    found = refusal(order(peer_blocks=(blocks(4), listed), prompt="d" * 64, nonce="n"), engine)
    is_refused = is_placed and not capabilities and not has_our_blocks
    assert (found is not None and found[0] == "peer-blocks-unplaced") == is_refused, found


@pytest.mark.never_wrong("A1")
def test_a_ticket_without_a_fence_is_refused_by_an_engine_that_has_fences(bench: Bench) -> None:
    bench.start(order(fence=None))
    assert bench.codes() == {"r1": "fence-missing"}
    assert (bench.agent.posts, bench.agent.notified) == ({}, []), "and nobody's lease is ended by such a ticket"


@pytest.mark.never_wrong("A1")
def test_a_ticket_without_a_digest_is_refused_by_an_engine_that_binds_tickets(bench: Bench) -> None:
    peers = {(0, 0): Metadata(capabilities=("prompt-digest", "nonce"))}
    bench.start(peers=peers)
    assert bench.codes() == {"r1": "prompt-missing"}
    bench.reads.read(order("r2", prompt="ab" * 32, nonce="n1"))
    assert "r2/0.0" in bench.agent.posts


@pytest.mark.never_wrong("C6")
def test_a_ticket_without_a_nonce_neither_reads_nor_ends_the_hand_over_of_the_request_it_names(bench: Bench) -> None:
    peers = {(0, 0): Metadata(capabilities=("prompt-digest", "nonce"))}
    bench.start(order(prompt="ab" * 32), peers=peers)
    assert bench.codes() == {"r1": "nonce-missing"}
    nobody_reads: dict[str, Any] = {"local_blocks": (blocks(),), "is_reported": False}
    bench.reads.read(order("r2", **nobody_reads))
    assert (bench.agent.posts, bench.agent.notified) == ({}, [])
    bench.reads.heartbeat(heartbeat(("p1", "")))
    assert bench.agent.notified == []
    bench.reads.read(order("r3", **nobody_reads, nonce="n1"))
    assert len(bench.agent.notified) == 1


def test_a_peer_of_vllms_own_kind_needs_neither_and_the_log_says_what_is_lost(bench: Bench) -> None:
    bench.start(order(fence=None), peers={(0, 0): Metadata(fence=None)})
    assert "r1/0.0" in bench.agent.posts
    (line,) = bench.log
    assert "without fences" in line
    assert "other weights or settings under one model name are not detected" in line
    assert "not bound to their prompts" in line


# ------------------------------------------------------------------------------------------- notifications


@pytest.mark.never_wrong("B1")
def test_ranks_that_only_wait_for_a_notification_are_wired_without_rows(bench: Bench) -> None:
    """Latent caches, tp 2 to 1: rank 0.1 holds a replica; asking the plan for its rows raised `rank-not-read`."""
    bench.planner.made = Plan(((0, 0),), ((0, 1),))
    bench.start(peers={(0, 0): Metadata(), (0, 1): Metadata()})
    assert [len(bench.agent.peers[key].local_rows) for key in (KEY, OTHER_KEY)] == [1, 0]
    assert bench.agent.notified == []
    bench.finish()
    assert bench.agent.notified == [(OTHER_KEY, b"p-r1:1")], "at the end of the read"
    assert bench.codes() == {"r1": ""}


@pytest.mark.never_wrong("C6")
def test_nonce_and_consumer_are_echoed_in_completions(bench: Bench) -> None:
    bench.start(order(nonce="n1"))
    assert bench.agent.posts["r1/0.0"]["notification"] == b'KVH:["p-r1","n1","D"]:1'
    bench.reads.heartbeat(heartbeat(("p-r1", "n1")))
    assert bench.agent.notified == [(KEY, b'HB:,KVH:[["p-r1","n1"]]')]


@pytest.mark.never_wrong("B7")
def test_a_hand_over_that_a_sibling_goes_on_reading_is_not_reported_as_read(bench: Bench) -> None:
    bench.reads.read(order())
    bench.order(cancels=("r1",), passes=("r1",))
    bench.handshakes.answer(Outcome())
    assert bench.codes() == {"r1": "cancelled"}
    assert bench.agent.notified == []


# ------------------------------------------------------------------------------------------- peers without an answer


def idle(bench: Bench, seconds: float = 11) -> None:
    bench.now_s += seconds
    bench.reads.maintain()


def met(bench: Bench) -> None:
    bench.start()
    bench.finish()


def answer_probe(agent: FakeAgent, bench: Bench, outcome: str, code: str = "") -> None:
    (probe,) = agent.probes
    agent.probes.clear()
    bench.finish(probe, outcome=outcome, code=code)


@pytest.mark.parametrize("outcome", [("done",), ("failed", "queue-full")])
def test_an_engine_that_answers_probes_is_kept_and_a_probe_that_our_agent_refuses_says_nothing(
    bench: Bench, outcome: tuple[str, ...]
) -> None:
    met(bench)
    for _ in range(5):
        idle(bench)
        answer_probe(bench.agent, bench, *outcome)
    assert (bench.reads.snapshot()["engines"], bench.counts["num_dropped_engines"]) == (1, 0)


@pytest.mark.never_wrong("B12")
def test_two_silent_probes_let_an_idle_engine_go_within_seconds(bench: Bench) -> None:
    met(bench)
    idle(bench)
    answer_probe(bench.agent, bench, "timed-out", "deadline-exceeded")
    assert bench.reads.snapshot()["engines"] == 1
    idle(bench, 1)  # the next look, not the next interval
    answer_probe(bench.agent, bench, "timed-out", "deadline-exceeded")
    assert bench.reads.snapshot()["engines"] == 0
    assert bench.agent.peers == {}
    assert "2 probes had no answer" in bench.recorder.warnings[-1]


@pytest.mark.never_wrong("B12")
def test_an_idle_engine_whose_process_is_gone_is_let_go_at_the_first_probe(bench: Bench) -> None:
    met(bench)
    idle(bench)
    answer_probe(bench.agent, bench, "failed", "peer-disconnected")
    assert (bench.reads.snapshot()["engines"], bench.agent.peers) == (0, {})
    assert bench.counts["num_dropped_engines"] == 1


def test_an_engine_that_is_read_from_is_not_probed(bench: Bench) -> None:
    bench.start()
    idle(bench, 40)
    assert bench.agent.probes == {}


@pytest.mark.never_wrong("B4")
def test_an_order_that_waits_for_a_draining_engine_does_not_wait_for_ever(bench: Bench) -> None:
    bench.start(order("hangs"))
    bench.reads.read(order("lost"))
    bench.finish("lost/0.0", outcome="failed", code="peer-disconnected")
    bench.reads.read(order("late"))
    idle(bench, 14)
    assert "late" not in bench.codes()
    idle(bench, 2)
    assert bench.codes()["late"] == "peer-draining"
    (end,) = [end for end in bench.ends if end.order.request_id == "late"]
    assert end.message == (
        "no new connection to engine P at 10.0.0.1:5600 within 15 s: earlier reads from it are still on the wire or "
        "in quarantine (1); check whether it is stopped"
    )
    assert end.was_connected, "no handshake has failed"
    assert len(bench.handshakes.asked) == 1
    assert bench.counts["num_failed_handshakes"] == 0


@pytest.mark.never_wrong("B12")
def test_quarantine_and_expiry_warn_once_per_request(bench: Bench) -> None:
    bench.planner.made = Plan(((0, 0), (0, 1)))
    bench.start(peers={(0, 0): Metadata(), (0, 1): Metadata()})
    for rank in ("0.0", "0.1"):
        bench.finish(f"r1/{rank}", outcome="timed-out", code="deadline-exceeded", is_memory_quiet=False)
    assert len([line for line in bench.recorder.warnings if "quarantined" in line]) == 1
    assert bench.counts["num_quarantined_reads"] == 2
