"""Every pair of tensor-parallel sizes up to 8 x 8, through the production consumer, with bytes that really move.

The agent below refuses what the real one refuses: rows for ranks that the plan does not read, reads from peers without rows,
descriptors outside the rows. Truth is slicing of one imagined global cache.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from factories import facts
from fakes import FakeAgent, FakeHandshakes, FakeRecorder, Metadata, Outcome, Result, blocks, order, peer

from kv_handshake import Codec
from kv_nixl_agent import PeerSpec
from kv_scheduler_state import LeaseTable
from kv_topology import Planner
from vllm_adapter.cache.facts import CacheGroup, EngineFacts, LayerCache
from vllm_adapter.cache.geometry import local_document
from vllm_adapter.cache.vllm_peer import PeerGeometry, pack_document
from vllm_adapter.config import Settings
from vllm_adapter.steps import ReadEnd
from vllm_adapter.worker.transfer.planner import PeerPlanner
from vllm_adapter.worker.transfer.reads import ReadCoordinator
from vllm_adapter.worker.transfer.records import TransferParts

BLOCKS, TOKENS, HEAD_SIZE, LAYERS = 8, 4, 2, 2
PEER_IDS, LOCAL_IDS = (3, 5, 2), (1, 7, 4)
CONTENT = 2 * HEAD_SIZE


@dataclass(frozen=True)
class Family:
    """A kind of cache. `heads` is the number of KV heads of the model, 0 for latent attention."""

    heads: int

    def held(self, tp: int, rank: int) -> range:
        """Heads that a rank holds: an even share, or a replica where there are fewer heads than ranks."""
        if self.heads >= tp:
            share = self.heads // tp
            return range(rank * share, (rank + 1) * share)
        return range(rank * self.heads // tp, rank * self.heads // tp + 1)

    def fits(self, tp: int) -> bool:
        return not self.heads or self.heads % tp == 0 or tp % self.heads == 0


FAMILIES = {"dense": Family(8), "grouped": Family(2), "latent": Family(0)}
# vLLM starts no engine whose size and number of heads do not divide one another.
PAIRS = [
    (name, consumer_tp, producer_tp)
    for name, family in FAMILIES.items()
    for consumer_tp, producer_tp in itertools.product(filter(family.fits, range(1, 9)), repeat=2)
]


class Rank:
    """A rank's memory, geometry document and facts."""

    def __init__(self, family: Family, tp: int, rank: int) -> None:
        self.held = family.held(tp, rank) if family.heads else range(1)
        layers = tuple(f"layers.{n}" for n in range(LAYERS))
        kind: Any = "attention" if family.heads else "latent"
        self.facts: EngineFacts = facts(
            tp=tp, rank=rank, heads=family.heads or 1, blocks=BLOCKS, head_size=HEAD_SIZE,
            groups=(CacheGroup(kind, TOKENS, 0, 0, layers),),
        )  # fmt: skip
        self.arrays = [np.zeros((BLOCKS, len(self.held), TOKENS, CONTENT), np.float32) for _ in layers]
        caches = [self._cache(layer, array, family) for layer, array in zip(layers, self.arrays, strict=True)]
        self.document = local_document(self.facts, caches)

    @staticmethod
    def _cache(layer: str, array: np.ndarray[Any, Any], family: Family) -> LayerCache:
        return LayerCache(
            layer, 0, array.ctypes.data, array.shape, array.strides, 4, "DRAM", 0, array[0].nbytes,
            is_latent=not family.heads,
        )  # fmt: skip

    def fill(self, ids: tuple[int, ...]) -> None:
        for layer, (place, block) in itertools.product(range(LAYERS), enumerate(ids)):
            self.arrays[layer][block] = truth(layer, place)[self.held.start : self.held.stop]

    def assert_has(self, ids: tuple[int, ...]) -> None:
        for layer, (place, block) in itertools.product(range(LAYERS), enumerate(ids)):
            expected = truth(layer, place)[self.held.start : self.held.stop]
            np.testing.assert_array_equal(self.arrays[layer][block], expected)
        untouched = [block for block in range(BLOCKS) if block not in ids]
        assert not any(array[untouched].any() for array in self.arrays)


def truth(layer: int, place: int) -> np.ndarray[Any, Any]:
    """The global page of a layer at a place in the prompt: all heads, every element different and none zero."""
    count = 8 * TOKENS * CONTENT
    first = 1 + (layer * len(PEER_IDS) + place) * count
    return np.arange(first, first + count, dtype=np.float32).reshape(8, TOKENS, CONTENT)


