"""Words that peers read one-sidedly, and pads into which our own reads of words land.

Layout of the memory of an agent with 4096 fence words: words 0 to 4095 are exposed to peers; word 4608 is where warm-up reads
land, and is never read. From word 4616 on (a multiple of 64 bytes) lie the 32768 words of the probe pages: a public pattern,
which never changes and which a pre-flight check reads to compare and to measure. They lie at an offset that follows from the
number of words (words 4096 to 4607 were in use once), so nothing new crosses the side channel and no address that peers know
changes. A rank of an older version has none: NIXL then refuses the rows, because the rank's metadata does not register them.

Worked example. Up to the warm-up word there are 4609 words: 36872 bytes, rounded up to a multiple of 64 are 36928. At address
0x10000 the probe pages begin at 0x10000 + 36928 = 102464, and end 262144 bytes later.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError, demand_ints

if TYPE_CHECKING:
    import numpy.typing as npt

    from kv_nixl_agent.values import FenceLocation

    Words = npt.NDArray[np.uint64]

__all__ = [
    "CLOSED_GENERATION",
    "FENCE_PADS",
    "PAD_WORDS",
    "PROBE_PAGES",
    "PROBE_PAGE_BYTES",
    "PROBE_WORDS",
    "FenceArray",
    "Scratch",
    "aligned_words",
    "probe_pattern",
    "probe_rows",
    "words_before_pages",
]

CLOSED_GENERATION: Final = (1 << 64) - 1
"""Generation in every fence word of a closed agent; never granted to a request."""

FENCE_PADS: Final = 256
PAD_WORDS: Final = 512
"""Words of a pad, and most fence words that one read covers: a single descriptor of 4 KiB."""

PROBE_WORDS: Final = 32768
PROBE_PAGES: Final = 4
PROBE_PAGE_BYTES: Final = 65536

_LINE_WORDS: Final = 8
_GAP_WORDS: Final = 512  # unused; keeps the probe pages where peers of other versions look for them


def aligned_words(count: int) -> Words:
    """Return an array of zeroed words that starts at a 64-byte line."""
    raw: Words = np.zeros(count + _LINE_WORDS, dtype=np.uint64)
    shift = (-raw.ctypes.data % (8 * _LINE_WORDS)) // 8
    return raw[shift : shift + count]


def words_before_pages(word_count: int) -> int:
    """Return the number of words before a fence array's probe pages. Example: 4616 for 4096 words."""
    return -(-(word_count + _GAP_WORDS + 1) // _LINE_WORDS) * _LINE_WORDS


@cache
def probe_pattern() -> Words:
    """Return the content of the probe pages, uint64 (PROBE_WORDS,), read-only; all words differ."""
    pattern: Words = np.arange(1, PROBE_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    pattern.flags.writeable = False
    return pattern


@final
class Scratch:
    """Places in registered memory where reads of a peer's words land, all of one size.

    Args:
        memory: The memory.
        places: First word of each place; its step is the number of words of a place.
    """

    def __init__(self, memory: Words, places: range) -> None:
        self.memory = memory
        self._step = places.step
        self.free = deque(places)
        """Places not in use, but for suspect ones."""
        self._suspect: deque[int] = deque()

    @property
    def free_count(self) -> int:
        """Number of places not in use."""
        return len(self.free) + len(self._suspect)

    def take(self) -> int | None:
        """Return the first word of a free place, filled with a value that no lease has; None if all are in use."""
        if not self.free_count:
            return None
        place = (self.free or self._suspect).popleft()
        self.memory[place : place + self._step] = CLOSED_GENERATION
        return place

    def give_back(self, place: int, *, is_suspect: bool = False) -> None:
        """Free a place. A suspect place, whose read ended in an error, is reused only after all others."""
        if is_suspect:
            self._suspect.append(place)
        else:
            self.free.appendleft(place)


@final
class FenceArray:
    """64-bit words that a producer changes and consumers read one-sidedly, with pads for our own reads of such words.

    A word is written with one aligned 8-byte store, so a reader sees either the old or the new generation. A lock keeps writers
    on other threads from making a word valid again after `void_all`.
    """

    def __init__(self, word_count: int) -> None:
        self.word_count = word_count
        """Number of words exposed to peers."""
        first = words_before_pages(word_count)
        whole = aligned_words(first + PROBE_WORDS)
        whole[first:] = probe_pattern()
        self._memory: Words = whole[:word_count]
        self.location: FenceLocation = (int(whole.ctypes.data), 0, word_count)
        """(address, device, word count) for peers."""
        self.total_bytes = int(whole.nbytes)
        """Bytes to register, including probe pages."""
        self.pads = Scratch(aligned_words(FENCE_PADS * PAD_WORDS), range(0, FENCE_PADS * PAD_WORDS, PAD_WORDS))
        """Pads in which our own reads of such words land, to be registered too."""
        self.warm_up_words = whole[word_count + _GAP_WORDS :][:1]
        """The word in which warm-up reads land; its content means nothing."""
        self._lock = threading.Lock()
        self._is_void = False

    def write(self, slot: int, generation: int) -> None:
        """Store `generation` in `slot`; any thread.

        Raises:
            AgentError: `bad-fence` if either is out of range, `agent-closed` once all words are void.
        """
        demand_ints("slot and generation", (slot, generation), 2)
        if not 0 <= slot < self.word_count or not 0 <= generation < CLOSED_GENERATION:
            raise AgentError(
                "bad-fence",
                f"fence slot {slot} with generation {generation}: slots are 0 to {self.word_count - 1}, "
                "generations 0 to 2**64-2",
                slot=slot,
            )
        with self._lock:
            if self._is_void:
                raise AgentError("agent-closed", f"fence word {slot} is void for good: the agent was closed")
            self._memory[slot] = generation

    def read(self, slot: int) -> int:
        """Return the generation in `slot`."""
        return int(self._memory[slot])

    def void_all(self) -> None:
        """Permanently set every word to a value that differs from every granted generation."""
        with self._lock:
            self._is_void = True
            self._memory[:] = CLOSED_GENERATION


def probe_rows(fence: FenceLocation) -> Words:
    """Return the probe pages of the rank that has this fence array, as one strided row."""
    address, device, words = fence
    first = address + 8 * words_before_pages(words)
    return np.array([[first, PROBE_PAGE_BYTES, device, PROBE_PAGE_BYTES, PROBE_PAGES]], dtype=np.uint64)
