from collections.abc import Iterable, Sequence

BlockHash = bytes

class KVCacheBlock:
    block_id: int

class BlockPool:
    blocks: list[KVCacheBlock]

    def get_num_free_blocks(self) -> int: ...
    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None: ...
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]: ...
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None: ...
