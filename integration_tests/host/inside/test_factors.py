"""Compatibility factors beside vLLM's hash: what changes the KV of a prompt under one model name."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import FULL, WINDOW
from full_engine import Layer
from safetensors.numpy import save_file
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as host_metadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kv_handshake import Codec, LocalOffer
from kv_handshake.wire.factors import differing_factors
from kv_handshake.wire.messages import Envelope
from kv_handshake.wire.policy import Verdict, judge
from vllm_adapter.cache.facts import EngineFacts
from vllm_adapter.config.keys import RELEASE_FACTORS
from vllm_adapter.host import vllm as vllm_seam
from vllm_adapter.host.factors import weight_factors
from vllm_adapter.host.vllm import engine_facts
from vllm_adapter.host.weights import weights_digest

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "another base": ({"rope": {**ROPE, "rope_theta": 500000.0}}, "rope_parameters.rope_theta"),
    "another scaling": ({"rope": {**ROPE, "factor": 8.0}}, "rope_parameters.factor"),
    "another kind": ({"rope": {**ROPE, "rope_type": "linear"}}, "rope_parameters.rope_type"),
    "none at all": ({"rope": None}, "rope_parameters.rope_type"),
    "per kind of layer": ({"rope": {"full_attention": ROPE}}, "rope_parameters.full_attention"),
    "a list of factors": ({"rope": {**ROPE, "short_factor": [1.0, 1.5] * 64}}, "rope_parameters.short_factor"),
    "a number without its point": ({"rope": {**ROPE, "rope_theta": 10000}}, ""),
    "a key that is not set": ({"rope": {**ROPE, "attention_factor": None}}, ""),
    "another order": ({"rope": dict(reversed(ROPE.items()))}, ""),
    "weights quantized at start": ({"quantization": "fp8"}, "quantization"),
    "a quantized checkpoint": ({"stored": "awq", "quantization": "awq_marlin"}, "quantization"),
    "a bound of a norm": ({"overrides": {"rms_norm_eps": 0.3}}, "rms_norm_eps"),
    "another activation": ({"overrides": {"hidden_act": "gelu"}}, "hidden_act"),
    "a setting that the checkpoint does not have": (
        {"overrides": {"attention_multiplier": 2.0}},
        "attention_multiplier",
    ),
    "a setting of a part": ({"overrides": {"vision_config": {"patch_size": 7}}}, "vision_config.patch_size"),
    "another class": ({"classes": {"LlamaForCausalLM": "other:Llama"}}, "model_class_overrides.LlamaForCausalLM"),
    "another length": ({"max_model_len": 512}, ""),
    "another seed": ({"seed": 5}, ""),
    "another end of a text": ({"overrides": {"eos_token_id": 5}}, ""),
    "a default that a release of transformers added": ({"overrides": {"output_router_logits": False}}, ""),
    "a last layer of its own": ({"overrides": {"tie_word_embeddings": True}}, ""),
    "another tokenizer": ({"tokenizer": "/elsewhere"}, ""),
    "another name for clients": ({"served_model_name": "other"}, ""),
}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 256}


def _facts(
    make_engine: Any,
    *,
    rope: Any = ROPE,
    quantization: str | None = None,
    stored: str = "",
    overrides: dict[str, Any] | None = None,
    classes: dict[str, str] | None = None,
    **more: Any,
) -> Any:
    engine = make_engine("E")
    config = engine.config
    # vLLM applies the overrides itself.
    fields: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "hf_overrides": overrides or {}, **more}
    config.model_config = ModelConfig(model=config.model_config.model, skip_tokenizer_init=True, **fields)
    model = config.model_config
    model.hf_text_config.rope_parameters = copy.deepcopy(rope)
    model.quantization = quantization
    model.model_class_overrides = classes or {}  # given to ModelConfig they would be registered in this process
    if stored:
        model.hf_config.quantization_config = {"quant_method": stored}
    facts = engine_facts(config, engine.scheduler.kv_cache_config, is_worker=False)
    assert Codec().compatibility_hash(facts.factors) == host_metadata.compute_nixl_compatibility_hash(config, "")
    return facts


@pytest.mark.never_wrong("A14")
@pytest.mark.parametrize("case", CHANGES)
def test_engines_that_compute_another_kv_are_distinguished_beside_vllms_hash(make_engine, case: str) -> None:
    change, name = CHANGES[case]
    ours, other = _facts(make_engine), _facts(make_engine, **change)
    assert ours.factors == other.factors, "vLLM's own peers see no difference"
    verdict = _verdict(ours, other, "exact")
    assert verdict.code == ("factors-differ" if name else "")
    assert name in verdict.message
    assert len(verdict.message) < 500, "only the settings that differ are named"


@pytest.mark.parametrize("case", CHANGES)
def test_an_older_release_that_sends_none_of_them_is_accepted(make_engine, case: str) -> None:
    facts = _facts(make_engine, **CHANGES[case][0])
    older = {key: facts.extra_factors[key] for key in ("kv_cache_groups", "model_revision", "block_size", "tp_size")}
    for pair in ((facts.extra_factors, older), (older, facts.extra_factors)):
        assert {each.group for each in differing_factors(*pair)} == {"informative"}


def test_kernels_of_a_device_are_no_other_quantization(make_engine) -> None:
    one, other = (_facts(make_engine, stored="awq", quantization=kernel) for kernel in ("awq", "awq_marlin"))
    assert differing_factors(one.extra_factors, other.extra_factors) == ()


@pytest.mark.never_wrong("A14")
def test_the_engines_length_counts_where_it_chooses_the_factors_of_the_positions(make_engine) -> None:
    """vLLM takes the long factors in every position as soon as the engine may be longer than the model's first training."""
    short, too, long = (_facts(make_engine, rope=LONG_ROPE, max_model_len=length) for length in (128, 256, 512))
    assert _verdict(short, too, "exact").is_accepted
    refused = _verdict(short, long, "exact")
    assert (refused.code, "long_rope" in refused.message) == ("factors-differ", True)


