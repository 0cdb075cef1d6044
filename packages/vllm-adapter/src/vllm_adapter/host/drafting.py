"""Effects of speculative decoding on a hand-over, derived from the host's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["backoff_tokens", "speculative_factors"]


def backoff_tokens(config: VllmConfig, cache: KVCacheConfig, *, has_state: bool) -> int:
    """Return how many trailing prompt tokens the decode engine computes itself.

    One for a running state, which cannot be reset, and where the last window of a prefix hit is computed again. As many as a
    drafter of several modules reads ahead, since at the end of a prompt it would store drafts that have not been verified.
    Source: vLLM's own connector backs off alike. Hosts before 0.32 may lack either property.
    """
    replays = any(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) > 0 for group in cache.kv_cache_groups)
    return max(1 if has_state or replays else 0, getattr(config, "num_prefill_lookahead_tokens", 0) - 1)


def speculative_factors(config: VllmConfig) -> dict[str, object] | None:
    """Return the factors that engines with a drafter on hidden states must share, by vLLM's names; None without one."""
    speculative = config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return None
    draft: Any = speculative.draft_model_config
    layers: Any = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    return {
        "method": speculative.method,
        "model": draft.model,
        "revision": draft.revision,
        "code_revision": draft.code_revision,
        "parallel_drafting": speculative.parallel_drafting,
        "kv_cache_dtype": str(speculative.kv_cache_dtype or config.cache_config.cache_dtype),
        "auxiliary_layer_ids": tuple(layers) if layers is not None else None,
    }
