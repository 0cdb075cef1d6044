"""Seam to vLLM: facts of its configuration, and the differences between host versions.

`cache_config.py` reads the host's description of its cache.

Changes of the public interface that this package relies on:

| vLLM | change |
|------|--------|
| 0.30 | `KVConnectorTransferResults` and `get_transfer_results`: failures are reported per request |
| 0.31 | `wait_for_save` is called every step; `get_mem_pool_context` |
| 0.32 | `CacheHitSource`: a connector names the tier of its hits; `get_loaded_kv_cache_group_ids` |
| 0.33 | `supports_sleep_mode`, `unregister_kv_caches`, `restore_kv_caches`; `remote_registration_generation` in tickets |

Older hosts never call the hooks of newer ones.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import vllm
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_adapter import __version__
from vllm_adapter.cache.facts import EngineFacts
from vllm_adapter.cache.names import channel_text, engine_name
from vllm_adapter.config import Settings
from vllm_adapter.config.start_checks import WITHOUT_HOOKS, kept_memory, listening_port
from vllm_adapter.errors import UnsupportedHost
from vllm_adapter.host.cache_config import cache_groups, state_groups, transfer_group_ids
from vllm_adapter.host.factors import computation_factors, vllm_factors, weight_factors
from vllm_adapter.scheduler.ahead import FreeBlocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockHash, BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from vllm_adapter.cache.documents import GeometryDocument
    from vllm_adapter.cache.facts import CacheGroup

__all__ = [
    "END_REASONS",
    "P2P_HITS",
    "all_stages",
    "check_host",
    "drop_prompt_tail",
    "end_with_error",
    "engine_facts",
    "extra_config",
    "free_blocks",
    "has_content_ids",
    "info_of",
    "labels_of",
    "sleep_obstacle",
    "start_line",
    "wants_host_buffer",
]

_ZEROES_FIRST = (
    "this model's pages are zeroed before the connector can move the words that guard them (model runner version 2)"
)
_STAGES_NOT_TOLD = (
    "pipeline stages before the last one do not learn when a step is computed where tokens are drafted (model runner "
    "version 1)"
)
_NO_EVENTS = "the connector cannot tell when a device of this kind has computed a chunk"

EndReason = Literal["length", "stop", "abort", "error"]
END_REASONS: dict[str, EndReason] = {
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_STOPPED": "stop",
    # Ended by the sampler's repetition check (0.32): an answer like any other.
    "FINISHED_REPETITION": "stop",
    "FINISHED_ABORTED": "abort",
    # The prompt was longer than the model's context, so nothing was computed.
    "FINISHED_IGNORED": "error",
    "FINISHED_ERROR": "error",
}
"""Ends of requests by vLLM's names; older hosts lack those of newer ones. Nothing is handed over for an unknown one."""

_DEFAULTS = Settings()
_BUFFER_DEVICES: dict[str, tuple[str, ...]] = {"cuda": ("cuda", "cpu"), "tpu": ("cpu",), "xpu": ("xpu", "cpu")}
"""Possible devices of the memory that peers read, by the engine's device. Source: vLLM's own connector."""
_CONNECTOR_VERSIONS = {(0, 30): 11, (0, 31): 13, (0, 32): 14, (0, 33): 15}
"""vLLM's own connector version by vLLM version: the dialect that its engines speak. Source: vLLM's version history."""
_SUPPORTED = (min(_CONNECTOR_VERSIONS), max(_CONNECTOR_VERSIONS))


def _p2p_hits() -> object:
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # before 0.32 hits have no source
        return None
    return CacheHitSource.P2P


P2P_HITS = _p2p_hits()
"""vLLM's label for prompt tokens that came from a peer engine; None before 0.32."""

_logger = init_logger("vllm.vllm_adapter")


