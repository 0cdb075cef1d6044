"""A streamed read through everything below the engine's hooks: words, looks, machine, parts and fence, over the fake fabric."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import FakeCodec, FakeRecorder, order

from kv_nixl_agent import AgentOptions, PeerSpec, TransferAgent, TransferOrder
from kv_nixl_agent.testing import FakeFabric
from kv_scheduler_state import BlockList
from kv_scheduler_state.streams import StreamOrder
from kv_scheduler_state.streams.reader import StreamReaders
from vllm_adapter.config import Settings
from vllm_adapter.steps import ReadEnd, ReadTimes
from vllm_adapter.worker.transfer.records import PeerEngine, Read, TransferParts
from vllm_adapter.worker.transfer.stream_records import StreamShape
from vllm_adapter.worker.transfer.streams import StreamCoordinator

BLOCKS, BLOCK_BYTES, TOKENS = 32, 64, 100
OPTIONS = AgentOptions(stream_slots=4, stream_capacity=16)


class Pages:
    def __init__(self) -> None:
        self.memory = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.region: Any = (self.memory.ctypes.data, self.memory.nbytes, 0, "DRAM")
        self.rows = np.array([[self.memory.ctypes.data, BLOCK_BYTES, 0, BLOCK_BYTES, BLOCKS]], dtype=np.uint64)


class Plan:
    """A block is a page on both sides."""

    producer_ranks = ((0, 0),)
    notify_only_ranks = ()
    is_staged = False

    def indices(self, _rank: Any, local: Any, peer: Any, *, tokens: int) -> Any:
        assert tokens
        return tuple(np.array([block for group in side for block in group.ids], np.int32) for side in (local, peer))


class Pair:
    """A producer with words and pages, and a consumer that follows slot 1."""

    def __init__(self, latency_polls: int) -> None:
        self.now_s = 100.0
        fabric = FakeFabric(latency_polls=latency_polls)
        self.here, self.there = Pages(), Pages()
        self.producer = TransferAgent("producer", [self.there.region], OPTIONS, port_factory=fabric.port)
        words = self.producer.stream_words
        assert words is not None
        self.words = words
        self.consumer = TransferAgent(
            "consumer", [self.here.region], OPTIONS, port_factory=fabric.port, clock=lambda: self.now_s
        )
        self.finished: list[ReadEnd] = []
        self.torn: list[str] = []
        self.released: list[str] = []
        untyped: Any = (self, None, FakeCodec(), FakeRecorder(), StreamReaders(stall_s=5.0), self)
        agent, handshakes, codec, recorder, machine, peers = untyped
        self.streams = StreamCoordinator(
            TransferParts(
                agent, handshakes, codec, recorder, lambda: self.now_s, "D", PeerSpec, Settings(read_timeout_s=5.0), 14
            ),
            machine,
            StreamShape([(16, 0)]),
            peers,
            lambda each: self.torn.append(each.code) if each.code else self.finished.append(each),
        )
        self.spec = PeerSpec(
            "", self.producer.agent_metadata(), self.here.rows, self.there.rows,
            fence=self.producer.fence, streams=self.words.location,
        )  # fmt: skip

    # the transfer thread and the directory of engines, as the coordinator knows them

    def watch_stream(self, peer: str, slot: int, listener: Any, *, tokens: int = 0) -> Any:
        return self.consumer.polls.watch(peer, slot, listener, tokens=tokens)

    def post_read(self, transfer_id: str, peer: str, local: Any, remote: Any, **facts: Any) -> None:
        self.consumer.submit(TransferOrder(transfer_id, peer, local, remote, **facts))

    def release(self, read: Read, *_: object) -> None:
        self.released.append(read.order.request_id)

    def drop(self, engine: PeerEngine, _reason: str) -> None:
        engine.phase = "draining"

    def read_ended(self, engine: PeerEngine) -> None:
        """All engines are forgotten with their reads."""

    # events

    def follow(self, generation: int) -> None:
        here = order(
            tokens=TOKENS,
            fence=(1, generation),
            peer_blocks=(BlockList(()),),
            local_blocks=(BlockList(tuple(range(20, 27)), 0, 0),),
        )
        engine = PeerEngine(here.ticket.peer, 0.0, 0.0)
        plan: Any = Plan()
        engine.plan, engine.can_stream = plan, True
        key = engine.key((0, 0))
        if not self.consumer.has_peer(key):
            spec = self.spec
            self.consumer.add_peer(
                PeerSpec(
                    key, spec.agent_metadata, spec.local_rows, spec.peer_rows, fence=spec.fence, streams=spec.streams
                )
            )
        self.streams.begin(Read(here, ReadTimes(self.now_s)), StreamOrder(here, generation, 0), engine)

    def compute(self, tag: int, first: int, stop: int, tokens: int) -> None:
        """Fill the producer's blocks of the prompt from `first` to `stop - 1`, with the tag and their number."""
        for block in range(first, stop):
            self.there.memory[block] = tag % 100 + block
        self.words.put(1, tag, first, list(range(first, stop)))
        self.words.show(1, tag, tokens)

    def run(self, turns: int = 60) -> None:
        for _ in range(turns):
            self.consumer.advance()
            for call in self.consumer.polls.take_news():
                call()
            for result in self.consumer.take_results():
                assert self.streams.transfer_ended(result)
            self.now_s += 0.001


