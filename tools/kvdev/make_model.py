"""Make a tiny random-weight model with a byte-level tokenizer: `python make_model.py FAMILY DIRECTORY` (host environment)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# Random weights of the usual size repeat one token whatever the cache holds; with wider ones a wrong byte shows in the text.
SPREAD = 0.2
# Between unequal tensor-parallel sizes sums are rounded in another order, and wide weights make another text of that: with
# these the first token's probabilities differ as little as the sums do.
CALM_SPREAD = 0.05
COMMON: dict[str, Any] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "initializer_range": SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def build(family: str) -> transformers.PreTrainedModel:
    """Return a model of one family with seeded weights; `-calm`: of a smaller spread; `mamba-one-group` is calm as well."""
    torch.manual_seed(20)
    common = COMMON
    if family in {"mla-calm", "mamba-one-group"}:
        common = {**COMMON, "initializer_range": CALM_SPREAD}
    if family == "dense":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(head_dim=64, **COMMON))
    if family == "fat":
        # 16 layers x 8 heads x 128 x 4 bytes, keys and values: 131 072 bytes of cache a token, beside little to compute.
        fat = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16, "num_key_value_heads": 8}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(head_dim=128, **{**COMMON, **fat}))
    if family == "sliding-window":
        config = transformers.Gemma3TextConfig(
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **COMMON,
        )
        return transformers.Gemma3ForCausalLM(config)
    if family in {"mla", "mla-calm"}:
        config = transformers.DeepseekV2Config(
            **{**common, "num_key_value_heads": 8},
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=128,
            # Calm: no experts either, because which of two near ones a router chooses is as chaotic.
            first_k_dense_replace=1 if family == "mla" else COMMON["num_hidden_layers"],
            topk_method="greedy",
            n_group=1,
            topk_group=1,
        )
        return transformers.DeepseekV2ForCausalLM(config)
    if family in {"mamba", "mamba-one-group"}:
        config = transformers.GraniteMoeHybridConfig(
            **common,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=512,
            mamba_n_heads=16,
            mamba_n_groups=1 if family == "mamba-one-group" else 2,
            mamba_d_state=32,
            mamba_d_head=32,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=64,
            position_embedding_type="rope",
        )
        return transformers.GraniteMoeHybridForCausalLM(config)
    raise SystemExit(f"unknown model family {family!r}; `dev.py demo --list-families` lists them")


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: one token a byte, four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return fast


def main() -> None:
    """Write model, tokenizer and a note of the cache geometry."""
    family, folder = sys.argv[1], Path(sys.argv[2])
    model = build(family).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "made.json").write_text(json.dumps({"family": family, "parameters": model.num_parameters()}))


if __name__ == "__main__":
    main()
