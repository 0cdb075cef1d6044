"""A dense model: hand-overs, prefix hits, aborts, hostile tickets, on one pair of real engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import pytest
from pairs import Pair, prompt, started_pair


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with started_pair("dense") as running:
        yield running


def test_concurrent_hand_overs_give_the_text_of_one_engine_and_recompute_nothing(pair: Pair) -> None:
    texts = [prompt(n, 30 + 40 * n) for n in range(6)]
    before = {
        name: pair.decode_count(name)
        for name in ("vllm:nixl_xfer_time_seconds_count", "vllm:nixl_num_failed_transfers_total")
    }
    recomputed = pair.decode_count("vllm:prompt_tokens_by_source_total", source="local_compute")
    pair.assert_same_as_alone(texts)
    assert pair.decode_count("vllm:nixl_xfer_time_seconds_count") - before["vllm:nixl_xfer_time_seconds_count"] == 6
    assert pair.decode_count("vllm:nixl_num_failed_transfers_total") == before["vllm:nixl_num_failed_transfers_total"]
    assert pair.decode_count("vllm:prompt_tokens_by_source_total", source="local_compute") == recomputed
    pair.assert_all_blocks_free()


def test_prefix_hits_partial_and_full_move_only_what_is_missing(pair: Pair) -> None:
    first, longer = prompt(100, 90), prompt(100, 90) + prompt(101, 90)
    pair.assert_same_as_alone([first])
    moved = pair.decode_count("vllm:nixl_bytes_transferred_sum")
    pair.assert_same_as_alone([first])
    full_hit = pair.decode_count("vllm:nixl_bytes_transferred_sum") - moved
    pair.assert_same_as_alone([longer])
    partial_hit = pair.decode_count("vllm:nixl_bytes_transferred_sum") - moved - full_hit
    block_bytes = 128 * 2 * 4 * 64 * 4 * 4
    assert full_hit <= block_bytes  # at most the last, partly filled block
    assert 0 < partial_hit < len(longer) / 128 * block_bytes
    pair.assert_all_blocks_free()


def test_a_prompt_shorter_than_a_block(pair: Pair) -> None:
    pair.assert_same_as_alone(["hi", "a"])


def test_a_first_token_that_stops_the_request_is_handed_over_too(pair: Pair) -> None:
    text = prompt(110, 50)
    (answer,) = pair.ask_all([text], url=pair.prefill.url, max_tokens=1)
    assert pair.ask_all([text], stop=[answer]) == [""]
    pair.assert_all_blocks_free()


def test_chat_and_streaming_go_through_the_router(pair: Pair) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt(120)}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }

    async def stream(url: str) -> str:
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
            text = ""
            async for raw in reply.content:
                line = raw.decode().strip()
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            return text

    assert asyncio.run(stream(pair.router)) == asyncio.run(stream(pair.prefill.url))


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
def test_clients_that_leave_strand_no_blocks(pair: Pair, after_s: float) -> None:
    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            asks = [asyncio.create_task(pair.ask(session, prompt(200 + n, 60), max_tokens=200)) for n in range(8)]
            await asyncio.sleep(after_s)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)

    asyncio.run(leave())
    pair.assert_same_as_alone([prompt(300)])
    pair.assert_all_blocks_free(within_s=60)


HOSTILE: list[object] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]},
    {
        "do_remote_prefill": True,
        "remote_block_ids": "x" * 1000,
        "remote_engine_id": 1,
        "remote_host": [],
        "remote_port": 0,
    },
    {
        "do_remote_prefill": True,
        "remote_engine_id": "nobody",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [[1, 2, 3]],
        "tp_size": 1,
    },
    {
        "do_remote_prefill": True,
        "remote_engine_id": "nobody",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_block_ids": [[1], [2], [3]],
        "tp_size": 10**12,
    },
    {"do_remote_decode": True, "remote_block_ids": [[10**12]]},
    {"do_remote_prefill": "yes", "do_remote_decode": 7},
    {},
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_ticket_is_answered_or_refused_and_the_next_request_served(pair: Pair, number: int) -> None:
    async def send() -> int:
        body = {"model": "tiny", "prompt": prompt(400 + number), "max_tokens": 4, "kv_transfer_params": HOSTILE[number]}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.post(pair.decode.url + "/v1/completions", json=body) as reply,
        ):
            await reply.read()
            return reply.status

    assert asyncio.run(send()) in {200, 400, 500}
    assert pair.decode.is_healthy()
    assert pair.prefill.is_healthy()
    pair.assert_same_as_alone([prompt(500 + number)])
    pair.assert_all_blocks_free(within_s=60)
