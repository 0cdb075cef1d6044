"""The host's configuration as values for the checks at start, and the connector's description of itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform

from vllm_adapter import __version__
from vllm_adapter.config.start_checks import Situation
from vllm_adapter.host.cache_config import cache_groups
from vllm_adapter.host.vllm import (
    CONNECTOR_VERSIONS,
    check_host,
    has_v2_runner,
    side_channel_port,
    wants_host_buffer,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.config import Settings

__all__ = ["labels_of", "situation_of", "start_line"]


def situation_of(config: VllmConfig, settings: Settings, caches: KVCacheConfig) -> Situation:
    """Return the facts that start-up checks need; an option that this host lacks counts as off.

    Raises:
        UnsupportedHost: `unsupported-vllm`, or `side-channel-port` if the port is not a number.
    """
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    listens_on = str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST), side_channel_port(config)
    host, port = settings.advertised(*listens_on, parallel.data_parallel_index)
    cache: Any = config.cache_config
    model: Any = config.model_config
    return Situation(
        version=check_host(),
        kv_role=str(transfer.kv_role) if transfer is not None else "",
        outer_role=_outer_role(config),
        pp=parallel.pipeline_parallel_size,
        pcp=int(getattr(parallel, "prefill_context_parallel_size", 1)),
        host=host,
        port=port,
        has_sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        computes_scales=bool(getattr(cache, "calculate_kv_scales", False)),
        is_bidirectional=settings.bidirectional_kv_xfer,
        uses_ucx="UCX" in settings.backends,
        is_mirrored=wants_host_buffer(config),
        is_speculative=config.speculative_config is not None,
        has_v2_runner=has_v2_runner(config),
        ucx_tls=os.environ.get("UCX_TLS", ""),
        has_state=any(group.kind == "state" for group in cache_groups(caches)),
        is_elastic=bool(getattr(parallel, "enable_elastic_ep", False)),
        has_host_blocks=_has_host_blocks(config, caches),
        returns_experts=_returns_experts(config),
    )


def _has_host_blocks(config: VllmConfig, caches: KVCacheConfig) -> bool:
    """Return whether HiSparse is on: by the host's configuration of attention, or by its blocks, which are known later."""
    blocks: Any = getattr(caches, "hisparse_host_num_blocks", None)
    attention: Any = getattr(config, "attention_config", None)
    return blocks is not None or getattr(attention, "hisparse_config", None) is not None


def _returns_experts(config: VllmConfig) -> bool:
    """Return whether answers tell of experts; vLLM itself looks at this by the names of its own connectors (from 0.32 on)."""
    places: tuple[Any, ...] = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def _outer_role(config: VllmConfig) -> str:
    """Return the role that the host itself obeys: that of a MultiConnector's configuration, where there is one.

    A child gets its own configuration. The whole one is visible only where the host announces it, as it does in workers.
    """
    outer = get_current_vllm_config_or_none() or config
    transfer = outer.kv_transfer_config or config.kv_transfer_config
    return str(transfer.kv_role) if transfer is not None else ""


def labels_of(config: VllmConfig, settings: Settings) -> dict[str, str]:
    """Return the connector's description of itself for its start line and info metric; the same on all ranks."""
    transfer = config.kv_transfer_config
    is_plain = current_platform.device_type == "cpu"
    memory = "DRAM" if is_plain else "DRAM (mirror)" if wants_host_buffer(config) else "VRAM"
    return {
        "adapter_version": __version__,
        "vllm_version": vllm_version,
        "kv_role": str(transfer.kv_role) if transfer is not None else "",
        "memory": memory,
        "backends": ",".join(settings.backends),
        "compatibility_policy": settings.policy,
        "load_failure_policy": transfer.kv_load_failure_policy if transfer is not None else "fail",
        "lease_s": f"{settings.kv_lease_duration:g}",
        "engine_ttl_s": f"{settings.engine_ttl:g}",
        "peer_dialect": str(
            settings.ticket_dialect or CONNECTOR_VERSIONS.get(check_host(), max(CONNECTOR_VERSIONS.values()))
        ),
    }


def start_line(labels: Mapping[str, str], facts: EngineFacts) -> str:
    """Return the line that says which connector runs in this engine, and where peers reach it."""
    host = f"[{facts.host}]" if ":" in facts.host else facts.host
    here = {"engine": facts.engine_id, "side_channel": f"{host}:{facts.port}"}
    return "started: " + " ".join(f"{key}={value}" for key, value in {**labels, **here}.items())
