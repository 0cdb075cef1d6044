"""Compatibility factors from the host's configuration: the inputs of vLLM's hash, and further ones that the hash omits."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import TYPE_CHECKING, Any, cast

import vllm
from vllm.logger import init_logger

from vllm_adapter.cache.facts import decides
from vllm_adapter.host.weights import local_checkpoint, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["computation_factors", "vllm_factors", "weight_factors"]

_logger = init_logger("vllm.vllm_adapter")

_OTHER_DECIDING = ("quantization_config", "model_class_overrides")
"""Settings of vLLM's own configuration that change the KV and are neither in the resolved one nor in a factor.

All others may differ between engines of one model: paths, names and revisions, tokenizer, lengths, seeds, sampling, media (items
are identified together with their processor's settings), and what only changes speed.
"""
_LONGEST_SETTING = 200
_WHOLE_CHECKPOINTS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
    }
)
"""Load formats that read a checkpoint from files that hold whole tensors, whatever the engine's parallel sizes are."""


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
        "speculative_config": _speculative_factors(config),
        "transfer_mode": "pull",
    }


def _speculative_factors(config: VllmConfig) -> dict[str, object] | None:
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


def computation_factors(config: VllmConfig) -> dict[str, object]:
    """Return the resolved configuration, which decides the KV that a model computes: overrides change it under one model name.

    The handshake does not know these names, so they must match if both engines send them; older releases send none. vLLM's models
    resolve some settings while they are built, so a worker calls this afterwards.
    """
    draft = _draft_of(config)
    drafts = {} if draft is None else {"draft_config": _settings(draft)}
    return {"model_config": _settings(config.model_config), **drafts}


def weight_factors(config: VllmConfig) -> dict[str, object]:
    """Return the factors that identify the weights by their content; weights that cannot be identified have none.

    It costs some thousand reads of files. They are read again rather than while vLLM loads them, which no interface allows.
    """
    model: Any = config.model_config
    checkpoints: dict[str, Any] = {"model_weights": model}
    draft = _draft_of(config)
    if draft is not None and draft.model != model.model:
        checkpoints["draft_weights"] = draft
    return {name: found for name, each in checkpoints.items() if (found := _weights(config, each))}


def _draft_of(config: VllmConfig) -> Any | None:  # noqa: ANN401  (vLLM's, which types little of it)
    """Return the configuration of a drafter whose KV is handed over with the model's; None without one."""
    speculative = config.speculative_config
    return None if speculative is None or _speculative_factors(config) is None else speculative.draft_model_config


def _weights(config: VllmConfig, model: Any) -> str:  # noqa: ANN401  (vLLM's, which types little of it)
    load = config.load_config
    if load.load_format == "dummy":  # the same values in every engine: vLLM draws them with a fixed seed
        return "dummy"
    begun_s = time.monotonic()
    reason = f"load format '{load.load_format}' does not read whole tensors from files"
    if load.load_format in _WHOLE_CHECKPOINTS and not getattr(model, "model_weights", ""):
        reason = "no weight files on this machine"
        try:
            place = local_checkpoint(model.model, model.revision, load.download_dir)
            if place is not None and (digest := weights_digest(place)):
                _logger.debug("weights of %s identified in %.2f s: %s", model.model, time.monotonic() - begun_s, digest)
                return digest
        except (OSError, ValueError) as error:
            reason = str(error)
    _logger.warning_once(
        "the weights of %s cannot be identified (%s): a hand-over with an engine that loaded other weights under the "
        "same name will not be refused",
        model.model,
        reason,
    )
    return ""


def _settings(model: Any) -> dict[str, object]:  # noqa: ANN401  (vLLM's, which types little of it)
    """Return the settings of a model's resolved configuration by name, those of its parts as `part.name`."""
    found: dict[str, object] = {**model.hf_config.to_dict()}
    found |= {f"vllm_{name}": getattr(model, name, None) for name in _OTHER_DECIDING}
    found["quantization"] = _quantization(model)
    settings: dict[str, object] = {}
    for name, value in found.items():
        parts = cast("dict[object, object]", value) if isinstance(value, dict) else {}
        settings |= {f"{name}.{part}": inner for part, inner in parts.items()} or {name: value}
    rope: Any = getattr(model.hf_text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # vLLM chooses between short and long factors by the engine's length, not by the prompt's.
        settings["long_rope"] = model.max_model_len > rope.get("original_max_position_embeddings", 0)
    return {name: _short(_plain(value)) for name, value in settings.items() if value is not None and decides(name)}


def _short(value: object) -> object:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _LONGEST_SETTING else hashlib.sha256(text.encode()).hexdigest()[:32]


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
    # An object's address differs in every process.
    return value if isinstance(value, str | bool | float) else re.sub(r" at 0x[0-9a-f]+", "", str(value))
