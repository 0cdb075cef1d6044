"""`vllm-adapter check` on engines that do not run: its answer is the one of engines that vLLM configures by the same options.

The truth is vLLM's: its configuration, its numbers of heads and layers, its cache specs and its allocation. From these come the
facts, factors and geometry that the engines would send, and the plans that they would make.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from full_engine import Layer, adapters_tests
from test_factors import _verdict
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM as Granite
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kv_topology import Planner
from vllm_adapter.cache.geometry import local_document, with_stages
from vllm_adapter.cli import main
from vllm_adapter.config import Settings
from vllm_adapter.config.start_checks import host_refusals
from vllm_adapter.host.cache_config import layer_caches
from vllm_adapter.host.vllm import engine_facts
from vllm_adapter.plugin import CONNECTOR_NAME, register

pytestmark = pytest.mark.full  # vLLM looks at each model's class in a process of its own
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64},
    "dense-float": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"},
    "deeper": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 64, "num_hidden_layers": 6},
    "one-head": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1},
    "windows": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "latent": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 4,
    },
    "states": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "mamba_n_heads": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 32,
        "mamba_d_head": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
        "position_embedding_type": "rope",
    },
}
AFTER = {
    "prefill_context_parallel_size": "parallel_config",
    "enable_sleep_mode": "model_config",
    "calculate_kv_scales": "cache_config",
}
"""Options that vLLM refuses on a CPU before a connector sees them, by their place in its configuration."""
TWO, FOUR, STAGES = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}
DEALT = {"decode_context_parallel_size": 2, "tensor_parallel_size": 8}
PAIRS: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    *(
        (model, one, model, other)
        for model in ("dense", "dense-float", "one-head", "windows", "latent", "states")
        for one, other in (({}, {}), (TWO, {}), ({}, TWO), (TWO, FOUR))
    ),
    ("dense", {**TWO, "block_size": 32}, "dense", {"block_size": 64}),
    ("dense", STAGES, "dense", TWO),
    ("latent", STAGES, "latent", {}),
    ("deeper", {"pipeline_parallel_size": 4}, "deeper", TWO),
    ("dense", {"dtype": "float16"}, "dense", {}),
    ("dense", {"dtype": "float16"}, "dense", {"dtype": "half"}),
    ("dense", {"kv_cache_dtype": "fp8"}, "dense", {}),
    ("dense", {"kv_cache_dtype": "fp8"}, "dense", {"kv_cache_dtype": "fp8", **TWO}),
    ("dense", {}, "deeper", {}),
    ("dense", {}, "dense", {"hf_overrides": {"rms_norm_eps": 0.3}}),
    ("dense", {}, "dense", {"hf_overrides": {"bos_token_id": 7}}),
    ("dense", DEALT, "dense", TWO),
    ("dense", {**DEALT, "cp_kv_cache_interleave_size": 3}, "dense", TWO),
    ("dense", {"prefill_context_parallel_size": 2}, "dense", {}),
    ("dense", {"enable_sleep_mode": True}, "dense", {}),
    ("dense", {}, "dense", {"calculate_kv_scales": True}),
]


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**COMMON, **config}))
    register()


def _layer_specs(config: Any) -> dict[str, Any]:
    """Return the specs that vLLM's layers of this stage give, from vLLM's numbers."""
    model, cache = config.model_config, config.cache_config
    text, size = model.hf_text_config, model.get_head_size()
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    shared = {"block_size": cache.block_size, "dtype": dtype, "head_size": size}
    shared["num_kv_heads"] = model.get_num_kv_heads(config.parallel_config)
    found: dict[str, Any] = {}
    for number in range(*model.get_layers_start_end_indices(config.parallel_config)):
        if model.use_mla:
            found[f"layers.{number}"] = adapters_tests("layout_families").latent(size=size, dtype=dtype)
        elif model.is_hybrid and kinds[number] != "full_attention":
            shapes, dtypes = (
                get(config)
                for get in (Granite.get_mamba_state_shape_from_config, Granite.get_mamba_state_dtype_from_config)
            )
            state = MambaSpec(block_size=1024, shapes=shapes, dtypes=dtypes)
            # vLLM makes the blocks of attention as large as states when it has loaded the model.
            while (page := FullAttentionSpec(**shared).page_size_bytes) < state.page_size_bytes:
                shared["block_size"] *= 2
            found[f"layers.{number}"] = dataclasses.replace(state, page_size_padded=page)
        elif kinds[number] == "sliding_attention":
            found[f"layers.{number}"] = SlidingWindowSpec(**shared, sliding_window=text.sliding_window)
        else:
            found[f"layers.{number}"] = FullAttentionSpec(**shared)
    return found


class Configured:
    """An engine as vLLM configures it: facts of its first rank, refusals at start, and the documents of all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]) -> None:
        monkeypatch.setattr("vllm.__version__", "0.32.0")
        given = {name: value for name, value in options.items() if name not in AFTER}
        config = EngineArgs(model=model, skip_tokenizer_init=True, **given).create_engine_config()
        config.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both", engine_id=model)
        for name in options.keys() - given.keys():
            setattr(getattr(config, AFTER[name]), name, options[name])
        parallel, recorder = config.parallel_config, adapters_tests("record_layouts")
        self.documents: dict[tuple[int, int], Any] = {}
        for rank in range(parallel.world_size):
            pp_rank, tp_rank = divmod(rank, parallel.tensor_parallel_size)
            parallel.rank = rank
            family = recorder.FAMILIES["flashmla" if config.model_config.use_mla else "flash-attn"]
            planned = {"backend": family["backend"], "specs": lambda _: _layer_specs(config)}
            monkeypatch.setitem(recorder.FAMILIES, "planned", planned)
            cache, tensors = recorder.allocate("planned", 1)
            facts = dataclasses.replace(engine_facts(config, cache, is_worker=False), tp_rank=tp_rank, pp_rank=pp_rank)
            if rank == 0:
                self.facts = facts
            layer = Layer(recorder.find_backend(family["backend"])[0])
            caches = layer_caches(tensors, cache, dict.fromkeys(tensors, layer))
            groups = config.model_config.hf_text_config.to_dict().get("mamba_n_groups", 0)
            facts = dataclasses.replace(facts, state_groups=groups)
            self.documents[pp_rank, tp_rank] = local_document(facts, caches)
        for tp_rank in range(self.facts.tp):
            stages = [self.documents[stage, tp_rank] for stage in range(self.facts.pp)]
            for stage in range(self.facts.pp):
                self.documents[stage, tp_rank] = with_stages(stages[stage], stages)

    @property
    def refusals(self) -> list[str]:
        return [each.code for each in host_refusals(self.facts, Settings())]


