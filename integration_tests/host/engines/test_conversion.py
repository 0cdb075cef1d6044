"""Blocks of another size on real engines: read whole and put in order by torch."""

from __future__ import annotations

from pairs import prompt, started_pair


def test_smaller_blocks_are_read_whole_and_put_in_order() -> None:
    """vLLM's CPU kernel keeps keys by channel: two blocks of 64 tokens are not one of 128, byte by byte."""
    with started_pair(
        "dense", prefill_arguments=["--block-size", "64"], decode_arguments=["--block-size", "128"]
    ) as pair:
        texts = [prompt(n, 20 + 60 * n) for n in range(5)]
        pair.assert_same_as_alone(texts)
        assert pair.decode_count("vllm:nixl_xfer_time_seconds_count") == len(texts)
        assert pair.decode_count("vllm:kv_transfer_conversion_seconds_count") == len(texts)
        assert pair.decode_count("vllm:nixl_num_failed_transfers_total") == 0
        assert pair.decode_count("vllm:prompt_tokens_by_source_total", source="local_compute") == 0
        pair.assert_same_as_alone([texts[4] + prompt(5, 40)])
        pair.assert_all_blocks_free()
