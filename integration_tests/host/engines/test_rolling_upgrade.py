"""Engines of several vLLM releases in one fleet, as during a rolling upgrade: each reads what the others computed."""

from __future__ import annotations

import os
from itertools import permutations

import pytest
from fleets import BYTES, EXPIRED, VLLM, forks, ours, prompt, started_fleet

from kvdev.envs import DEFAULT_VLLM, NEWEST_VLLM, host_python

OLDEST = "0.31.0"
LONG_ONLY = pytest.mark.skipif("KVDEV_LONG" not in os.environ, reason="weekly: an environment more, and three engines")
OF_THE_NEWEST = pytest.mark.skipif(VLLM != NEWEST_VLLM, reason="dev.py test newest: the suite of the newest vLLM")
ROLLING = ours(may_differ="minor")
if VLLM == NEWEST_VLLM:  # the other release is imported while tests before this one run
    forks(host_python(DEFAULT_VLLM))


@pytest.mark.parametrize(
    ("family", "releases"),
    [
        pytest.param(
            "dense",
            (DEFAULT_VLLM, NEWEST_VLLM),
            marks=[pytest.mark.newest, OF_THE_NEWEST, pytest.mark.proves("dense: other release")],
        ),
        pytest.param("dense", (OLDEST, DEFAULT_VLLM), marks=LONG_ONLY),
        pytest.param("dense", (OLDEST, NEWEST_VLLM), marks=LONG_ONLY),
        *(
            pytest.param(
                family,
                (OLDEST, DEFAULT_VLLM, NEWEST_VLLM),
                marks=[LONG_ONLY, pytest.mark.proves("windows, latent, Mamba-2: other release")],
            )
            for family in ("sliding-window", "mla-calm", "mamba")
        ),
    ],
)
def test_releases_hand_over_to_one_another_in_every_order(family: str, releases: tuple[str, ...]) -> None:
    """Another salt for each pair keeps prefix hits out, so that the same prompts cross as the same bytes every time."""
    some = [prompt(n, 20 + 60 * (n % 3)) for n in range(9)]
    names = {f"on-{release}": release for release in releases}
    with started_fleet(family, dict.fromkeys(names, ROLLING), releases=names) as fleet:
        # A latent model of random weights may answer a prompt otherwise when it stands in another batch.
        answers = {
            name: [
                dict(zip(some, fleet.answers(some, decode=name, cache_salt="together"), strict=True)),
                {text: fleet.answers([text], decode=name, cache_salt="singly")[0] for text in some},
            ]
            for name in names
        }
        texts = [text for text in some if all(one[text] == other[text] for one, other in answers.values())][:3]
        assert len(texts) == 3
        alone = {name: [one[text] for text in texts] for name, (one, _) in answers.items()}
        moved: set[float] = set()
        for prefill, decode in permutations(names, 2):
            fleet.only(prefill, decode)
            fleet.let_connect(prefill, decode)
            before = fleet.count(decode, BYTES)
            fleet.assert_handed_over(prefill, decode, texts, alone[decode], cache_salt=f"{prefill} {decode}")
            moved.add(fleet.count(decode, BYTES) - before)
            assert "accepted with differences: nixl_connector_version: " in fleet.log(decode)
        fleet.only(*names)
        assert len(moved) == 1, moved
        assert [fleet.count(name, EXPIRED) for name in names] == [0] * len(names)
        print(f"\n  {family}: {releases}, {moved} bytes for {len(texts)} prompts in each direction")
