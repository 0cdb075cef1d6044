"""Probe pages behind the fence words, and reads of them from ranks that are alive, dead, older or damaged."""

import zlib

import numpy as np
import pytest

from kv_nixl_agent import AgentOptions, TransferAgent
from kv_nixl_agent.memory.fences import (
    PROBE_PAGE_BYTES,
    PROBE_PAGES,
    PROBE_WORDS,
    FenceArray,
    probe_pattern,
    probe_rows,
    words_before_pages,
)
from kv_nixl_agent.testing import FakeFabric
from kv_nixl_agent.tools import remote
from kv_nixl_agent.tools.remote import LiveRank, measure_ranks


@pytest.fixture
def rank():
    """Return a producer, and a function that reads it with an agent of its own."""
    fabric = FakeFabric()
    producer = TransferAgent("producer", [], AgentOptions(fence_words=64), port_factory=fabric.port)

    def read(metadata, fence, most_bytes=64 << 20):
        memory = np.zeros((remote._BATCH_PAGES, PROBE_PAGE_BYTES), dtype=np.uint8)
        agent = TransferAgent("reader", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")], port_factory=fabric.port)
        try:
            return remote.read_rank(agent, memory, LiveRank("0.0", metadata, fence), most_bytes, 5.0)
        finally:
            agent.close()

    yield producer, read
    producer.close()


@pytest.mark.parametrize("words", [1, 7, 64, 4096])
def test_pages_lie_behind_the_words_and_touch_none_of_them(words):
    fences = FenceArray(words)
    ((address, page_bytes, _, stride, count),) = probe_rows(fences.location).tolist()
    assert (page_bytes, stride, count) == (PROBE_PAGE_BYTES, PROBE_PAGE_BYTES, PROBE_PAGES)
    assert page_bytes * count == 8 * PROBE_WORDS
    assert address % 64 == 0
    assert fences.location[0] + 8 * words <= address, "no word of the array is in a page"
    assert address + 8 * PROBE_WORDS == fences.location[0] + fences.total_bytes, "all of it is registered, and no more"
    assert words_before_pages(4096) == 4616


def test_the_pattern_is_public_and_every_word_differs():
    pattern = probe_pattern()
    assert len(set(pattern.tolist())) == PROBE_WORDS
    assert zlib.crc32(pattern.tobytes()) == 0xEACC91BB, "peers of other versions compare with this"


def test_a_rank_is_read_compared_and_timed(rank):
    producer, read = rank
    found = read(producer.agent_metadata(), producer.fence, 40 << 20)
    assert (found.code, found.checksum) == ("", 0xEACC91BB)
    assert found.read_gb_s > 0
    assert found.word_us > 0
    assert found.moved_bytes == 32 << 20, "two batches of 16 MiB lie within 40 MiB"
    assert read(producer.agent_metadata(), producer.fence, 0).read_gb_s == 0.0, "too few bytes give no speed"


@pytest.mark.parametrize(
    ("more_words", "code"), [(PROBE_WORDS, "peer-rows-unregistered"), (-24, "bytes-differ"), (None, "metadata-damaged")]
)
def test_an_older_rank_other_bytes_and_damaged_metadata_are_results(rank, more_words, code):
    producer, read = rank
    address, device, words = producer.fence
    metadata = producer.agent_metadata() if more_words is not None else b"damaged"
    found = read(metadata, (address, device, words + (more_words or 0)))
    assert found.code == code
    assert code != "bytes-differ" or "eacc91bb" in found.message


def test_answers_of_many_ranks_come_whole():
    """1000 ranks answer with more than the 64 KiB that a pipe holds."""
    ranks = [LiveRank(f"0.{number}", b"no metadata", (4096, 0, 16)) for number in range(1000)]
    found = measure_ranks(ranks, most_bytes=0, timeout_s=0.01)
    assert (found.error, len(found.ranks)) == ("", 1000)