@pytest.mark.parametrize("latency_polls", [0, 2])
def test_a_prompt_is_read_behind_the_producer(latency_polls: int) -> None:
    pair = Pair(latency_polls)
    pair.follow(7)  # the offer is here before the words
    pair.run()
    pair.words.open(1, 7, 7)
    pair.compute(7, 0, 3, 40)
    pair.run()
    assert pair.here.memory[20:27, 0].tolist() == [7, 8, 0, 0, 0, 0, 0], "two whole blocks"
    pair.compute(7, 2, 5, 80)
    pair.run()
    assert pair.here.memory[20:27, 0].tolist() == [7, 8, 9, 10, 11, 0, 0]
    pair.compute(7, 5, 7, 100)
    pair.run()
    assert pair.here.memory[20:27, 0].tolist() == [7, 8, 9, 10, 11, 12, 13]
    assert [each.code for each in pair.finished] == [""]
    assert (pair.released, pair.torn) == (["r1"], [])
    assert pair.finished[0].times.bytes_moved == 7 * BLOCK_BYTES
    assert pair.consumer.statistics()["streams_watched"] == 0


@pytest.mark.parametrize("latency_polls", [0, 2])
def test_what_was_read_before_a_restart_does_not_count(latency_polls: int) -> None:
    pair = Pair(latency_polls)
    pair.words.open(1, 7, 7)
    pair.compute(7, 0, 5, 80)
    pair.follow(7)
    pair.run()
    pair.words.void(1, 7 | 1 << 63, 7)
    pair.words.open(1, 8, 8)
    pair.compute(8, 0, 3, 48)
    pair.run()
    assert (pair.finished, pair.released) == ([], [])
    assert len(pair.torn) == 1
    pair.follow(8)
    pair.compute(8, 3, 7, 100)
    pair.run()
    assert pair.here.memory[20:27, 0].tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert [each.code for each in pair.finished] == [""]


def test_a_void_after_the_last_chunk_is_found_by_the_fence() -> None:
    pair = Pair(3)
    pair.words.open(1, 7, 7)
    pair.follow(7)
    pair.compute(7, 0, 7, 100)
    for _ in range(60):
        pair.run(1)
        if pair.consumer.statistics()["inflight"]:
            break
    pair.words.void(1, 7 | 1 << 63, 7)
    pair.run()
    assert (pair.finished, pair.torn) == ([], ["stream-void"])


def test_a_producer_that_closes_tears_the_stream() -> None:
    pair = Pair(1)
    pair.words.open(1, 7, 7)
    pair.compute(7, 0, 5, 80)
    pair.follow(7)
    pair.run()
    pair.producer.close()
    pair.run()
    assert (pair.finished, len(pair.torn)) == ([], 1)
