"""A store for vLLM's own OffloadingConnector on CPU engines, as they load it: `spec_module_path` is `plain_offloading`.

vLLM's store copies through streams of a GPU and is refused elsewhere. This one keeps vLLM's book-keeping and copies with torch;
its connector, in front of it, is vLLM's in both halves. A load is reported a step later, as one between devices would be.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

__all__ = ["PlainOffloading"]


class PlainOffloading(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's store of blocks in host memory, without its GPU copies."""

    def get_worker(self, kv_caches: Any) -> PlainCopies:
        return PlainCopies(kv_caches, self.num_chunks)


class PlainCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies of tensors (blocks, bytes), where a chunk is one block."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        assert len(kv_caches.group_data_refs) == 1
        self._engines = [cache.tensor for cache in kv_caches.tensors]
        self._stored = [tensor.new_empty((chunks, *tensor.shape[1:])) for tensor in self._engines]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._engines, src_spec, self._stored, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._stored, src_spec, self._engines, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        for from_tensor, to_tensor in zip(sources, targets, strict=True):
            for from_block, to_block in zip(source.block_ids, target.block_ids, strict=True):
                to_tensor[int(to_block)] = from_tensor[int(from_block)]
        self._done.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy ended when it was submitted."""
