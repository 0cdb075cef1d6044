"""Probe pages: a public pattern behind a rank's fence array, which a pre-flight check reads to compare and to measure.

They lie in the same registered memory as the fence words, at an offset that follows from the number of words, so nothing new
crosses the side channel and no address that peers know changes. A rank of an older version has none: NIXL then refuses the
rows, because the rank's metadata does not register them.

Worked example. A fence array of 4096 words has 4609 words with those of its own reads (`_fences.py`): 36872 bytes, rounded up to
a multiple of 64 are 36928. At address 0x10000 the pages begin at 0x10000 + 36928 = 102464, and end 262144 bytes later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ._fences import words_before_pages

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._values import FenceLocation

__all__ = ["PROBE_PAGES", "PROBE_PAGE_BYTES", "probe_rows"]

PROBE_PAGES: Final = 4
PROBE_PAGE_BYTES: Final = 65536


def probe_rows(fence: FenceLocation) -> npt.NDArray[np.uint64]:
    """Return the probe pages of the rank that has this fence array, as one strided row."""
    address, device, words = fence
    first = address + 8 * words_before_pages(words)
    return np.array([[first, PROBE_PAGE_BYTES, device, PROBE_PAGE_BYTES, PROBE_PAGES]], dtype=np.uint64)
