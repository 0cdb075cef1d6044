"""Latent caches and one-group states between one rank and two: what arrives is the producer's, byte for byte.

Text cannot be compared here. Sums over two ranks are rounded in another order than over one, and random weights make another text
of that. So the pages are compared, and the first token's probabilities, with weights that are calm.
"""

from __future__ import annotations

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
    probe_environment,
    probed,
    prompt,
    started_fleet,
)
from pages import assert_same_pages, dump_now, received_since

RANKS = {"one": 1, "two": 2}
# Ranks that wait for one another spin, and on few cores that delays the first hand-over: nothing may run out of time.
PATIENCE: dict[str, Any] = {"read_timeout_s": 720.0, "kv_lease_duration": 60}
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
    answer = fleet.ask(engine, {**body, **({"kv_transfer_params": ticket} if ticket else {})})
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


def distance(these: dict[str, float], those: dict[str, float]) -> float:
    """Return the largest difference; a token among the most probable ones of one side only is as far as can be."""
    lowest = min([*these.values(), *those.values()])
    return max(abs(these.get(token, lowest) - those.get(token, lowest)) for token in {*these, *those})


@pytest.mark.proves("latent, Mamba-2: unequal ranks")
@pytest.mark.parametrize(("prefill", "decode"), [("one", "two"), ("two", "one")])
def test_what_arrives_is_the_producers_byte_for_byte(fleet: tuple[Fleet, Path], prefill: str, decode: str) -> None:
    engines, folder = fleet
    sides = {"producer": prefill, "consumer": decode}
    groups = {side: json.loads((folder / name / "groups.json").read_bytes()) for side, name in sides.items()}
    text = prompt(RANKS[prefill], 70)
    transfers, failed = engines.count(decode, TRANSFERS), engines.count(decode, FAILED)
    computed = engines.count(decode, COMPUTED, source="local_compute")
    before = set((folder / decode).glob("*.blocks.json"))
    ticket = engines.take_ticket(prefill, text)
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