def truth(prefill: Configured, decode: Configured) -> tuple[set[str], list[str]]:
    """Return the codes of all refusals, and what each decode rank reads."""
    codes, reads = {*prefill.refusals, *decode.refusals}, list[str]()
    verdict = _verdict(decode.facts, prefill.facts, "exact")
    if not verdict.is_accepted:
        # The handshake says that the hashes differ; a check names what must not.
        must_match = any(each.group == "must-match" for each in verdict.differences)
        return {*codes, "factors-differ" if must_match else verdict.code}, reads
    if codes:
        return codes, reads  # engines that do not start plan nothing
    for (stage, rank), document in sorted(decode.documents.items()):
        plan = Planner(staging="auto").plan(document, prefill.documents, peer_tp=prefill.facts.tp)
        ranks = ", ".join(f"{one}.{other}" for one, other in plan.producer_ranks)
        reads.append(
            f"decode rank {stage}.{rank} reads from prefill ranks {ranks}: {plan.bytes_per_token:g} bytes a token"
        )
    return codes, reads


@pytest.mark.parametrize(("prefill", "produces", "decode", "reads"), PAIRS)
def test_the_answer_before_a_start_is_the_one_of_engines_that_vllm_configures(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prefill: str,
    produces: dict[str, Any],
    decode: str,
    reads: dict[str, Any],
) -> None:
    codes, expected = truth(Configured(monkeypatch, prefill, produces), Configured(monkeypatch, decode, reads))
    words = [json.dumps({"model": model, **options}) for model, options in ((prefill, produces), (decode, reads))]
    capsys.readouterr()
    assert main(["check", "--json", "--vllm", "0.32.0", *words]) == bool(codes)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {each["code"] for each in findings if each["level"] == "no-go"} == codes
    plans = [each["message"].partition(", pages")[0] for each in findings if " reads from " in each["message"]]
    assert plans == expected or not expected, "a check goes on after a refusal"


def test_blocks_that_no_back_end_of_attention_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    backends = [CPUAttentionBackend, FlashAttentionBackend, FlexAttentionBackend, TritonAttentionBackend]
    for size in (1, 24, 96):
        words = [json.dumps({"model": "dense", "block_size": size})] * 2
        is_taken = any(backend.supports_block_size(size) for backend in backends)
        assert main(["check", "--vllm", "0.32.0", *words]) == (not is_taken)
        assert (f"blocks of {size} tokens" in capsys.readouterr().out) is not is_taken
