"""Compatibility factors from the host's configuration: the inputs of vLLM's hash, and further ones that the hash omits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import vllm

from vllm_adapter.host.drafting import speculative_factors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["computation_factors", "vllm_factors"]


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


def computation_factors(config: VllmConfig) -> dict[str, object]:
    """Return further factors that decide which KV a model computes: overrides can change it under one model name.

    The handshake does not know these names, so they must match if both engines send them; older releases send none.
    """
    model: Any = config.model_config
    return {
        "rope_parameters": _plain(getattr(model.hf_text_config, "rope_parameters", None) or {}),
        "weight_quantization": _quantization(model),
    }


def _quantization(model: Any) -> str:  # noqa: ANN401  (vLLM's, which types little of it)
    """Return how the weights are quantized, as the checkpoint states it; vLLM's own value also names a device's kernels."""
    stored: Any = getattr(model.hf_config, "quantization_config", None)
    method = cast("dict[str, object]", stored).get("quant_method") if isinstance(stored, dict) else None
    return str(method or getattr(model, "quantization", None) or "none")


def _plain(value: object) -> object:
    """Return a value as JSON in which equal numbers are identical and unset values are left out."""
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
        return {str(key): _plain(inner) for key, inner in items if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("list[object]", value)]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, str | bool | float) else str(value)
