"""Puts received pages in order with numpy: what `vllm_adapter.host.torch_pages` does with torch, without a host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from vllm_adapter.worker.pages import ConversionStep, PageRange

Array = np.ndarray[Any, Any]


class NumpyPages:
    """A `PageConverter` over arrays, page by page: slow and plain."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self._arrays = [flat_bytes(array) for array in arrays]
        self.pages_converted = 0
        self.refusal: Exception | None = None

    def convert(self, steps: Sequence[ConversionStep]) -> None:
        if self.refusal is not None:
            raise self.refusal
        for step in steps:
            for region in step.regions:
                for page in step.pages.tolist():
                    self._convert(step, region, page)
                    self.pages_converted += 1

    def _convert(self, step: ConversionStep, region: PageRange, page: int) -> None:
        how = step.permutation()
        start = region.address + page * region.stride_bytes + how.start_bytes
        array = next(a for a in self._arrays if a.ctypes.data <= start < a.ctypes.data + a.nbytes)
        at = start - array.ctypes.data
        words = array[at : at + how.span * how.word_bytes].view(f"u{how.word_bytes}")
        received = words.copy()
        for move in how.moves:
            source = [stride * how.word_bytes for stride in move.source_strides]
            target = [stride * how.word_bytes for stride in move.target_strides]
            as_strided(words[move.target_offset :], move.shape, target)[...] = as_strided(
                received[move.source_offset :], move.shape, source
            )


def flat_bytes(array: Array) -> Array:
    """The bytes of an array in the order of memory, however its axes are arranged; not a copy."""
    dense = array.transpose(np.argsort([-stride for stride in array.strides], kind="stable"))
    assert dense.flags.c_contiguous
    return dense.reshape(-1).view(np.uint8)
