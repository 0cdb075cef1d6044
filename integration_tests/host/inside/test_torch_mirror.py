"""The mirror of the cache in host memory, with torch on a CPU device: the paths of CUDA's streams are not reached here."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import torch
from seeds import for_seeds

from vllm_adapter.host.torch_mirror import TorchMirror
from vllm_adapter.worker.pages import PageCopy, PageRange

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


def raw(tensor: torch.Tensor) -> np.ndarray:
    """All bytes of a tensor's allocation, not a copy."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()


def ranges_of(tensors: list[torch.Tensor]) -> tuple[PageRange, ...]:
    found = {
        PageRange(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), tensor.shape[0]) for tensor in tensors
    }
    return tuple(sorted(found, key=lambda pages: pages.address))


def test_twins_look_like_their_originals_and_share_memory_as_they_do() -> None:
    backing = torch.zeros(4096, dtype=torch.bfloat16)
    tensors = {
        "a": backing[:1024].view(8, 2, 4, 16),
        "b": backing[:1024].view(4, 4, 4, 16),
        "c": backing[1024:2048].view(8, 4, 2, 16).transpose(1, 2),
        "other": torch.zeros(8, 32),
    }
    mirror = TorchMirror(tensors)
    for name, tensor in tensors.items():
        twin = mirror.tensors[name]
        assert (twin.shape, twin.stride(), twin.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert twin.storage_offset() == tensor.storage_offset()
    addresses = {name: twin.data_ptr() for name, twin in mirror.tensors.items()}
    assert addresses["a"] == addresses["b"] != addresses["c"]
    assert not set(addresses.values()) & {tensor.data_ptr() for tensor in tensors.values()}
    assert mirror.mark() is None


@for_seeds(30)
def test_exactly_the_named_pages_cross(seed: int) -> None:
    """Layers side by side in one allocation, and one by itself; pages with and without a gap."""
    rng = np.random.default_rng(seed)
    dtype, scratch_bytes = DTYPES[seed % len(DTYPES)], (1, 3000, 1 << 20)[seed // len(DTYPES) % 3]
    pages, page = 12, (2, 4, 8)
    filled = torch.from_numpy(rng.integers(0, 256, 5 * pages * 64 * dtype.itemsize, np.uint8)).view(dtype)
    layers = list(filled[: 3 * pages * 64].view(3, pages, *page).unbind())
    layers.append(filled[3 * pages * 64 :].view(pages, 2, *page)[:, 0])
    mirror = TorchMirror({str(n): layer for n, layer in enumerate(layers)}, scratch_bytes=scratch_bytes)
    twins = list(mirror.tensors.values())
    device, host = raw(layers[0]), raw(twins[0])
    host[:] = 0
    before = device.copy()
    chosen = np.sort(rng.choice(pages, 5, replace=False)).astype(np.int64)
    copies = [PageCopy(ranges_of(twins), 64 * dtype.itemsize, chosen)]
    mirror.save(copies, None)
    named = torch.zeros(len(filled), dtype=torch.bool)
    marks = [
        *named[: 3 * pages * 64].view(3, pages, *page).unbind(),
        named[3 * pages * 64 :].view(pages, 2, *page)[:, 0],
    ]
    for mark in marks:
        mark[chosen] = True
    is_named = named.numpy().repeat(dtype.itemsize)
    np.testing.assert_array_equal(host, np.where(is_named, before, 0))
    np.testing.assert_array_equal(device, before)
    host[:] = rng.integers(0, 256, len(host), np.uint8)
    mirror.restore(copies, None)
    np.testing.assert_array_equal(device, np.where(is_named, host, before))


def test_only_copied_blocks_take_memory() -> None:
    """A mirror of 512 MiB of which 1 MiB was used."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    device = torch.zeros(512, 1 << 20, dtype=torch.uint8)
    mirror = TorchMirror({"layer": device}, scratch_bytes=1 << 20)
    before = resident_bytes()
    twin = mirror.tensors["layer"]
    mirror.save([PageCopy((PageRange(twin.data_ptr(), 1 << 20, 512),), 1 << 20, np.array([77]))], None)
    assert resident_bytes() - before < 16 << 20
