"""Two engines on one device for each family: the handed-over text is that of one engine alone, and every hand-over counts.

The device is the one that `KVDEV_DEVICE` names, a CPU unless `dev.py test gpu` says cuda.
"""

from __future__ import annotations

from typing import Any

import pytest
from fleets import DEVICE, TRANSFERS, Fleet, ours, prompt, started_fleet

MIRRORED = {"kv_buffer_device": "cpu"}
"""Host-buffer mode, as an operator asks for it; vLLM has it for devices other than a CPU."""


def assert_crosses_both_ways(fleet: Fleet) -> None:
    """Each prompt by itself: the batch in which a prompt is computed may change its text on a GPU."""
    for number, (prefill, decode) in enumerate([("one", "two"), ("two", "one")]):
        fleet.let_connect(prefill, decode)
        for words in (20, 80, 140):
            text = prompt(10 * number + words, words)
            fleet.assert_handed_over(prefill, decode, [text], fleet.answers([text], decode=prefill))
    assert all(fleet.count(name, TRANSFERS) >= 3 for name in fleet.engines)


LATENT = pytest.mark.skipif(
    DEVICE == "cpu",
    reason="a CPU's kernels of prefill and decode disagree for latent attention: test_mixed_fleet.py has another reference",
)


@pytest.mark.proves("dense, latent, Mamba-2: equal ranks")
@pytest.mark.parametrize("family", ["dense", pytest.param("mla-calm", marks=LATENT), "mamba"])
def test_a_family_crosses_both_ways(family: str) -> None:
    with started_fleet(family, {"one": ours(), "two": ours()}) as fleet:
        assert_crosses_both_ways(fleet)


@pytest.mark.proves("pages mirrored in host memory: proof")
@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU's cache needs no host buffer; test_host_buffer.py forces one there")
def test_a_dense_model_crosses_through_a_host_buffer() -> None:
    config: dict[str, Any] = {**ours(), **MIRRORED}
    with started_fleet("dense", {"one": config, "two": config}) as fleet:
        assert_crosses_both_ways(fleet)
        for name in fleet.engines:
            assert fleet.count(name, "vllm:kv_transfer_mirror_restore_seconds_count") >= 3
            assert fleet.count(name, "vllm:kv_transfer_num_failed_mirror_copies_total") == 0