def check_host() -> tuple[int, int]:
    """Return the host's (major, minor) version; warn about an unknown one.

    Raises:
        UnsupportedHost: `unsupported-vllm`, naming the supported range.
    """
    found = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    first, last = _SUPPORTED
    if found is None:
        _logger.warning_once("cannot read vLLM's version %r; assuming %d.%d", vllm.__version__, *last)
        return last
    version = (int(found[1]), int(found[2]))
    if version < first:
        raise UnsupportedHost(
            f"vllm-adapter supports vLLM {first[0]}.{first[1]} to {last[0]}.{last[1]}, found {vllm.__version__}; "
            "upgrade vLLM or use its own NixlConnector",
            code="unsupported-vllm",
            fault="environment",
            context={"found": vllm.__version__},
        )
    if version > last:
        _logger.warning_once(
            "vllm-adapter was made for vLLM %d.%d to %d.%d; %s is untried", *first, *last, vllm.__version__
        )
    return version


def _connector_version() -> int:
    return _CONNECTOR_VERSIONS.get(check_host(), max(_CONNECTOR_VERSIONS.values()))


def extra_config(config: VllmConfig) -> dict[str, object]:
    """Return `kv_connector_extra_config` as given."""
    transfer = config.kv_transfer_config
    return dict(transfer.kv_connector_extra_config or {}) if transfer is not None else {}


def has_content_ids(config: VllmConfig) -> bool:
    """Return whether the host identifies images by their content; warn where it does not.

    Source: vLLM identifies images by their request when neither its processor cache nor its prefix cache needs content ids.
    """
    media: Any = getattr(config.model_config, "multimodal_config", None)
    if media is None or media.mm_processor_cache_gb or config.cache_config.enable_prefix_caching:
        return True
    _logger.warning_once(
        "with mm_processor_cache_gb 0 and no prefix caching, vLLM identifies images by their request and not by "
        "their content. No ticket can then be bound to a prompt with images: such prompts are computed on each engine "
        "(ticket-media-unidentified). Set mm_processor_cache_gb above 0 or enable_prefix_caching on all engines."
    )
    return False


def wants_host_buffer(config: VllmConfig) -> bool:
    """Return whether to mirror the cache in host memory: `kv_buffer_device` is `"cpu"` and the device is another one.

    Raises:
        UnsupportedHost: `unsupported-buffer-device`: NIXL cannot register that device's memory.
    """
    transfer, device = config.kv_transfer_config, current_platform.device_type
    if transfer is None or device == "cpu":
        return False
    known = {**_BUFFER_DEVICES, **current_platform.get_nixl_supported_devices()}.get(device, ("cpu",))
    if transfer.kv_buffer_device not in known:
        raise UnsupportedHost(
            f"kv_buffer_device is '{transfer.kv_buffer_device}', but on a {device} device it must be "
            f"{' or '.join(known)}; 'cpu' mirrors the cache in host memory",
            code="unsupported-buffer-device",
            context={"device": device, "kv_buffer_device": transfer.kv_buffer_device},
        )
    return transfer.kv_buffer_device == "cpu"


