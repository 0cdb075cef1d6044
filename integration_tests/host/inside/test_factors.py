"""Compatibility factors beside vLLM's hash: what changes the KV of a prompt under one model name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as host_metadata

from kv_handshake import Codec
from kv_handshake._factors import differing_factors
from vllm_adapter.host.vllm import engine_facts

ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "another base": ({"rope": {**ROPE, "rope_theta": 500000.0}}, "rope_parameters"),
    "another scaling": ({"rope": {**ROPE, "factor": 8.0}}, "rope_parameters"),
    "another kind": ({"rope": {**ROPE, "rope_type": "linear"}}, "rope_parameters"),
    "none at all": ({"rope": None}, "rope_parameters"),
    "per kind of layer": ({"rope": {"full_attention": ROPE, "sliding_attention": ROPE}}, "rope_parameters"),
    "a list of factors": ({"rope": {**ROPE, "short_factor": [1.0, 1.5]}}, "rope_parameters"),
    "a number without its point": ({"rope": {**ROPE, "rope_theta": 10000}}, ""),
    "a key that is not set": ({"rope": {**ROPE, "attention_factor": None}}, ""),
    "another order": ({"rope": dict(reversed(ROPE.items()))}, ""),
    "weights quantized at start": ({"quantization": "fp8"}, "weight_quantization"),
    "a quantized checkpoint": ({"stored": "awq", "quantization": "awq_marlin"}, "weight_quantization"),
}


def _facts(make_engine: Any, *, rope: Any = ROPE, quantization: str | None = None, stored: str = "") -> Any:
    engine = make_engine("E")
    config = engine.config
    model = config.model_config
    model.hf_text_config.rope_parameters = copy.deepcopy(rope)
    model.quantization = quantization
    if stored:
        model.hf_config.quantization_config = {"quant_method": stored}
    facts = engine_facts(config, engine.scheduler.kv_cache_config, is_worker=False)
    assert Codec().compatibility_hash(facts.factors) == host_metadata.compute_nixl_compatibility_hash(config, "")
    return facts


@pytest.mark.parametrize("case", CHANGES)
def test_engines_that_compute_another_kv_are_told_apart_beside_vllms_hash(make_engine, case: str) -> None:
    change, name = CHANGES[case]
    ours, other = _facts(make_engine), _facts(make_engine, **change)
    assert ours.factors == other.factors, "vLLM's own peers see no difference"
    found = differing_factors(ours.extra_factors, other.extra_factors)
    assert [(each.name, each.group) for each in found] == ([(name, "must-match")] if name else [])


@pytest.mark.parametrize("case", CHANGES)
def test_an_older_release_that_sends_none_of_them_is_accepted(make_engine, case: str) -> None:
    facts = _facts(make_engine, **CHANGES[case][0])
    older = {key: facts.extra_factors[key] for key in ("kv_cache_groups", "model_revision", "block_size", "tp_size")}
    for pair in ((facts.extra_factors, older), (older, facts.extra_factors)):
        assert {each.group for each in differing_factors(*pair)} == {"informative"}


def test_kernels_of_a_device_are_no_other_quantization(make_engine) -> None:
    one, other = (_facts(make_engine, stored="awq", quantization=kernel) for kernel in ("awq", "awq_marlin"))
    assert differing_factors(one.extra_factors, other.extra_factors) == ()
