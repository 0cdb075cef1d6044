"""Compatibility factors beside vLLM's hash: what changes the KV of a prompt under one model name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from engine import FULL, WINDOW
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as host_metadata
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kv_handshake import Codec, LocalOffer
from kv_handshake._factors import differing_factors
from kv_handshake._messages import Envelope
from kv_handshake._policy import Verdict, judge
from vllm_adapter.cache.facts import EngineFacts
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


STAGES = {
    "equal halves": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "all full layers first": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "one layer last": ((0, 1, 2, 3, 4, 5, 6), (7,)),
    "three stages": ((0, 1, 2), (3, 4), (5, 6, 7)),
}


def _stage_facts(make_engine: Any, layers: Sequence[int], stages: int, window: int = 0) -> EngineFacts:
    """Return a rank's facts from vLLM's own groups of a model with eight layers, every other one with a window."""
    engine = make_engine("E")
    other = dataclasses.replace(WINDOW, sliding_window=window) if window else WINDOW
    specs: dict[str, KVCacheSpec] = {
        f"model.layers.{number}.self_attn.attn": other if number % 2 else FULL for number in range(8)
    }
    engine.config.cache_config.kv_cache_layout = "LBHNC"
    whole = kv_cache_utils.get_kv_cache_groups(engine.config, specs)
    engine.config.parallel_config.pipeline_parallel_size = stages
    held = {name: spec for number, (name, spec) in enumerate(specs.items()) if number in layers}
    groups = kv_cache_utils._project_kv_cache_groups_to_worker(whole, held)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return engine_facts(engine.config, cache, is_worker=False)


def _verdict(local: EngineFacts, peer: EngineFacts, policy: Any) -> Verdict:
    factors = {**peer.factors, **peer.extra_factors}
    digest = Codec().compatibility_hash(peer.factors)
    envelope = Envelope(compatibility_hash=digest, agent_metadata_bytes=b"", factors=factors, protocol=(1, 1))
    offer = LocalOffer(factors={**local.factors, **local.extra_factors}, policy=policy)
    return judge(offer, envelope, peer.connector_version)


@pytest.mark.parametrize("policy", ["exact", "negotiated"])
@pytest.mark.parametrize("case", STAGES)
def test_every_stage_of_a_pipeline_is_accepted_by_an_engine_of_one_stage(make_engine, case: str, policy: str) -> None:
    stages = STAGES[case]
    consumer = _stage_facts(make_engine, range(8), 1)
    assert "pp_size" not in consumer.extra_factors, "two engines of one stage exchange what they always did"
    for layers in stages:
        producer = _stage_facts(make_engine, layers, len(stages))
        assert len(producer.groups) == len(consumer.groups) > 1
        verdict = _verdict(consumer, producer, policy)
        assert verdict.is_accepted, verdict.message
        unlike = _verdict(consumer, _stage_facts(make_engine, layers, len(stages), window=64), policy)
        assert unlike.code == "factors-differ"
        assert "kv_cache_groups" in unlike.message
        assert not _verdict(consumer, _stage_facts(make_engine, layers, 1), policy).is_accepted
