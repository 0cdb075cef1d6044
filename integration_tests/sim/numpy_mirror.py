"""A mirror of numpy arrays: what `vllm_adapter.host.torch_mirror` does with torch, slow and failing on demand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy_pages import flat_bytes

from vllm_adapter.worker.pages import PageCopy

Array = np.ndarray[Any, Any]


class NumpyMirror:
    """A `MirrorMemory` whose `arrays` are what peers see of the `device` arrays."""

    def __init__(self, device: Sequence[Array]) -> None:
        self.arrays = [np.full_like(array, np.nan) for array in device]
        for mine, its in zip(self.arrays, device, strict=True):
            assert mine.strides == its.strides
        self._pairs = [(flat_bytes(mine), flat_bytes(its)) for mine, its in zip(self.arrays, device, strict=True)]
        self.is_asynchronous = True
        self.delay_s = 0.0
        self.save_refusal: Exception | None = None
        self.restore_refusal: Exception | None = None
        self.marks = 0

    def mark(self) -> object:
        self.marks += 1
        return self.marks

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        assert after is not None
        time.sleep(self.delay_s)
        if self.save_refusal is not None:
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
