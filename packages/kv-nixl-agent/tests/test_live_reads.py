"""Probe pages behind the fence words, and reads of them from ranks that are alive, dead, older or damaged."""

import json
import zlib

import numpy as np
import pytest
from helpers import exit_code

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
from kv_nixl_agent.tools.remote import LiveRank, Measurement, RankRead, measure_ranks, read_ranks
from kv_nixl_agent.tools.selftest import ReadPath

CMA = [ReadPath("host", "host", "0..inf", "zero-copy", "cma/memory")]
TCP = [ReadPath("host", "host", "0..inf", "software emulation", "tcp/lo")]
GOOD = RankRead("0.0", checksum=1, word_us=2.0, read_gb_s=3.0, moved_bytes=4)
DESCRIBED = [{"name": "0.0", "agent_metadata": "AAEC", "fence": [4096, 0, 16]}]


@pytest.fixture
def rank():
    fabric = FakeFabric()
    agents = []

    def make(name="producer", *, fence_words=64):
        agents.append(TransferAgent(name, [], AgentOptions(fence_words=fence_words), port_factory=fabric.port))
        return agents[-1]

    yield fabric, make
    for agent in agents:
        agent.close()


def reader(fabric, most_bytes=64 << 20, timeout_s=5.0):
    memory = np.zeros((remote._BATCH_PAGES, PROBE_PAGE_BYTES), dtype=np.uint8)
    agent = TransferAgent("reader", [(memory.ctypes.data, memory.nbytes, 0, "DRAM")], port_factory=fabric.port)
    return agent, remote._Reader(agent, memory, most_bytes, timeout_s)


@pytest.mark.parametrize("words", [1, 7, 64, 4096])
def test_pages_lie_behind_the_words_and_touch_none_of_them(words):
    fences = FenceArray(words)
    ((address, page_bytes, _, stride, count),) = probe_rows(fences.location).tolist()
    assert (page_bytes, stride, count) == (PROBE_PAGE_BYTES, PROBE_PAGE_BYTES, PROBE_PAGES)
    assert page_bytes * count == 8 * PROBE_WORDS
    assert address % 64 == 0
    ((first, _, _, _, own),) = fences.rows().tolist()
    assert first + 8 * own <= address, "no word of the array is in a page"
    assert address + 8 * PROBE_WORDS == fences.location[0] + fences.total_bytes, "all of it is registered, and no more"
    assert words_before_pages(4096) == 4616


def test_the_pattern_is_public_and_every_word_differs():
    pattern = probe_pattern()
    assert len(set(pattern.tolist())) == PROBE_WORDS
    assert zlib.crc32(pattern.tobytes()) == 0xEACC91BB, "peers of other versions compare with this"


def test_a_rank_is_read_compared_and_timed(rank):
    fabric, make = rank
    producer = make()
    agent, reads = reader(fabric, most_bytes=40 << 20)
    found = reads.read(LiveRank("0.0", producer.agent_metadata(), producer.fence))
    assert (found.code, found.checksum) == ("", 0xEACC91BB)
    assert found.read_gb_s > 0
    assert found.word_us > 0
    assert found.moved_bytes == 32 << 20, "two batches of 16 MiB lie within 40 MiB"
    again = reads.read(LiveRank("0.1", make("second").agent_metadata(), make("third").fence))
    assert again.code == "peer-rows-unregistered", "the fence of another rank"
    agent.close()


def test_a_rank_of_an_older_version_has_no_pages(rank):
    fabric, make = rank
    producer = make()
    address, device, words = producer.fence
    agent, reads = reader(fabric)
    found = reads.read(LiveRank("0.0", producer.agent_metadata(), (address, device, words + PROBE_WORDS)))
    assert found.code == "peer-rows-unregistered"
    agent.close()


def test_other_bytes_are_told_with_both_checksums(rank):
    fabric, make = rank
    producer = make()
    address, device, words = producer.fence
    agent, reads = reader(fabric)
    found = reads.read(LiveRank("0.0", producer.agent_metadata(), (address, device, words - 24)))
    assert found.code == "bytes-differ"
    assert "eacc91bb" in found.message
    agent.close()


def test_damaged_metadata_is_a_result(rank):
    fabric, make = rank
    agent, reads = reader(fabric)
    found = reads.read(LiveRank("0.0", b"nothing", make().fence))
    assert found.code in {"metadata-rejected", "metadata-damaged"}
    agent.close()


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (Measurement([GOOD], CMA), 0, "0.0: 3.00 GB/s, a word in 2 us, checksum 00000001"),
        (Measurement([GOOD], TCP), 1, "software emulation tcp/lo"),
        (Measurement([GOOD, RankRead("0.1", "timed-out", "too slow")], CMA), 3, "0.1: too slow (timed-out)"),
        (Measurement([], error="no NIXL here"), 3, "no NIXL here"),
    ],
)
def test_exit_code_and_words(monkeypatch, capsys, tmp_path, found, code, said):
    (tmp_path / "ranks.json").write_text(json.dumps(DESCRIBED))
    monkeypatch.setattr("kv_nixl_agent.tools.cli.measure_ranks", lambda *_, **__: found)
    assert exit_code("measure", str(tmp_path / "ranks.json")) == code
    assert said in capsys.readouterr().out
    assert exit_code("measure", str(tmp_path / "ranks.json"), "--json") == code
    answer = json.loads(capsys.readouterr().out)
    assert (len(answer["ranks"]), answer["is_tcp"]) == (len(found.ranks), code == 1)


@pytest.mark.parametrize(
    "fence", [[(1 << 64) - 8 * 16, 0, 16], [-8, 0, 16], [4096, -1, 16], [4096, 0, 1 << 70], [1, 2]]
)
def test_a_fence_that_no_rank_has_is_refused_by_name(fence):
    with pytest.raises(ValueError, match=r"0\.1|not enough values"):
        read_ranks(json.dumps([*DESCRIBED, {"name": "0.1", "agent_metadata": "AAEC", "fence": fence}]))


def test_answers_of_many_ranks_come_whole():
    """1000 ranks answer with more than the 64 KiB that a pipe holds."""
    ranks = [LiveRank(f"0.{number}", b"no metadata", (4096, 0, 16)) for number in range(1000)]
    found = measure_ranks(ranks, most_bytes=0, timeout_s=0.01)
    assert (found.error, len(found.ranks)) == ("", 1000)