def engine_facts(
    config: VllmConfig, cache: KVCacheConfig, *, is_worker: bool, settings: Settings = _DEFAULTS
) -> EngineFacts:
    """Return the facts about an engine that the adapter needs, from vLLM's configuration and the connector's own.

    Raises:
        UnsupportedHost: `no-engine-id`, `unsupported-vllm` or `side-channel-port`.
    """
    model, parallel = config.model_config, config.parallel_config
    transfer = config.kv_transfer_config
    if transfer is None or transfer.engine_id is None:
        raise UnsupportedHost("vLLM gave no kv_transfer_config with an engine id", code="no-engine-id")
    connector_version = _connector_version()
    groups = cache_groups(cache)
    has_v2_runner = bool(getattr(config, "use_v2_model_runner", False))
    backend = ""
    if is_worker:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        # vLLM's hash has one name for all layers: that of the first one, which may be a state layer's.
        backend = str(get_current_attn_backends(config)[0].get_name())
    tp_rank, pp_rank = _ranks() if is_worker else (0, 0)
    own_port = listening_port(lambda: envs.VLLM_NIXL_SIDE_CHANNEL_PORT, parallel.data_parallel_index)
    listens_on = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, own_port
    host, port = settings.advertised(*listens_on, parallel.data_parallel_index)
    return EngineFacts(
        engine_id=transfer.engine_id,
        host=host,
        port=port,
        listens_on=listens_on,
        tp=parallel.tensor_parallel_size,
        tp_rank=tp_rank,
        pp=parallel.pipeline_parallel_size,
        pp_rank=pp_rank,
        dcp=parallel.decode_context_parallel_size,
        total_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        block_count=cache.num_blocks,
        generation=_generation(transfer.engine_id, _shared_instance_id(config) if is_worker else config.instance_id),
        layout=str(getattr(cache, "kv_cache_layout", None) or "LBHNC"),
        attention_backend=backend,
        connector_version=connector_version,
        groups=groups,
        group_ids=transfer_group_ids(cache),
        backoff_tokens=_backoff_tokens(config, cache, has_state=any(group.kind == "state" for group in groups)),
        interleave_tokens=_interleave_tokens(config, cache),
        state_groups=state_groups(config) if is_worker else 0,
        whole_reason=_whole_reason(config, cache, has_v2_runner=has_v2_runner),
        # vLLM lets data-parallel ranks step together for mixtures of experts alone.
        is_lock_stepped=parallel.data_parallel_size > 1 and bool(getattr(model, "is_moe", True)),
        is_mirrored=wants_host_buffer(config),
        # Further steps for which a read waits after its blocks were given, so that no step still writes into them. Source: if the
        # role reads, vLLM frees a block only after the last step that writes into it has ended (`defer_block_free`). Otherwise it
        # may give out blocks of a request whose last step is under way. Of steps, at most `max_concurrent_batches` are in its
        # queue, in order (`step_with_batch_queue`), so when it plans that many steps more, less one, the earlier ones have ended.
        read_hold_steps=0 if transfer.is_kv_consumer else config.max_concurrent_batches - 1,
        load_failure_policy=transfer.kv_load_failure_policy,
        kv_role=str(transfer.kv_role),
        outer_role=_outer_role(config),
        pcp=int(getattr(parallel, "prefill_context_parallel_size", 1)),
        has_sleep_mode=bool(getattr(model, "enable_sleep_mode", False)),
        sleep_obstacle=sleep_obstacle(settings),
        computes_scales=bool(getattr(config.cache_config, "calculate_kv_scales", False)),
        is_speculative=config.speculative_config is not None,
        has_v2_runner=has_v2_runner,
        ucx_tls=os.environ.get("UCX_TLS", ""),
        is_elastic=bool(getattr(parallel, "enable_elastic_ep", False)),
        has_host_blocks=_has_host_blocks(config, cache),
        has_encoder=bool(getattr(model, "is_encoder_decoder", False)),
        returns_experts=_returns_experts(config),
        model=str(getattr(model, "served_model_name", "")),
        factors=vllm_factors(config, backend, connector_version),
        # Only workers send factors to peers.
        extra_factors={**_extra_factors(config, groups), **(weight_factors(config) if is_worker else {})},
    )