class MovingAgent(FakeAgent):
    """Copies the bytes of every read at once, and delivers its notification."""

    def __init__(self, delivered: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.delivered = delivered
        self.moved: list[str] = []

    def post_read(self, transfer_id: str, peer: str, local: Any, remote: Any, **read: Any) -> None:
        super().post_read(transfer_id, peer, local, remote, **read)
        spec = self.peers[peer]
        assert len(local) == len(remote)
        for here, there in zip(places(spec.local_rows, local), places(spec.peer_rows, remote), strict=True):
            assert here[1] == there[1]
            ctypes.memmove(here[0], there[0], here[1])
        self.moved.append(transfer_id)
        self.delivered.append((peer, read["notification"]))

    def send_notification(self, peer: str, payload: bytes) -> bool:
        assert peer in self.peers
        self.delivered.append((peer, payload))
        return True


def places(rows: Any, indices: Any) -> list[tuple[int, int]]:
    """(address, length in bytes) of each descriptor; descriptors are numbered over all rows."""
    table = [
        (int(address) + k * int(stride), int(length))
        for address, length, _device, stride, count in rows
        for k in range(int(count))
    ]
    return [table[index] for index in indices]


def read_into(rank: Rank, producers: list[Rank], family: str, delivered: list[tuple[str, bytes]]) -> None:
    """Hand one read order to a production coordinator of this rank, and step it to the order's end."""
    agent, handshakes, finished = MovingAgent(delivered), FakeHandshakes(), list[ReadEnd]()
    nobody: Any = None
    untyped: Any = (agent, handshakes, FakeRecorder())
    thread, client, recorder = untyped
    parts = TransferParts(thread, client, Codec(), recorder, lambda: 0.0, "D", PeerSpec, Settings(), 14)
    planner = PeerPlanner(rank.document, PeerGeometry(nobody, ()), Planner(), "DRAM")
    reads = ReadCoordinator(parts, planner, finished.append)
    wanted = order(
        family, peer=peer(tp=len(producers)), peer_blocks=(blocks(*PEER_IDS),), local_blocks=(blocks(*LOCAL_IDS),),
        tokens=len(PEER_IDS) * TOKENS, nonce="n",
    )  # fmt: skip
    reads.read(wanted)
    for asked in handshakes.asked:  # the first rank alone, then those that are needed
        peers = {
            (pp, tp): Metadata(geometry=pack_document(producers[tp].document), agent_metadata=b"%d" % tp)
            for pp, tp in asked["ranks"]
        }
        asked["on_done"](Outcome(peers=peers))
    for transfer_id in agent.moved:
        reads.transfer_ended(Result(transfer_id))
    assert [(end.code, end.message) for end in finished] == [("", "")]
    assert recorder.errors == []


@pytest.mark.never_wrong("B1")
@pytest.mark.parametrize(("name", "consumer_tp", "producer_tp"), PAIRS)
def test_bytes_land_where_they_belong_and_every_producer_rank_is_released(
    name: str, consumer_tp: int, producer_tp: int
) -> None:
    """Latent caches at 2 to 1 and 4 to 2 used to fail every request: ranks that are only notified were asked for rows."""
    family = FAMILIES[name]
    producers = [Rank(family, producer_tp, rank) for rank in range(producer_tp)]
    for producer in producers:
        producer.fill(PEER_IDS)
    delivered: dict[int, list[tuple[str, bytes]]] = {}
    for number in range(consumer_tp):
        consumer = Rank(family, consumer_tp, number)
        read_into(consumer, producers, name, delivered.setdefault(number, []))
        consumer.assert_has(LOCAL_IDS)
    verdicts: Counter[str] = Counter()
    for rank in range(producer_tp):
        verdicts[released(rank, delivered)] += 1
    assert verdicts == {"complete": producer_tp}


def released(rank: int, delivered: dict[int, list[tuple[str, bytes]]]) -> str:
    """Count a producer rank's notifications in a lease table as its worker does; return the last verdict."""
    table, verdict = LeaseTable(), "none"
    table.expect("p-r1", now_s=0.0)
    table.grant("p-r1", lease_s=30.0, fence=(3, 99), nonce="n", now_s=0.0)
    for consumer, notifications in delivered.items():
        for key, payload in notifications:
            if key.endswith(f"/0.{rank}"):
                view = Codec().parse_notification(payload)
                verdict = table.read_complete(
                    "p-r1",
                    reader=f"D/{consumer}",
                    consumer=view.consumer,
                    reader_count=view.reader_count,
                    nonce=view.nonces[0],
                    now_s=1.0,
                )
                assert verdict in {"counted", "complete"}, verdict
    return verdict
