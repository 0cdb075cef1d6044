"""Streams until they begin: engines are met for them, and each order ends once, well or badly."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pytest
from fakes import CodedFailure, FakePlanner, Metadata, Outcome, Plan, order, peer
from lease_bench import FENCE
from lease_bench import Bench as LeaseBench
from read_bench import KEY, Bench

from kv_scheduler_state import BlockList
from kv_scheduler_state.streams import StreamOrder, StreamPlan, StreamWorker
from vllm_adapter.cache.vllm_peer import PeerPlanner, pack_document
from vllm_adapter.worker.transfer.streams import StreamCoordinator

GROUP = {"kind": "attention", "block_tokens": 16, "pages_per_block": 1, "window_tokens": 0, "context": (1, 0, 1)}
STREAMS = (0xA000, 0, 64, 8192)
STREAMING = {(0, 0): Metadata(streams=STREAMS)}


def stream(request_id: str = "r1", **changes: Any) -> StreamOrder:
    blocks = (BlockList((1, 2), 0, 0),)
    read = order(
        request_id,
        **{"tokens": 32, "fence": (3, 9), "local_blocks": blocks, "peer_blocks": (BlockList(()),), **changes},
    )
    return StreamOrder(read, tag=9, start=0)


def follow(bench: Bench, watch: StreamOrder) -> None:
    bench.order(streams=StreamPlan(watches=(watch,)))


def codes(bench: Bench) -> list[tuple[str, str]]:
    return [(end.order.request_id, end.code) for end in bench.ends if end.is_streamed]


def test_a_stream_begins_once_its_engine_is_connected(bench: Bench) -> None:
    follow(bench, stream())
    assert bench.agent.watches == {}
    bench.handshakes.answer(Outcome(peers=STREAMING))
    first = bench.agent.watches[KEY]
    assert (first.slot, first.tokens) == (3, 32)
    follow(bench, stream("r2"))
    assert bench.agent.watches[KEY] is not first, "at once: the engine is ready"
    described: Any = bench.reads.describe(1)
    (entry,) = described["oldest_streams"]
    assert described["streams"] == 2
    assert (entry["request_id"], entry["tokens"], entry["ranks_left"]) == ("r1", 32, 1)
    assert (entry["stage"], entry["tokens_finished"]) == ("watching", 0)


def test_a_stream_that_is_stopped_before_it_begins_ends_once_and_notifies_its_producer(bench: Bench) -> None:
    follow(bench, stream())
    bench.order(streams=StreamPlan(stops=("r1",)))
    assert codes(bench) == [("r1", "stream-stopped")]
    bench.handshakes.answer(Outcome(peers=STREAMING))
    assert [key for key, _ in bench.agent.notified] == [KEY]
    assert codes(bench) == [("r1", "stream-stopped")]


def test_all_streams_end_with_the_registration(bench: Bench) -> None:
    follow(bench, stream())
    bench.handshakes.answer(Outcome(peers=STREAMING))
    follow(bench, stream("r2", peer=peer(port=5601)))
    bench.reads.end_all("asleep", "memory is given back")
    assert sorted(codes(bench)) == [("r1", "asleep"), ("r2", "asleep")]
    assert bench.agent.watches[KEY].is_ended
    assert bench.reads.snapshot()["transfers"] == 0


# Peers that can be streamed from -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "can"),
    [
        ({}, True),
        ({"block_tokens": 32}, False),
        ({"block_tokens": 8, "context": (2, 0, 1)}, True),
        ({"window_tokens": 64}, False),
        ({"kind": "state"}, False),
        ({"kind": "latent"}, True),
    ],
)
def test_groups_must_be_the_same_one_by_one(change: dict[str, Any], can: bool) -> None:
    metadata: Any = {(0, 0): Metadata(geometry=pack_document({"groups": [{**GROUP, **change}]}))}
    document: Any = {"groups": [GROUP]}
    plans, plan = cast("Any", (FakePlanner(), Plan()))
    by = PeerPlanner(document, (), plans, plans, "DRAM")
    assert by.has_our_blocks(list(by.read(peer(), metadata)), plan) == can


def test_a_peer_without_stream_memory_is_read_as_a_whole(bench: Bench) -> None:
    follow(bench, stream())
    bench.handshakes.answer(Outcome())
    assert codes(bench) == [("r1", "not-streamed")]


def test_groups_that_cannot_be_compared_cost_the_stream_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerPlanner, "has_our_blocks", lambda *_: [].pop())
    follow(bench, stream())
    bench.reads.read(order("plain"))
    bench.handshakes.answer(Outcome(peers=STREAMING))
    assert codes(bench) == [("r1", "not-streamed")]
    assert "plain/0.0" in bench.agent.posts
    assert "comparison of cache groups" in bench.recorder.errors[0][0]


# Leases of streamed prompts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [FENCE[0], FENCE[0] + 1])
def test_the_end_of_a_streamed_lease_moves_its_progress_word_too(slots: int) -> None:
    voided: list[int] = []

    class Words:
        def void(self, slot: int, word: int, tag: int) -> None:
            assert tag == word % 2**32
            voided.append(slot)

    bench = LeaseBench()
    words: Any = Words()
    bench.leases.stream_worker = StreamWorker(words, slots)
    bench.lease()
    bench.read()
    assert bench.sent == ["r"]
    plain = [slot for slot, _ in bench.agent.fences]
    assert (voided, plain) == ([] if slots == FENCE[0] else [FENCE[0]], [FENCE[0]])


def test_a_stream_that_cannot_begin_ends_and_takes_no_other_read_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamCoordinator, "begin", Mock(side_effect=CodedFailure("bad-indices")))
    follow(bench, stream())
    bench.reads.read(order("r2"))
    follow(bench, stream("r3"))
    bench.handshakes.answer(Outcome(peers=STREAMING))
    assert codes(bench) == [("r1", "bad-indices"), ("r3", "bad-indices")]
    bench.finish("r2/0.0")
    assert bench.codes()["r2"] == ""
