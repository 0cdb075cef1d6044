import torch

class KVCacheSpec:
    block_size: int
    @property
    def page_size_bytes(self) -> int: ...

class AttentionSpec(KVCacheSpec): ...
class MLAAttentionSpec(AttentionSpec): ...

class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int

class SlidingWindowSpec(AttentionSpec):
    sliding_window: int

class MambaSpec(KVCacheSpec):
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    num_speculative_blocks: int

class UniformTypeKVCacheSpecs(KVCacheSpec):
    kv_cache_specs: dict[str, KVCacheSpec]

class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec

class KVCacheConfig:
    def __init__(
        self, num_blocks: int, kv_cache_tensors: list[object], kv_cache_groups: list[KVCacheGroupSpec]
    ) -> None: ...

    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
    needs_kv_cache_zeroing: bool
