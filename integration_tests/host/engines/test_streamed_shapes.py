"""Early tickets in shapes that a router would not send: forged, repeated, late, one-sided, between unlike engines.

Each request ends with the text of one engine alone: read from the peer where that is right, else computed by the decode engine.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from fleets import OWN_WORKERS, Fleet, client, ours, prompt, started_fleet

STREAMED = "vllm:kv_transfer_stream_bytes_count"
SERVES = {"do_remote_decode": True, "do_remote_prefill": False}
READS = {"do_remote_prefill": True, "do_remote_decode": False}
KEYS: dict[str, Any] = {
    "streaming": True,
    "remote_hosts": ["127.0.0.0/8"],
    "read_timeout_s": 6,
    "kv_lease_duration": 4,
    "kv_load_failure_policy": "recompute",
}
CHUNKS = ["--max-num-batched-tokens", "128", "--max-num-seqs", "8"]
LONG = 150
"""Words of a prompt that takes many chunks."""
LONG_ONLY = pytest.mark.skipif(
    not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; more engines start"
)
pytestmark = LONG_ONLY


def early(fleet: Fleet, prefill: str = "prefill", **changes: object) -> dict[str, object]:
    """Return `kv_stream` as a router writes it."""
    return {"id": uuid.uuid4().hex, "host": "127.0.0.1", "port": fleet.engines[prefill].side_channel_port, **changes}


async def post(fleet: Fleet, engine: str, body: dict[str, Any]) -> tuple[int, list[str]]:
    """Return status and texts of a completion."""
    async with client(timeout_s=90) as session:
        status, answer = await fleet.send(session, engine, {"max_tokens": 24, **body})
    return status, [choice["text"] for choice in answer.get("choices", ())]


async def prefill(fleet: Fleet, text: str | list[str], stream: object, engine: str = "prefill", tokens: int = 1) -> int:
    body = {"prompt": text, "max_tokens": tokens, "kv_transfer_params": {**SERVES, "kv_stream": stream}}
    return (await post(fleet, engine, body))[0]


async def decode(fleet: Fleet, text: str | list[str], stream: object, engine: str = "decode") -> list[str]:
    status, texts = await post(fleet, engine, {"prompt": text, "kv_transfer_params": {**READS, "kv_stream": stream}})
    assert status == 200, stream
    return texts


async def both(fleet: Fleet, text: str | list[str], stream: object, *engines: str) -> list[str]:
    """Return the decode engine's texts; both are asked at once."""
    first, second = engines or ("prefill", "decode")
    status, texts = await asyncio.gather(prefill(fleet, text, stream, first), decode(fleet, text, stream, second))
    assert status == 200
    return texts


def alone(fleet: Fleet, *texts: str, engine: str = "prefill") -> list[str]:
    return [fleet.answers([text], decode=engine)[0] for text in texts]


def assert_streams(fleet: Fleet, text: str, *engines: str, ranks: int = 1) -> None:
    """A prompt of many chunks is read while it is computed, by each rank of its reader, and nothing is left behind."""
    first, second = engines or ("prefill", "decode")
    streams = fleet.count(second, STREAMED)
    assert asyncio.run(both(fleet, text, early(fleet, first), first, second)) == alone(fleet, text, engine=first)
    assert fleet.count(second, STREAMED) == streams + ranks
    assert_nothing_wrong(fleet)


def assert_nothing_wrong(fleet: Fleet) -> None:
    fleet.assert_all_blocks_free(within_s=20)
    for name in fleet.engines:
        assert "Traceback" not in fleet.log(name)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    # Ten blocks more than a prompt needs: several at once preempt one another.
    arguments = {"prefill": [*CHUNKS, "--num-gpu-blocks-override", "24"], "decode": CHUNKS}
    with started_fleet("dense", {name: ours(**KEYS) for name in arguments}, arguments=arguments) as running:
        asyncio.run(both(running, prompt(1), early(running)))
        yield running


def test_requests_that_share_an_id_get_their_own_texts(fleet: Fleet) -> None:
    texts = [prompt(30 + number, LONG) for number in range(3)]
    expected = alone(fleet, *texts)
    assert asyncio.run(both(fleet, list(texts), early(fleet))) == expected, "a list of prompts"
    stream = early(fleet)

    async def readers() -> list[list[str]]:
        serving = asyncio.create_task(prefill(fleet, texts[0], stream))
        answers = await asyncio.gather(*(decode(fleet, texts[0], stream) for _ in range(3)))
        await serving
        return answers

    assert asyncio.run(readers()) == [expected[:1]] * 3


@pytest.mark.proves("windows, latent: streamed", "experts: proof")
@pytest.mark.parametrize("family", ["sliding-window", "mla"])
def test_families_give_the_text_of_a_plain_hand_over(family: str) -> None:
    arguments = dict.fromkeys(("prefill", "decode"), CHUNKS)
    with started_fleet(family, {name: ours(**KEYS) for name in arguments}, arguments=arguments) as fleet:
        streams = fleet.count("decode", STREAMED)
        for number, words in enumerate((3, 60, LONG, LONG + 100)):
            text = prompt(80 + number, words)
            streamed = asyncio.run(both(fleet, text, early(fleet)))
            assert streamed == fleet.answers([text], prefill="prefill", decode="decode")
        assert fleet.count("decode", STREAMED) > streams
        assert_nothing_wrong(fleet)


def test_unequal_and_equal_tensor_parallel_sizes_over_tcp() -> None:
    patience = {"read_timeout_s": 720.0, "kv_lease_duration": 60}
    parallel = [*CHUNKS, "--tensor-parallel-size", "2"]
    arguments = {"one": CHUNKS, "two": parallel, "too": parallel}
    with started_fleet(
        "dense",
        {name: ours(**{**KEYS, **patience}) for name in arguments},
        arguments=arguments,
        environment={**OWN_WORKERS, "UCX_TLS": "tcp"},
        cores={"two": "0|1", "too": "0|1"},
    ) as fleet:
        for number, (first, second) in enumerate([("one", "two"), ("two", "one"), ("two", "too")]):
            fleet.only(first, second)
            asyncio.run(both(fleet, prompt(100 + number), early(fleet, first), first, second))
            assert_streams(fleet, prompt(90 + number, LONG), first, second, ranks=1 if second == "one" else 2)
