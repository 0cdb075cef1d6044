"""Hand-overs under scheduling pressure: chunked prefill, unequal block sizes, caches too small for all requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleets import Fleet, ours, started_fleet
from pairs import prompt

TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FAILED = "vllm:nixl_num_failed_transfers_total"
PREEMPTIONS = "vllm:num_preemptions_total"
ARGUMENTS = {
    # Prompts below are longer than 96 tokens: each takes several steps.
    "chunked": ["--block-size", "64", "--max-num-batched-tokens", "96", "--max-num-seqs", "4"],
    # 11 usable blocks of 128 tokens: three requests of these tests fit, until they grow.
    "tight": ["--block-size", "128", "--num-gpu-blocks-override", "12", "--max-model-len", "640"],
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with started_fleet("dense", {name: ours() for name in ARGUMENTS}, arguments=ARGUMENTS) as running:
        yield running


@pytest.mark.parametrize(("prefill", "decode"), [("chunked", "tight"), ("tight", "chunked")])
def test_chunked_prompts_cross_between_unequal_block_sizes(fleet: Fleet, prefill: str, decode: str) -> None:
    texts = [prompt(10 * len(prefill) + n, 25 + 20 * n) for n in range(3)]
    transfers = fleet.count(decode, TRANSFERS)
    for text in texts:
        assert len(text) > 96
        assert fleet.answers([text], prefill=prefill, decode=decode) == fleet.answers([text], decode=prefill)
    assert fleet.count(decode, TRANSFERS) - transfers == len(texts)
    assert fleet.count(decode, FAILED) == 0
    fleet.assert_all_blocks_free()


def test_requests_preempted_for_want_of_blocks_give_the_same_text(fleet: Fleet) -> None:
    texts = [prompt(200 + n, 60) for n in range(6)]
    before = fleet.count("tight", PREEMPTIONS)
    got = fleet.answers(texts, prefill="chunked", decode="tight", max_tokens=240)
    assert fleet.count("tight", PREEMPTIONS) > before
    assert got == fleet.answers(texts, decode="chunked", max_tokens=240)
    assert fleet.count("tight", FAILED) == 0
    fleet.assert_all_blocks_free()


def test_a_producer_without_room_makes_prompts_wait_until_earlier_ones_are_read(fleet: Fleet) -> None:
    texts = [prompt(300 + n, 60) for n in range(8)]
    assert fleet.answers(texts, prefill="tight", decode="chunked") == fleet.answers(texts, decode="chunked")
    assert fleet.count("chunked", FAILED) == 0
    fleet.assert_all_blocks_free()
