"""Host-buffer mode on real engines: both mirror their caches in host memory, and peers only see the mirrors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleets import COMPUTED, FAILED, TRANSFERS, Fleet, probe_environment, probed, prompt, started_pair

CHUNK_TOKENS = 200  # of blocks of 128: chunks end inside blocks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    arguments = ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "8"]
    mirrored = probe_environment(tmp_path_factory.mktemp("probes"), "MIRROR")
    with started_pair("dense", configure=probed, arguments={"prefill": arguments}, environment=mirrored) as running:
        yield running


@pytest.mark.proves("pages mirrored in host memory: proof")
def test_prompts_of_one_chunk_and_of_many_give_the_text_of_one_engine(pair: Fleet) -> None:
    texts = [prompt(n, 20 + 60 * n) for n in range(5)]
    assert max(map(len, texts)) > 4 * CHUNK_TOKENS
    pair.assert_same_as_alone(texts)
    for name in pair.engines:
        assert "KVDEV_PROBE_MIRROR is set" in pair.log(name)
    assert pair.count("decode", TRANSFERS) == len(texts)
    assert pair.count("decode", FAILED) == 0
    assert pair.count("decode", COMPUTED, source="local_compute") == 0
    assert pair.count("decode", "vllm:kv_transfer_mirror_restore_seconds_count") == len(texts)
    assert pair.count("decode", "vllm:kv_transfer_num_failed_mirror_copies_total") == 0
    pair.assert_all_blocks_free()


def test_blocks_that_the_producer_computed_for_itself_are_handed_over_too(pair: Fleet) -> None:
    """The prompt's first blocks are a prefix hit of a request that was no hand-over: they never were in the mirror."""
    first = prompt(200, 90)
    pair.answers([first], decode="prefill")
    pair.assert_same_as_alone([first + prompt(201, 60)])
    pair.assert_all_blocks_free()
