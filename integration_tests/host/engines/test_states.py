"""States with prefix caching: vLLM keeps them at block boundaries only, and a hand-over takes the running one."""

from __future__ import annotations

from fleets import COMPUTED, FAILED, TRANSFERS, prompt, started_pair

CACHED = ["--enable-prefix-caching", "--mamba-cache-mode", "align", "--enable-chunked-prefill"]


def test_states_cross_while_their_prefixes_are_cached_on_both_sides() -> None:
    arguments = dict.fromkeys(("prefill", "decode"), [*CACHED, "--max-num-batched-tokens", "2048"])
    with started_pair("mamba", arguments=arguments) as pair:
        shared = prompt(1, 250)
        texts = [prompt(9, 10), shared, shared, shared + prompt(2, 60), shared + prompt(3, 100)]
        for text in texts:
            pair.assert_same_as_alone([text])
        print(len(shared), [pair.count(e, "vllm:prefix_cache_hits_total") for e in pair.engines])
        assert pair.count("decode", TRANSFERS) == len(texts)
        assert pair.count("decode", FAILED) == 0
        assert pair.count("decode", COMPUTED, source="local_compute") <= len(texts)
        pair.assert_all_blocks_free()
