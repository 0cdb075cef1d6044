"""Plain types that several ports share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["BlockIds", "Indices", "MemoryKind", "PageNumbers", "Rows"]

BlockIds = Sequence[Sequence[int]]
"""Logical block ids, one sequence per KV-cache group, in token order."""

MemoryKind = Literal["DRAM", "VRAM"]

Rows = npt.NDArray[np.uint64]
"""uint64 (n, 5): address, length_bytes, device, stride_bytes, count; each row stands for `count` descriptors."""

Indices = npt.NDArray[np.int32]
"""int32 (n,): descriptor numbers, counted over all rows."""

PageNumbers = npt.NDArray[np.int64]
"""int64 (n,): page numbers in a region, ascending, each once."""
