"""A mirror of the cache in memory that peers see: what `vllm_adapter.host.torch_mirror` does with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from vllm_adapter.worker.pages import PageCopy

__all__ = ["SimMirror"]

Array = np.ndarray[Any, Any]


@final
class SimMirror:
    """A `MirrorMemory` over two arrays of the same form; copies are made at once.

    Attributes:
        is_broken: Whether every copy fails.
    """

    is_asynchronous = False

    def __init__(self, device: Array, mirror: Array) -> None:
        self._device, self._mirror = (each.reshape(-1).view(np.uint8) for each in (device, mirror))
        self._address = mirror.ctypes.data
        self.is_broken = False

    def mark(self) -> object:
        """Return what stands for all that was given to the device so far."""
        return None

    def save(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages to the mirror."""
        self._copy(copies, self._device, self._mirror)

    def restore(self, copies: Sequence[PageCopy], after: object) -> None:
        """Copy pages from the mirror."""
        self._copy(copies, self._mirror, self._device)

    def _copy(self, copies: Sequence[PageCopy], source: Array, target: Array) -> None:
        if self.is_broken:
            raise RuntimeError("a copy between device and host failed")
        for copy in copies:
            for pages in copy.ranges:
                for page in copy.pages.tolist():
                    at = pages.address - self._address + page * pages.stride_bytes
                    target[at : at + copy.page_bytes] = source[at : at + copy.page_bytes]
