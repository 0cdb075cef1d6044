from typing import Any

import torch

class KVTransferConfig:
    def __init__(self, **fields: Any) -> None: ...

    kv_connector: str | None
    engine_id: str | None
    kv_role: str | None
    kv_connector_extra_config: dict[str, object] | None
    kv_load_failure_policy: str
    kv_buffer_device: str
    @property
    def is_kv_producer(self) -> bool: ...
    @property
    def is_kv_consumer(self) -> bool: ...

class ModelConfig:
    model: str
    revision: str | None
    dtype: torch.dtype
    use_mla: bool
    def get_total_num_kv_heads(self) -> int: ...
    def get_head_size(self) -> int: ...
    def get_total_num_hidden_layers(self) -> int: ...

class ParallelConfig:
    tensor_parallel_size: int
    pipeline_parallel_size: int
    decode_context_parallel_size: int
    cp_kv_cache_interleave_size: int
    data_parallel_index: int
    data_parallel_size: int
    node_rank: int
    ray_runtime_env: object
    data_parallel_size_local: int
    data_parallel_backend: str
    local_engines_only: bool

class CacheConfig:
    enable_prefix_caching: bool
    cache_dtype: str

class CompilationConfig:
    static_forward_context: dict[str, Any]

class LoadConfig:
    load_format: str
    download_dir: str | None

class SchedulerConfig:
    disable_hybrid_kv_cache_manager: bool

class SpeculativeConfig:
    method: str
    draft_model_config: Any
    kv_cache_dtype: str | None
    parallel_drafting: bool
    def use_eagle(self) -> bool: ...

class ObservabilityConfig:
    otlp_traces_endpoint: str | None

class VllmConfig:
    @property
    def max_concurrent_batches(self) -> int: ...
    instance_id: str
    shutdown_timeout: int
    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    load_config: LoadConfig
    compilation_config: CompilationConfig
    kv_transfer_config: KVTransferConfig | None
    observability_config: ObservabilityConfig
    speculative_config: SpeculativeConfig | None

def get_current_vllm_config_or_none() -> VllmConfig | None: ...
