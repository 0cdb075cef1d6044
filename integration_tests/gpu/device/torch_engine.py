"""The simulation's engine with its cache in torch tensors, on a GPU or not: the adapter's own device code in place of numpy's."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import numpy as np
import torch
from engines import HEAD_SIZE, HEADS, Engine

from vllm_adapter.cache.facts import LayerCache
from vllm_adapter.host.device_streams import device_selector
from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.host.torch_pages import TorchPages
from vllm_adapter.worker.engine_thread import WorkerSide


class TorchEngine(Engine):
    """An engine whose workers register tensors, convert and mirror them as the connector in vLLM does."""

    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        self.device = device
        super().__init__(name, **options)

    def _empty_cache(self) -> torch.Tensor:
        heads = HEADS // self.tp
        if self.order == "HND":
            return torch.full((self.blocks, heads, self.tokens, 2 * HEAD_SIZE), math.nan, device=self.device)
        return torch.full((self.blocks, self.tokens, heads, 2 * HEAD_SIZE), math.nan, device=self.device).transpose(
            1, 2
        )

    def _register(self, worker: WorkerSide, caches: list[Any], *, has_mirror: bool) -> None:
        """Do what the connector's `register_kv_caches` does."""
        tensors: dict[str, torch.Tensor] = {f"layers.{n}": cache for n, cache in enumerate(caches)}
        select_device = device_selector(tensors.values())
        mirror = TorchMirror(tensors) if has_mirror else None
        visible = tensors if mirror is None else mirror.tensors
        self.converters.append(TorchPages(visible.values()))
        if mirror is not None:
            self.mirrors.append(mirror)
        layers = [_layer_cache(name, tensor) for name, tensor in visible.items()]
        worker.register(layers, self.converters[-1], mirror, select_device=select_device)

    def _write(self, cache: Any, block: int, first: int, last: int, page: np.ndarray[Any, Any]) -> None:
        cache[block, :, first:last] = torch.from_numpy(np.ascontiguousarray(page[:, first:last])).to(self.device)

    def _read(self, cache: Any, block: int) -> np.ndarray[Any, Any]:
        page: np.ndarray[Any, Any] = cache[block].cpu().numpy()
        return page

    def transfer_threads(self) -> list[Any]:
        """The transfer threads of all ranks."""
        return [worker._registration.agent for worker in self.workers if worker._registration is not None]

    def fence_checks(self, expected: int, within_s: float = 10) -> list[int]:
        """How many fences each rank has verified, as soon as all say `expected`: threads publish their figures by and by."""
        until_s = time.monotonic() + within_s
        while True:
            found = [int(thread.statistics()["fence_checks"]) for thread in self.transfer_threads()]
            if all(count >= expected for count in found) or time.monotonic() > until_s:
                return found
            time.sleep(0.05)

    def fences_rejected(self) -> int:
        """How many reads of all ranks were void, because the fence had another word."""
        return sum(int(thread.statistics()["transfers_fence_rejected"]) for thread in self.transfer_threads())


def _layer_cache(name: str, tensor: torch.Tensor) -> LayerCache:
    kind: Literal["DRAM", "VRAM"] = "DRAM" if tensor.device.type == "cpu" else "VRAM"
    strides = tuple(stride * tensor.element_size() for stride in tensor.stride())
    page_bytes = tensor[0].numel() * tensor.element_size()
    number = tensor.device.index or 0
    return LayerCache(
        name, 0, tensor.data_ptr(), tuple(tensor.shape), strides, tensor.element_size(), kind, number, page_bytes
    )
