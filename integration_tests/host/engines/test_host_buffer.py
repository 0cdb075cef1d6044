"""Host-buffer mode on real engines: both mirror their caches in host memory, and peers only see the mirrors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pairs import Pair, prompt, started_pair

MIRRORED = {"KV_TRANSFER_TEST_HOST_BUFFER": "1"}
CHUNK_TOKENS = 200  # of blocks of 128: chunks end inside blocks


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    arguments = ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", "8"]
    with started_pair("dense", prefill_arguments=arguments, environment=MIRRORED) as running:
        yield running


def test_prompts_of_one_chunk_and_of_many_give_the_text_of_one_engine(pair: Pair) -> None:
    texts = [prompt(n, 20 + 60 * n) for n in range(5)]
    assert max(map(len, texts)) > 4 * CHUNK_TOKENS
    pair.assert_same_as_alone(texts)
    for engine in (pair.prefill, pair.decode):
        assert "KV_TRANSFER_TEST_HOST_BUFFER is set" in engine.log.read_text(errors="replace")
    assert pair.decode_count("vllm:nixl_xfer_time_seconds_count") == len(texts)
    assert pair.decode_count("vllm:nixl_num_failed_transfers_total") == 0
    assert pair.decode_count("vllm:prompt_tokens_by_source_total", source="local_compute") == 0
    assert pair.decode_count("vllm:kv_transfer_mirror_restore_seconds_count") == len(texts)
    assert pair.decode_count("vllm:kv_transfer_num_failed_mirror_copies_total") == 0
    pair.assert_all_blocks_free()


def test_blocks_that_the_producer_computed_for_itself_are_handed_over_too(pair: Pair) -> None:
    """The prompt's first blocks are a prefix hit of a request that was no hand-over: they never were in the mirror."""
    first = prompt(200, 90)
    pair.ask_all([first], url=pair.prefill.url)
    pair.assert_same_as_alone([first + prompt(201, 60)])
    pair.assert_all_blocks_free()


def test_a_prefix_hit_of_the_consumer_moves_only_the_rest(pair: Pair) -> None:
    first, longer = prompt(210, 90), prompt(210, 90) + prompt(211, 90)
    pair.assert_same_as_alone([first])
    moved = pair.decode_count("vllm:nixl_bytes_transferred_sum")
    pair.assert_same_as_alone([longer])
    block_bytes = 128 * 2 * 4 * 64 * 4 * 4
    assert 0 < pair.decode_count("vllm:nixl_bytes_transferred_sum") - moved < len(longer) / 128 * block_bytes
    pair.assert_all_blocks_free()