def _interleave_tokens(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return the tokens per turn of context parallelism that workers use.

    For its own connector's name the host makes them a block, unless they were given: vLLM 0.32 in the workers alone, before it
    creates their connectors, and later releases before it creates any.
    """
    parallel = config.parallel_config
    adjust: Any = getattr(type(config), "adjust_dcp_kv_cache_interleave_size", None)
    if adjust is not None and cache.kv_cache_groups and check_host() < (0, 33):
        parallel = copy.copy(parallel)
        adjust(SimpleNamespace(parallel_config=parallel, kv_transfer_config=config.kv_transfer_config), cache)
    return parallel.cp_kv_cache_interleave_size


def _backoff_tokens(config: VllmConfig, cache: KVCacheConfig, *, has_state: bool) -> int:
    """Return how many trailing prompt tokens the decode engine computes itself.

    One for a running state, which cannot be reset, and where the last window of a prefix hit is computed again. As many as a
    drafter of several modules reads ahead, since at the end of a prompt it would store drafts that have not been verified.
    Source: vLLM's own connector backs off alike. Hosts before 0.32 may lack either property.
    """
    replays = any(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) > 0 for group in cache.kv_cache_groups)
    return max(1 if has_state or replays else 0, getattr(config, "num_prefill_lookahead_tokens", 0) - 1)


def _extra_factors(config: VllmConfig, groups: Sequence[CacheGroup]) -> dict[str, object]:
    """Return the compatibility factors that engines of our own kind add to vLLM's.

    The layers are those of this rank. `pp_size` tells a peer that they may be fewer than the model's, and is only sent if so.
    """
    parallel = config.parallel_config
    stages = {"pp_size": parallel.pipeline_parallel_size} if parallel.pipeline_parallel_size > 1 else {}
    return {
        "kv_cache_groups": [[group.kind, group.window_tokens, sorted(group.layers)] for group in groups],
        "model_revision": str(config.model_config.revision),
        "block_size": [group.block_tokens for group in groups],
        "tp_size": parallel.tensor_parallel_size,
        **stages,
        **computation_factors(config),
    }


_block_id = attrgetter("block_id")


def free_blocks(pool: BlockPool) -> FreeBlocks:
    """Return the host's pool as ids of its blocks, of an engine with one cache group."""

    def cached(block_hash: BlockHash) -> int | None:
        found = pool.get_cached_block(block_hash, [0])
        return found[0].block_id if found else None

    return FreeBlocks(
        pool.get_num_free_blocks,
        lambda count: list(map(_block_id, pool.get_new_blocks(count))),
        lambda ids: pool.free_blocks(map(pool.blocks.__getitem__, ids)),
        cached,
    )


def end_with_error(request: Request) -> None:
    """Let the scheduler end a waiting request with an error in its next step, whatever `kv_load_failure_policy` says.

    A connector has no call for that. vLLM ends a request whose grammar did not compile, so the request gets such a grammar: its
    turn in the queue then ends it before anything is computed. Source: `Scheduler._handle_blocked_waiting_request` of 0.32, the
    same in 0.30 and 0.31.
    """
    no_params: Any = None  # nothing reads them once the grammar has failed
    error = RuntimeError("its KV could not be taken over, or its image is missing here; the log has the code")
    request.structured_output_request = StructuredOutputRequest(no_params, _grammar=error)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def drop_prompt_tail(request: Request, tokens: int) -> bool:
    """Drop `tokens` from the end of a producer's prompt, which the consumer recomputes; return whether that was possible.

    The host keeps up to four copies of the prompt: as ids, as embeddings, as a mask that tells them apart, and with its output.
    A prompt that skips reading the prefix cache stays whole: its client is owed something for each token, such as its logprobs,
    and the consumer computes all of it anyway. Source: `_truncate_request_for_prefill` of vLLM's own connector.
    """
    if request.get_skip_reading_prefix_cache():
        return False
    whole, kept = request.num_prompt_tokens, request.num_prompt_tokens - tokens
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    mask: list[bool] | None = getattr(request, "prompt_is_token_ids", None)
    copies = [part for part in (ids, embeds, mask) if part is not None]
    if kept < 1 or (ids is None and embeds is None) or any(len(part) != whole for part in copies):
        return False
    if len(request._all_token_ids) != whole:  # noqa: SLF001
        return False
    if ids is not None:
        del ids[kept:]
    if embeds is not None:
        request.prompt_embeds = embeds[:kept]
    if mask is not None:
        request.prompt_is_token_ids = mask[:kept]
    del request._all_token_ids[kept:]  # noqa: SLF001
    request.num_prompt_tokens = kept
    request.max_tokens = 1
    return True


def _generation(engine_id: str, instance_id: str) -> int:
    """Return a number that all processes of one engine agree on and that a restarted engine does not repeat.

    It is below 2**53, because routers may keep the numbers of a ticket as doubles.
    """
    digest = hashlib.sha256(f"{engine_id}/{instance_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") + 1


def _shared_instance_id(config: VllmConfig) -> str:
    """Return the instance id of the engine's first rank, which is that of the scheduler; all workers call this at once.

    Every node of an engine makes its own id. Source: vLLM broadcasts its engine id from the same ranks, right before it creates
    the workers' connectors.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():  # a single process that drives the connector itself
        return config.instance_id
    shared: Any = get_tp_group().broadcast_object(config.instance_id, src=0)
    if config.parallel_config.pipeline_parallel_size > 1:
        shared = get_pp_group().broadcast_object(shared, src=0)
    return str(shared)


def all_stages(own: GeometryDocument) -> Sequence[GeometryDocument]:
    """Return the geometry of all pipeline stages at this tensor-parallel rank, in order; all workers call this at once."""
    from vllm.distributed.parallel_state import get_pp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():  # a single process that drives the connector itself
        return (own,)
    group: Any = get_pp_group()
    return [group.broadcast_object(own, src=stage) for stage in range(group.world_size)]


def _whole_reason(config: VllmConfig, cache: KVCacheConfig, *, has_v2_runner: bool) -> str:
    """Return why no prompt can be read while it is computed; empty where prompts can be.

    Sources: version 2 of the model runner zeroes and copies blocks when it accepts a step's requests, before
    `handle_preemptions`; version 1 does so after it. With drafted tokens, version 1 omits `wait_for_save` on all stages but the
    last.
    """
    if has_v2_runner:
        return _ZEROES_FIRST if bool(getattr(cache, "needs_kv_cache_zeroing", True)) else _no_events(config)
    if config.parallel_config.pipeline_parallel_size > 1 and config.speculative_config is not None:
        return _STAGES_NOT_TOLD
    return _no_events(config)


def _no_events(config: VllmConfig) -> str:
    """Return why the end of a chunk cannot be detected; empty where it can: on the CPU, on CUDA, and where copies are read."""
    return "" if current_platform.device_type in {"cpu", "cuda"} or wants_host_buffer(config) else _NO_EVENTS


def _ranks() -> tuple[int, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), get_pp_group().rank_in_group


def _has_host_blocks(config: VllmConfig, caches: KVCacheConfig) -> bool:
    """Return whether HiSparse is on: by the host's configuration of attention, or by its blocks, which are known later."""
    blocks: Any = getattr(caches, "hisparse_host_num_blocks", None)
    attention: Any = getattr(config, "attention_config", None)
    return blocks is not None or getattr(attention, "hisparse_config", None) is not None


def _returns_experts(config: VllmConfig) -> bool:
    """Return whether answers tell of experts; vLLM itself looks at this by the names of its own connectors (from 0.32 on)."""
    places: tuple[Any, ...] = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def sleep_obstacle(settings: Settings) -> str:
    """Return why the cache's memory could not be released for the host's sleep mode; empty where it can be."""
    if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return WITHOUT_HOOKS.format(vllm.__version__)
    return kept_memory(settings.backend_parameters, os.environ)


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
        "vllm_version": vllm.__version__,
        "kv_role": str(transfer.kv_role) if transfer is not None else "",
        "memory": memory,
        "backends": ",".join(settings.backends),
        "compatibility_policy": settings.policy,
        "load_failure_policy": transfer.kv_load_failure_policy if transfer is not None else "fail",
        "lease_s": f"{settings.kv_lease_duration:g}",
        "ranks": str(config.parallel_config.tensor_parallel_size * config.parallel_config.pipeline_parallel_size),
        "engine_ttl_s": f"{settings.engine_ttl:g}",
        "peer_dialect": str(_connector_version()),
    }


