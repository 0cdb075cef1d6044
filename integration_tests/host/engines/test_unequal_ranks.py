"""Latent caches and one-group states between one rank and two: what arrives is the producer's, byte for byte.

Text is no measure here. Sums over two ranks are rounded in another order than over one, and random weights make another text
of that. So the pages are compared, and the first token's probabilities, with weights that are calm.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import (
    COMPUTED,
    FAILED,
    OWN_WORKERS,
    TRANSFERS,
    Fleet,
    client,
    probe_environment,
    probed,
    prompt,
    started_fleet,
)
from pages import assert_same_pages, dump_now, received_since

RANKS = {"one": 1, "two": 2}
# Ranks that wait for one another spin, and on few cores that delays the first hand-over: nothing may run out of time.
PATIENCE: dict[str, Any] = {"handshake_timeout_s": 60.0, "read_timeout_s": 200.0, "kv_lease_duration": 60}
SMALL = {
    "mla-calm": ["--max-model-len", "512", "--num-gpu-blocks-override", "64"],
    "mamba-one-group": ["--max-model-len", "1024", "--num-gpu-blocks-override", "16"],
}
"""Caches that are quickly written down."""
TOLERANCE = {"mla-calm": 0.3, "mamba-one-group": 0.01}
TOP = 20


@pytest.fixture(scope="module", params=SMALL)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    family, folder = request.param, tmp_path_factory.mktemp("probes")
    with started_fleet(
        family,
        {name: probed(**PATIENCE) for name in RANKS},
        arguments={name: [*SMALL[family], "--tensor-parallel-size", str(ranks)] for name, ranks in RANKS.items()},
        environment=OWN_WORKERS,
        environments={name: probe_environment(folder / name, "RECEIVED") for name in RANKS},
        cores={"two": "0|1"},
    ) as running:
        yield running, folder


def post(fleet: Fleet, engine: str, text: str, ticket: dict[str, Any] | None = None) -> dict[str, float]:
    """Return the first token's most probable choices with their logarithms."""
    body = {"prompt": text, "max_tokens": 1, "logprobs": TOP, "return_tokens_as_token_ids": True}

    async def run() -> dict[str, Any]:
        async with client() as session:
            return await fleet.post(session, engine, {**body, **({"kv_transfer_params": ticket} if ticket else {})})

    found: dict[str, float] = asyncio.run(run())["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


def take_ticket(fleet: Fleet, engine: str, text: str) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with client() as session:
            return await fleet.ticket(session, text, engine, {})

    return asyncio.run(run())


def distance(these: dict[str, float], those: dict[str, float]) -> float:
    """Return the largest difference; a token among the most probable ones of one side only is as far as can be."""
    lowest = min([*these.values(), *those.values()])
    return max(abs(these.get(token, lowest) - those.get(token, lowest)) for token in {*these, *those})


@pytest.mark.parametrize(("prefill", "decode"), [("one", "two"), ("two", "one")])
def test_what_arrives_is_the_producers_byte_for_byte(fleet: tuple[Fleet, Path], prefill: str, decode: str) -> None:
    engines, folder = fleet
    sides = {"producer": prefill, "consumer": decode}
    groups = {side: json.loads((folder / name / "groups.json").read_bytes()) for side, name in sides.items()}
    text = prompt(RANKS[prefill], 70)
    transfers, failed = engines.count(decode, TRANSFERS), engines.count(decode, FAILED)
    computed = engines.count(decode, COMPUTED, source="local_compute")
    before = set((folder / decode).glob("*.blocks.json"))
    ticket = take_ticket(engines, prefill, text)
    produced = dump_now(engines, prefill, folder / prefill, RANKS[prefill])
    handed_over = post(engines, decode, text, ticket)
    received = received_since(folder / decode, before, RANKS[decode])
    # The last token is computed by who decodes: a state that was read must not hold it yet.
    tokens = min(ticket["remote_num_tokens"], len(text))
    assert assert_same_pages(groups, ticket, produced, received, tokens) > 10_000
    assert engines.count(decode, TRANSFERS) - transfers >= 1
    assert engines.count(decode, FAILED) == failed
    assert engines.count(decode, COMPUTED, source="local_compute") - computed <= 1
    alone, other = post(engines, "one", text), post(engines, "one", prompt(900 + RANKS[prefill], 70))
    tolerance = TOLERANCE[engines.family]
    near, far = distance(handed_over, alone), distance(other, alone)
    print(f"{engines.family} {prefill} -> {decode}: {near:.5f} from one engine alone, another prompt {far:.3f}")
    assert near < tolerance < far, (near, far)
    engines.assert_all_blocks_free(within_s=60)


IN_BFLOAT16: dict[str, dict[str, list[str]]] = {
    "mamba-one-group": {
        "small": ["--block-size", "160"],
        "large": ["--block-size", "480"],
        "two": ["--tensor-parallel-size", "2"],
    },
    "dense": {"small": ["--block-size", "64"], "large": ["--block-size", "128"]},
}
"""Engines of a family. A hybrid's blocks hold as many tokens as its states are large, so two ranks have others than one."""
LENGTH = 64
MOST_BEHIND = 0.1
"""Largest difference between the logarithms of the probabilities of a token that was taken and of the most probable one."""


@pytest.mark.never_wrong("A12")
@pytest.mark.parametrize("family", IN_BFLOAT16)
def test_texts_in_bfloat16_are_right_in_pools_that_were_used_before(family: str, tmp_path: Path) -> None:
    """Each token of an answer is about as probable to one engine alone as its own choice; sums are rounded in another order."""
    arguments = {
        name: [*more, "--dtype", "bfloat16", "--num-gpu-blocks-override", "64", "--max-model-len", "1024"]
        for name, more in IN_BFLOAT16[family].items()
    }
    with started_fleet(
        family,
        {name: probed(**PATIENCE) for name in arguments},
        arguments=arguments,
        environments={
            name: {**probe_environment(tmp_path / name, "USED"), **(OWN_WORKERS if name == "two" else {})}
            for name in arguments
        },
        cores={"two": "0|1"},
    ) as fleet:
        for number, other in enumerate(name for name in arguments if name != "small"):
            fleet.only("small", other)
            for prefill, decode in (("small", other), (other, "small")):
                transfers = fleet.count(decode, TRANSFERS)
                texts = [prompt(100 * number + 10 * len(prefill) + n, 5 + 27 * n) for n in range(5)]
                answers = [answer_of(fleet, text, prefill, decode) for text in texts]
                behind = [most_behind(fleet, "small", *answer) for answer in answers]
                print(
                    f"{family} {prefill} -> {decode}: {[round(each, 4) for each in behind]} behind the most probable token"
                )
                assert max(behind) < MOST_BEHIND, (prefill, decode, behind)
                assert fleet.count(decode, TRANSFERS) - transfers >= len(texts)
                assert fleet.count(decode, FAILED) == 0
            fleet.assert_all_blocks_free(within_s=60)


def answer_of(fleet: Fleet, text: str, prefill: str, decode: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt that was handed over, and those of the answer to it."""

    async def run() -> dict[str, Any]:
        async with client() as session:
            ticket = await fleet.ticket(session, text, prefill, {})
            body = {"prompt": text, "max_tokens": LENGTH, "return_token_ids": True, "kv_transfer_params": ticket}
            return await fleet.post(session, decode, body)

    choice = asyncio.run(run())["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"]


def most_behind(fleet: Fleet, engine: str, tokens: list[int], answer: list[int]) -> float:
    """Return how far a token of an answer is behind the most probable one, at most, where an engine reads all of it at once."""

    async def run() -> dict[str, Any]:
        async with client() as session:
            body = {"prompt": [*tokens, *answer], "max_tokens": 1, "prompt_logprobs": 1}
            return await fleet.post(session, engine, body)

    told = asyncio.run(run())["choices"][0]["prompt_logprobs"][len(tokens) :]
    assert len(told) == len(answer) == LENGTH
    rows = [{int(token): entry["logprob"] for token, entry in row.items()} for row in told]
    return max(max(row.values()) - row[token] for row, token in zip(rows, answer, strict=True))