# ------------------------------------------------------------------------------------------------------------- weights


def _tensors(seed: int = 0, layers: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    shapes = {"q_proj.weight": (32, 32), "mlp.experts.7.weight": (64, 32), "norm.weight": (32,)}
    return {
        "embed_tokens.weight": draw.standard_normal((128, 32), dtype=np.float32),
        **{
            f"layers.{layer}.{name}": draw.standard_normal(shape, dtype=np.float32)
            for layer in range(layers)
            for name, shape in shapes.items()
        },
    }


def _store(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], files: int = 1) -> Path:
    """Write a checkpoint with safetensors, in one file or as shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    parts = {f"model-{number}-of-{files}.safetensors": names[number::files] for number in range(files)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"written": str(folder)})
    if files > 1:
        weights = {name: file for file, part in parts.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        save_file(tensors, folder / "consolidated.safetensors")
    return folder


def _changed(name: str) -> dict[str, np.ndarray[Any, Any]]:
    return {**_tensors(), name: _tensors()[name] * np.float32(1.01)}


@pytest.mark.never_wrong("A14")
def test_checkpoints_are_distinguished_by_their_content_alone(tmp_path: Path) -> None:
    digest = weights_digest(_store(tmp_path / "a", _tensors()))
    assert len(digest) == 32
    for number, files in enumerate((1, 3)):
        assert weights_digest(_store(tmp_path / f"same-{number}", _tensors(), files)) == digest, (
            "files and names are no content"
        )
    others = [_tensors(seed=1), _tensors(layers=2), *map(_changed, _tensors())]
    seen = {weights_digest(_store(tmp_path / f"other-{number}", each)) for number, each in enumerate(others)}
    assert (digest in seen, len(seen)) == (False, len(others))


def test_a_checkpoint_in_another_format_is_identified_by_its_file(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(np.random.default_rng(seed).bytes(3_000_000))
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b") != weights_digest(tmp_path / "c")
    assert weights_digest(tmp_path) == ""


def test_a_huge_checkpoint_costs_a_bounded_number_of_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header: dict[str, Any] = {}
    for number in range(20_000):
        name = f"layers.{number % 60}.mlp.experts.{number}.weight"
        header[name] = {"dtype": "BF16", "shape": [4096], "data_offsets": [number * 8192, (number + 1) * 8192]}
    written = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + 20_000 * 8192)
    reads: list[int] = []
    whole = os.pread
    monkeypatch.setattr(os, "pread", lambda *of: reads.append(of[2]) or whole(*of))
    assert weights_digest(tmp_path)
    assert len(set(reads)) == 128


def _header(offsets: str) -> bytes:
    header = f'{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}}}'.encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


def test_a_file_that_is_no_checkpoint_is_an_error_and_no_identity(tmp_path: Path) -> None:
    for content in (
        *map(_header, ("[0.5, 8.5]", f"[{1 << 70}, {(1 << 70) + 8}]", "[8, 0]", '["a", "b"]')),
        b"",
        b"short",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (7).to_bytes(8, "little") + b'{"a":1}',
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises((OSError, ValueError)):
            weights_digest(tmp_path)


@pytest.mark.never_wrong("A14")
def test_engines_with_other_weights_under_one_name_refuse_each_other(
    make_engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that was replaced in place, dummy weights, and the same weights in another folder."""

    def facts(content: Path | None = None, load_format: str = "auto", model: str = "E") -> EngineFacts:
        engine = make_engine(model)
        config = engine.config
        folder = Path(config.model_config.model)
        (folder / "model.safetensors").unlink(missing_ok=True)
        if content is not None:
            shutil.copy(content / "model-0-of-1.safetensors", folder / "model.safetensors")
        config.load_config.load_format = load_format
        found = engine_facts(config, engine.scheduler.kv_cache_config, is_worker=False)
        return dataclasses.replace(found, extra_factors={**found.extra_factors, **weight_factors(config)})

    old, new = _store(tmp_path / "old", _tensors()), _store(tmp_path / "new", _tensors(seed=1))
    ours = facts(old)
    assert _verdict(ours, facts(old), "exact").is_accepted
    for other in (facts(new), facts(load_format="dummy")):
        refused = _verdict(ours, other, "exact")
        assert (refused.code, refused.message.startswith("model_weights: local ")) == ("factors-differ", True)
    elsewhere = facts(old, model="F")
    assert _verdict(ours, elsewhere, "negotiated").is_accepted
    assert _verdict(ours, facts(new, model="F"), "negotiated").code == "factors-differ"
    assert _verdict(ours, elsewhere, "exact").code == "hash-mismatch", "vLLM's hash has the path, and stays as it is"
    assert "cannot be identified" not in caplog.text
    for unknown in (facts(), facts(old, load_format="tensorizer")):
        assert "model_weights" not in unknown.extra_factors
        assert _verdict(ours, unknown, "exact").is_accepted, "nothing is known, as with an older release"
    assert caplog.text.count("no weight files on this machine") == 1
    assert caplog.text.count("load format 'tensorizer'") == 1