def info_of(config: VllmConfig, settings: Settings, index: int) -> dict[str, str]:
    """Return the labels of the info metric of one engine of this server, by its data-parallel index.

    The side channel of a rank on another machine is not known to the server, and its label is empty.
    """
    labels, parallel, transfer = labels_of(config, settings), config.parallel_config, config.kv_transfer_config
    port = listening_port(lambda: envs.VLLM_NIXL_SIDE_CHANNEL_PORT, index)
    is_here = parallel.local_engines_only or index < parallel.data_parallel_size_local
    address = settings.advertised(envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port, index)
    side_channel = channel_text(*address) if is_here else ""
    # Source: vLLM appends the rank to the id in the engine's own process. Servers that share an engine each make up an id of
    # their own, which `engine_name` replaces.
    rank = f"_dp{index}" if parallel.data_parallel_size > 1 else ""
    name = engine_name(f"{transfer.engine_id if transfer else ''}{rank}", labels["kv_role"], side_channel)
    return {**labels, "engine_name": name, "side_channel": side_channel}


def start_line(labels: Mapping[str, str], facts: EngineFacts) -> str:
    """Return the line that says which engine this is, where peers reach it, and which connector runs in it."""
    return "started: " + " ".join(f"{key}={value}" for key, value in {**facts.identity, **labels}.items())
