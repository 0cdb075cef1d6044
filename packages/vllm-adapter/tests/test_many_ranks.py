"""Engines of many ranks: their documents are read one by one, and cost no more than a peer may cost."""

from __future__ import annotations

import json
from collections import deque
from contextlib import nullcontext
from typing import Any

import pytest
from factories import TOKENS, attention_cache, facts
from fakes import FakeAgent, Metadata, Outcome, Plan, order, peer
from read_bench import Bench

from kv_topology import Planner
from vllm_adapter.cache.facts import CacheGroup
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.cache.vllm_peer import PeerPlanner, pack_document
from vllm_adapter.errors import AdapterError


class QueueingAgent(FakeAgent):
    """An owner thread whose turns the test makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: deque[Any] = deque()

    def call_soon(self, function: Any) -> None:
        self.calls.append(function)

    def turn(self) -> None:
        self.calls.popleft()()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> QueueingAgent:
    made = QueueingAgent()
    monkeypatch.setattr("read_bench.FakeAgent", lambda: made)
    return made


def met(bench: Bench, count: int, geometry: bytes = b"{}") -> None:
    """Order a read, and let so many ranks answer."""
    ranks = tuple((0, rank) for rank in range(count))
    bench.planner.made = Plan(ranks)
    bench.reads.read(order(peer=peer(tp=4)))
    bench.handshakes.answer(Outcome(peers={rank: Metadata(geometry=geometry) for rank in ranks}))


@pytest.mark.parametrize("count", [1, 2, 64, 4096])
def test_each_rank_of_a_peer_has_a_turn_of_its_own(agent: QueueingAgent, count: int) -> None:
    bench = Bench()
    met(bench, count)
    for turn in range(count):
        assert len(bench.planner.read) == turn
        agent.turn()
    agent.turn()
    assert len(bench.agent.posts) == count
    assert not agent.calls


@pytest.mark.parametrize("misfit", [1, 2, 40])
def test_the_first_rank_that_does_not_fit_ends_the_reading(agent: QueueingAgent, misfit: int) -> None:
    bench = Bench()
    bench.planner.misfit = misfit
    met(bench, 64)
    while agent.calls:
        agent.turn()
    assert len(bench.planner.read) == misfit
    assert bench.codes() == {"r1": "document-malformed"}


def test_a_peer_that_takes_too_long_to_read_is_given_up(agent: QueueingAgent) -> None:
    bench = Bench()
    met(bench, 4096)
    for _ in range(10):
        agent.turn()
    bench.now_s += 16
    bench.reads.maintain()
    assert bench.codes() == {"r1": "handshake-overdue"}
    agent.turn()
    assert (len(bench.planner.read), len(agent.calls)) == (10, 0)


@pytest.mark.parametrize("ranks", [9, 40, 4096])
def test_the_documents_of_a_peer_have_so_many_values_in_all(agent: QueueingAgent, ranks: int) -> None:
    bench = Bench()
    values = (1 << 22) // (ranks - 1)
    met(bench, ranks, json.dumps({"values": [0] * values}).encode())
    while agent.calls:
        agent.turn()
    assert bench.codes() == {"r1": "bad-geometry-document"}
    assert len(bench.planner.read) < ranks


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (8, 4), (8, 8)])
def test_a_large_honest_engine_is_read(tp: int, pp: int) -> None:
    """Documents of 128 regions, padded to 300 KB."""
    layers = tuple(f"model.layers.{number}.self_attn.attn" for number in range(128))

    def document(ranks: int, rank: int) -> Any:
        group = CacheGroup("attention", TOKENS, 0, 0, layers)
        heads = 8 // ranks
        caches = [attention_cache(name, address=(n + 1) << 40, heads=heads) for n, name in enumerate(layers)]
        return local_document(facts(tp=ranks, rank=rank, heads=8, groups=(group,)), caches)

    nobody: Any = None
    planner = PeerPlanner(document(1, 0), (), nobody, Planner(), "DRAM")
    peers: dict[tuple[int, int], Any] = {}
    for rank in range(tp):
        claimed = {**document(tp, rank), "later": [0] * 20_000, "more": "x" * 200_000}
        for stage in range(pp):
            raw = pack_document({**claimed, "pp": [pp, stage]})
            assert 250_000 < len(raw) < 300_000
            peers[stage, rank] = Metadata(geometry=raw)
    here = peer(tp=tp, pp=pp)
    assert planner.plan(here, planner.read(here, peers)).producer_ranks == tuple((0, rank) for rank in range(tp))


@pytest.mark.parametrize("claimed", [1, 2, 4])
@pytest.mark.parametrize("true", [1, 2, 4])
def test_an_engine_is_read_only_under_the_context_size_of_its_pages(claimed: int, true: int) -> None:
    """A client that changes `dcp_size` would have the same engine met twice."""
    group = CacheGroup("attention", TOKENS, 0, 0, ("layers.0",))
    nobody: Any = None
    ours = local_document(facts(tp=4, groups=(group,)), [attention_cache("layers.0", address=1 << 40, heads=1)])
    theirs = facts(tp=4, dcp=true, heads=1, groups=(group,))
    raw = pack_document(local_document(theirs, [attention_cache("layers.0", address=1 << 40, heads=1)]))
    metadata: dict[tuple[int, int], Any] = {(0, 0): Metadata(geometry=raw)}
    planner = PeerPlanner(ours, (True,), nobody, Planner(), "DRAM")
    with (
        nullcontext()
        if claimed == true
        else pytest.raises(AdapterError, match=f"{claimed} context ranks, but .* {true} \\(")
    ):
        list(planner.read(peer(tp=4, dcp=claimed), metadata))