@pytest.mark.proves("data-parallel ranks: proof", "experts: proof")
@pytest.mark.parametrize("is_worker", [False, True], ids=["scheduler", "worker"])
def test_experts_that_are_spread_over_ranks_change_nothing_that_peers_see(
    make_engine, monkeypatch: pytest.MonkeyPatch, *, is_worker: bool
) -> None:
    """Only that ranks of a mixture of experts step together, which no peer learns."""
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda _: True))
    monkeypatch.setattr(vllm_seam, "_ranks", lambda: (0, 0))
    engine = make_engine("P")
    engine.config.compilation_config.static_forward_context["layers.0"] = Layer(FlashAttentionBackend)
    parallel = engine.config.parallel_config

    def facts() -> EngineFacts:
        return engine_facts(engine.config, engine.scheduler.kv_cache_config, is_worker=is_worker)

    alone = facts()
    parallel.data_parallel_size = 2
    parallel.enable_expert_parallel = parallel.enable_eplb = True
    parallel.eplb_config.num_redundant_experts = 2
    parallel.all2all_backend = "deepep_low_latency"
    assert facts() == dataclasses.replace(alone, is_lock_stepped=True)
    assert _verdict(facts(), alone, "exact").is_accepted


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
    whole = planning.get_kv_cache_groups(engine.config, specs)
    engine.config.parallel_config.pipeline_parallel_size = stages
    held = {name: spec for number, (name, spec) in enumerate(specs.items()) if number in layers}
    groups = planning._project_kv_cache_groups_to_worker(whole, held)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return engine_facts(engine.config, cache, is_worker=False)


def _verdict(local: EngineFacts, peer: EngineFacts, policy: Any, may_differ: Sequence[str] = ()) -> Verdict:
    factors = {**peer.factors, **peer.extra_factors}
    digest = Codec().compatibility_hash(peer.factors)
    envelope = Envelope(compatibility_hash=digest, agent_metadata_bytes=b"", factors=factors, protocol=(1, 1))
    offer = LocalOffer({**local.factors, **local.extra_factors}, policy, may_differ=may_differ)
    return judge(offer, envelope, peer.connector_version)


@pytest.mark.parametrize("policy", ["exact", "negotiated"])
def test_another_element_type_is_refused_by_name_between_releases_that_may_differ(make_engine, policy: str) -> None:
    float32, bfloat16 = (_facts(make_engine, dtype=dtype) for dtype in ("float32", "bfloat16"))
    older = {"vllm_version": "0.31.0", "nixl_connector_version": 13}
    for dtype, facts in (("", float32), ("bfloat16", bfloat16)):
        peer = dataclasses.replace(facts, factors={**facts.factors, **older})
        verdict = _verdict(float32, peer, policy, RELEASE_FACTORS["minor"])
        assert verdict.is_accepted is (not dtype)
        assert f'dtype: local "torch.float32", peer "torch.{dtype}"' in verdict.message or not dtype


@pytest.mark.proves("a drafter on one side: proof = factors-differ")
@pytest.mark.never_wrong("A14")
@pytest.mark.parametrize("policy", ["exact", "negotiated"])
def test_a_drafter_with_a_cache_on_one_side_is_refused(make_engine, policy: str) -> None:
    """By its layers, whatever its method is: vLLM's hash covers drafters on hidden states alone."""
    engines = make_engine("E"), make_engine("E", specs=(FULL, FULL))
    plain, drafting = (engine_facts(e.config, e.scheduler.kv_cache_config, is_worker=False) for e in engines)
    for pair in ((plain, drafting), (drafting, plain)):
        verdict = _verdict(*pair, policy)
        assert (verdict.code, "kv_cache_groups" in verdict.message) == ("factors-differ", True)


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
