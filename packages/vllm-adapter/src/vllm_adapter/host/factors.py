"""Inputs of vLLM's compatibility hash, read off the host's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import vllm

from vllm_adapter.host.drafting import speculative_factors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["vllm_factors"]


def vllm_factors(config: VllmConfig, backend: str, connector_version: int) -> dict[str, object]:
    """Return the inputs of vLLM's compatibility hash by its names, so that both connectors compute the same digest."""
    model, cache = config.model_config, config.cache_config
    return {
        "vllm_version": vllm.__version__,
        "nixl_connector_version": connector_version,
        "model": model.model,
        "dtype": str(model.dtype),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "attn_backend_name": backend,
        "cache_dtype": str(cache.cache_dtype),
        "is_hma_enabled": not config.scheduler_config.disable_hybrid_kv_cache_manager,
        "speculative_config": speculative_factors(config),
        "transfer_mode": "pull",
    }
