"""Engines with pipeline stages on either side: of ours, and of vLLM's own connector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
from commands import adapter
from fleets import BYTES, OWN_WORKERS, Fleet, hosts_own, ours, prompt, stages, started_fleet

# Ranks that wait for one another delay the first hand-over on few cores: nothing may run out of time.
PATIENCE: dict[str, Any] = {"read_timeout_s": 720.0, "kv_lease_duration": 60}
SIZES = {
    "one": (1, 1),
    "too": (1, 1),
    "two": (2, 1),
    "three": (3, 1),
    "wide": (2, 2),
    "hosts": (1, 1),
    "hosts-two": (2, 1),
}
"""Pipeline stages and tensor-parallel ranks by engine."""
LONG_ONLY = pytest.mark.skipif(
    not os.environ.get("KVDEV_LONG"), reason="long: dev.py test --long host; more engines start"
)
BLOCK_TOKENS, TOKEN_BYTES = 128, 4 * 2 * 4 * 64 * 4
"""Of the dense model: four layers with keys and values of four heads of 64 floats."""


def started(family: str, configs: Mapping[str, Mapping[str, object]]) -> AbstractContextManager[Fleet]:
    cores = {name: "|".join("01"[n % 2] for n in range(pp * tp)) for name, (pp, tp) in SIZES.items()}
    # The batch decides between two experts with nearly equal scores, so each request runs alone.
    alone = ["--max-num-seqs", "1"] if family == "mla" else []
    arguments = {name: [*stages(*size), *alone] for name, size in SIZES.items()}
    return started_fleet(family, configs, arguments=arguments, environment=OWN_WORKERS, cores=cores)


def hand_over(fleet: Fleet, number: int, prefill: str, decode: str) -> None:
    """Hand prompts over; the texts must be those of engines without stages, the bytes those of the prompts' blocks.

    Where a prompt is handed over, latent attention computes its last token by another formula, and experts make another text of
    that: there the truth is a hand-over between engines without stages. Elsewhere it is the text of an engine that read nothing.
    """
    texts = [prompt(10 * number + n, 20 + 60 * n) for n in range(2)]
    source, reference = ("one", "too") if "too" in fleet.engines else ("", prefill if decode == "one" else "one")
    fleet.only("one", reference)
    expected = fleet.answers(texts, prefill=source, decode=reference)
    fleet.only(prefill, decode)
    fleet.let_connect(prefill, decode)
    before = fleet.count(decode, BYTES)
    fleet.assert_handed_over(prefill, decode, texts, expected)
    moved = fleet.count(decode, BYTES) - before
    print(f"\n  {fleet.family} {prefill} -> {decode}: {len(texts)} equal texts, {moved:.0f} bytes, nothing recomputed")
    if fleet.family == "dense":
        blocks = sum(-(-len(text) // BLOCK_TOKENS) for text in texts)
        assert moved == blocks * BLOCK_TOKENS * TOKEN_BYTES


@pytest.mark.proves("dense: pipeline")
@pytest.mark.parametrize(
    ("family", "pairs"),
    [
        ("dense", ["two one", "one two"]),
        pytest.param("dense", ["three two", "two three", "wide one", "one wide"], marks=LONG_ONLY),
        pytest.param(
            "sliding-window", ["three one", "one three"], marks=[LONG_ONLY, pytest.mark.proves("windows: pipeline")]
        ),
        pytest.param("mla", ["three one", "one three"], marks=[LONG_ONLY, pytest.mark.proves("latent: pipeline")]),
        pytest.param(
            "mamba-beside", ["two one", "one two"], marks=[LONG_ONLY, pytest.mark.proves("Mamba-2: pipeline")]
        ),
    ],
)
def test_stages_hand_over_to_stages(family: str, pairs: list[str]) -> None:
    more = ["one too"] if family == "mla" else ["one"]
    names = dict.fromkeys(name for pair in [*more, *pairs] for name in pair.split())
    with started(family, {name: ours(**PATIENCE) for name in names}) as fleet:
        for number, pair in enumerate(pairs):
            hand_over(fleet, number, *pair.split())


@pytest.mark.proves(
    "pipeline stages from vLLM's own or to engines of it: proof",
    "pipeline stages to vLLM's own readers: proof = pipeline-stages",
)
@pytest.mark.never_wrong("B16")
@LONG_ONLY
def test_stages_read_from_the_hosts_own_connector_and_refuse_its_readers() -> None:
    configs = {"one": ours(), "two": ours(**PATIENCE), "hosts": hosts_own(), "hosts-two": hosts_own()}
    with started("dense", configs) as fleet:
        for number, pair in enumerate(["hosts two", "hosts-two one", "hosts-two two"]):
            hand_over(fleet, number, *pair.split())
        fleet.only("two", "hosts")
        channels = [f"127.0.0.1:{fleet.engines[name].side_channel_port}" for name in ("hosts", "two")]
        reported = adapter("check", *channels, "--no-read", code=None)
        assert "decode rank 1.0 reads from prefill ranks 0.0: 4096 bytes a token" in reported
        for number in range(2):
            with pytest.raises(AssertionError, match="500"):
                fleet.answers([prompt(90 + number)], prefill="two", decode="hosts", max_tokens=2)
        assert "refused (pipeline-stages)" in fleet.log("hosts")
        assert fleet.log("two").count("asks as vLLM's own connector does") == 1
        assert fleet.answers([prompt(95)], decode="hosts", max_tokens=2), "its engine goes on"
