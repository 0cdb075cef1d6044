"""Integrity mode: checksums of pages over canonical order, so that ranks with different layouts agree.

A page holds *cells*: the smallest pieces that both sides hold whole, for example one KV head of one block in one
layer. For each cell, the planner lists the segments of the page that hold its bytes, in canonical order. The checksum of
a cell is

    sum of word[i] * weight[i]  (mod 2**64),

where i is the word's *canonical* position and the weights are fixed odd pseudo-random numbers. As the sum does not
depend on the order of the words, a layout is just another arrangement of the weights: nothing is gathered, and one
multiply-add over the page in its own order is the whole cost. Any change confined to one word certainly changes the sum (an
odd weight has an inverse); any other change escapes with a probability of about 2**-64.

The producer's checksums live in a registered table, one row of 64-bit words per page, which consumers read in the
same transfer as the pages: a table is two more rows of a peer, and fences guard it like the pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import numpy as np

from ._errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from ._values import MemoryRegion, PageCheck

    Words = npt.NDArray[np.uint64]

__all__ = ["ChecksumTable", "PageLayout", "page_check"]

_WORD_BYTES: Final = 8
_SCRATCH_WORDS: Final = 1 << 15  # products of this many words stay in the core's cache
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def _weights(first: int, count: int) -> Words:
    """Return odd weights of canonical positions first to first + count: SplitMix64, which any language can reproduce."""
    with np.errstate(over="ignore"):
        state = (np.arange(first + 1, first + 1 + count, dtype=np.uint64)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: Words = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return weights


@final
class PageLayout:
    """Positions of each cell's words in a page of one rank.

    Args:
        page_bytes: Size of a page; a multiple of 8.
        offsets: int64 (segments,), byte offset of each segment in the page.
        lengths: int64 (segments,), bytes of each segment.
        cells: int64 (segments,), cell of each segment. The segments of a cell follow each other in canonical order.

    Raises:
        AgentError: `bad-rows` if segments are not whole words, overlap, or reach outside the page.
    """

    __slots__ = ("_cell_count", "_groups", "page_bytes")

    def __init__(self, page_bytes: int, offsets: object, lengths: object, cells: object) -> None:
        starts: npt.NDArray[np.int64] = np.asarray(offsets, dtype=np.int64)
        sizes: npt.NDArray[np.int64] = np.asarray(lengths, dtype=np.int64)
        owner: npt.NDArray[np.int64] = np.asarray(cells, dtype=np.int64)
        _check_segments(page_bytes, starts, sizes, owner)
        self.page_bytes = page_bytes
        self._cell_count = int(owner.max()) + 1
        word_cell = np.full(page_bytes // _WORD_BYTES, -1, dtype=np.int64)
        word_weight: Words = np.zeros(page_bytes // _WORD_BYTES, dtype=np.uint64)
        canonical = [0] * self._cell_count
        segments: list[list[int]] = np.stack([starts // 8, sizes // 8, owner], axis=1).tolist()
        for start, size, cell in segments:
            if bool((word_cell[start : start + size] >= 0).any()):
                raise AgentError("bad-rows", f"segments overlap at byte {start * 8} of the page")
            word_cell[start : start + size] = cell
            word_weight[start : start + size] = _weights(canonical[cell], size)
            canonical[cell] += size
        # Neighbouring words of one cell form a run; products are summed run by run, then runs cell by cell.
        edges = np.flatnonzero(np.concatenate(([True], word_cell[1:] != word_cell[:-1])))
        self._groups = (word_weight, edges, word_cell[edges])

    @property
    def cell_count(self) -> int:
        """Checksums per page."""
        return self._cell_count

    def checksums(self, pages: npt.NDArray[np.uint8], numbers: Sequence[int] | npt.NDArray[np.int64]) -> Words:
        """Return the checksums of the named pages, uint64 (numbers, cells).

        Args:
            pages: uint8 (page_count, page_bytes), contiguous in a page and aligned to 8 bytes.
            numbers: Pages to look at.
        """
        weight, edges, run_cell = self._groups
        words: Words = np.ndarray((len(pages), len(weight)), dtype=np.uint64, buffer=pages)
        chosen: npt.NDArray[np.int64] = np.asarray(numbers, dtype=np.int64)
        result: Words = np.zeros((len(chosen), self._cell_count), dtype=np.uint64)
        widths = np.diff(np.append(edges, len(weight)))
        is_regular = bool((widths == widths[0]).all())
        step = max(1, _SCRATCH_WORDS // len(weight))
        for first in range(0, len(chosen), step):
            block: Words = words[chosen[first : first + step]]
            if is_regular:
                shape = (len(edges), int(widths[0]))
                by_run: Words = np.reshape(block, (-1, *shape))
                runs: Words = np.einsum("prw,rw->pr", by_run, np.reshape(weight, shape))
            else:
                runs = np.add.reduceat(block * weight, edges, axis=1)
            for cell in range(self._cell_count):
                result[first : first + step, cell] = runs[:, run_cell == cell].sum(axis=1)
        return result


def _check_segments(
    page_bytes: int, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], owner: npt.NDArray[np.int64]
) -> None:
    if not (starts.ndim == sizes.ndim == owner.ndim == 1 and len(starts) == len(sizes) == len(owner) and len(starts)):
        raise AgentError("bad-rows", "offsets, lengths and cells of segments need the same non-zero number")
    if page_bytes <= 0 or page_bytes % 8 or bool((starts % 8 != 0).any()) or bool((sizes % 8 != 0).any()):
        raise AgentError("bad-rows", f"a page of {page_bytes} bytes and its segments must be whole 8-byte words")
    if bool((starts < 0).any() or (sizes <= 0).any() or (starts + sizes > page_bytes).any() or (owner < 0).any()):
        raise AgentError("bad-rows", f"a segment is empty or reaches outside the page of {page_bytes} bytes")


@final
class ChecksumTable:
    """Registered checksums of one region's pages, uint64 (page_count, cells); written by its owner, read by peers."""

    __slots__ = ("values",)

    def __init__(self, page_count: int, cell_count: int) -> None:
        self.values: Words = np.zeros((page_count, cell_count), dtype=np.uint64)

    @property
    def region(self) -> MemoryRegion:
        """Memory to register with the agent."""
        return (int(self.values.ctypes.data), int(self.values.nbytes), 0, "DRAM")

    @property
    def location(self) -> tuple[int, int, int]:
        """(address, page count, cells) for peers."""
        return (int(self.values.ctypes.data), self.values.shape[0], self.values.shape[1])

    @staticmethod
    def rows(location: tuple[int, int, int], first_cell: int, cell_count: int) -> Words:
        """Return one strided row whose descriptor i is the named cells of page i."""
        address, page_count, cells = location
        if not 0 <= first_cell < first_cell + cell_count <= cells:
            raise AgentError("bad-rows", f"cells {first_cell} to {first_cell + cell_count} of a table with {cells}")
        width = 8 * cell_count
        return np.array([[address + 8 * first_cell, width, 0, 8 * cells, page_count]], dtype=np.uint64)

    def update(self, layout: PageLayout, pages: npt.NDArray[np.uint8], numbers: Sequence[int]) -> None:
        """Store the checksums of complete pages; call before their lease is granted."""
        self.values[list(numbers)] = layout.checksums(pages, list(numbers))


def page_check(
    layout: PageLayout,
    pages: npt.NDArray[np.uint8],
    numbers: Sequence[int],
    received: ChecksumTable,
    *,
    describe: Callable[[int, int], str],
) -> PageCheck:
    """Return a check for `TransferOrder.page_check`: compares pages that were read with the checksums received with them.

    Args:
        layout: Layout of the local pages.
        pages: uint8 (page_count, page_bytes), local.
        numbers: Local pages of the transfer.
        received: Local table; row `number` was filled by the same transfer.
        describe: Names (page number, cell) for the error: request, layer, block, rank.
    """

    def check() -> Sequence[str]:
        actual = layout.checksums(pages, list(numbers))
        differs = actual != received.values[list(numbers)]
        if not bool(differs.any()):
            return ()
        return [describe(numbers[row], cell) for row, cell in np.argwhere(differs).tolist()]

    return check
