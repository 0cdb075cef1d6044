"""Put received pages in order and mirror them with numpy, slow and failing on demand: what the host's room does with torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from vllm_adapter.worker.pages import ConversionStep, PageCopy, PageRange

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
        types = [f"u{how.word_bytes}"] * 2
        if how.cast is not None:
            types = [name.removeprefix("torch.") for name in (how.cast.source_type, how.cast.target_type)]
        span = array[at : at + how.span * how.word_bytes]
        received, words = span.copy().view(types[0]), span.view(types[1])
        for move in how.moves:
            source = [stride * received.itemsize for stride in move.source_strides]
            target = [stride * words.itemsize for stride in move.target_strides]
            as_strided(words[move.target_offset :], move.shape, target)[...] = as_strided(
                received[move.source_offset :], move.shape, source
            )


def flat_bytes(array: Array) -> Array:
    """The bytes of an array in the order of memory, however its axes are arranged; not a copy."""
    dense = array.transpose(np.argsort([-stride for stride in array.strides], kind="stable"))
    assert dense.flags.c_contiguous
    return dense.reshape(-1).view(np.uint8)


class NumpyMirror:
    """A `MirrorMemory` whose `arrays` are what peers see of the `device` arrays; without any given, they are made."""

    def __init__(self, device: Sequence[Array], arrays: Sequence[Array] = ()) -> None:
        self.arrays = list(arrays) or [np.full_like(array, np.nan) for array in device]
        for mine, its in zip(self.arrays, device, strict=True):
            assert mine.strides == its.strides
        self._pairs = [(flat_bytes(mine), flat_bytes(its)) for mine, its in zip(self.arrays, device, strict=True)]
        self.delay_s = 0.0
        self.save_refusal: Exception | None = None
        self.restore_refusal: Exception | None = None
        self.marks = 0

    def mark(self) -> object:
        self.marks += 1
        return self.marks

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        assert after is not None
        if self.delay_s:
            time.sleep(self.delay_s)
        if copies and self.save_refusal is not None:
            raise self.save_refusal
        self._copy(copies, to_device=False)

    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        assert after is not None
        if self.restore_refusal is not None:
            raise self.restore_refusal
        self._copy(copies, to_device=True)

    def _copy(self, copies: Sequence[PageCopy], *, to_device: bool) -> None:
        for copy in copies:
            for region in copy.ranges:
                mine, its = next(
                    p for p in self._pairs if p[0].ctypes.data <= region.address < p[0].ctypes.data + p[0].nbytes
                )
                for page in copy.pages.tolist():
                    at = region.address - mine.ctypes.data + page * region.stride_bytes
                    place = slice(at, at + copy.page_bytes)
                    if to_device:
                        its[place] = mine[place]
                    else:
                        mine[place] = its[place]
