"""Stream memory of a producer: words that peers read while a prompt is computed.

**Layout.** The progress words of all slots, then each slot's table of block ids.

Every word has 8 bytes, with its owner's tag in the upper half: a progress word holds (tag, tokens), a table entry (tag, id). A
word is stored and read whole, so it never shows the number of one owner under the tag of another, whatever the order of stores
on one side and reads on the other. An entry that is not stored yet carries another tag.

Worked example. 5 slots with room for 20 ids each, at address 0x10000. Progress words are the words 0 to 4; tables begin at word
8, the next multiple of a 64-byte line, and take 24 words each, 20 rounded up the same way. Entry 3 of slot 2 is word 8 + 2 * 24
+ 3 = 59, at 0x10000 + 8 * 59 = 66008. All of it has 8 + 5 * 24 = 128 words. Tag 7 with 40 tokens is the word 7 * 2**32 + 40 =
30064771112.

**Order of stores.** A reader that sees a progress word may read the pages and table entries that it covers. The entries need no
order, since each carries its owner's tag: a late entry reads as "not stored yet". The pages do need order: the caller of `show`
has seen the device finish them, and their stores must become visible before the progress word. x86 keeps stores in order. ARM
does not; there, the code releases a lock in between and then acquires one: stores before a release become visible before it, a
release becomes visible before an acquisition that follows it, and stores after an acquisition become visible after it. NumPy
and ctypes make plain stores, and Python has no memory fence. On both architectures an aligned 8-byte word is a single store,
even within a copy of many words.

For a network card on ARM the manufacturers ask for an outer-domain barrier (`dmb osh`), which Python cannot issue; this was not
tested yet.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.memory.fences import aligned_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.memory.fences import FenceArray
    from kv_nixl_agent.values import StreamLocation

    Words = npt.NDArray[np.uint64]

__all__ = ["LOW_HALF", "TAG_SHIFT", "StreamLayout", "StreamWords", "layout_of", "row_of"]

TAG_SHIFT: Final = 32
LOW_HALF: Final = (1 << TAG_SHIFT) - 1
"""Largest value of a lower half: as a token count it marks a void tag, as an id a missing entry."""
_LINE_WORDS: Final = 8


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


class StreamLayout(NamedTuple):
    """Word numbers within stream memory."""

    slots: int
    capacity: int

    @property
    def row_words(self) -> int:
        """Words from one table to the next."""
        return _whole_lines(self.capacity)

    @property
    def first_table(self) -> int:
        """Word at which the first table begins."""
        return _whole_lines(self.slots)

    @property
    def words(self) -> int:
        """Total number of words."""
        return self.first_table + self.slots * self.row_words

    def entry(self, slot: int, number: int) -> int:
        """Return the word of a table's entry."""
        return self.first_table + slot * self.row_words + number


def layout_of(location: StreamLocation) -> StreamLayout:
    """Return the layout of a peer's stream memory."""
    return StreamLayout(*location[2:])


def row_of(location: StreamLocation, first: int, words: int) -> npt.NDArray[np.uint64]:
    """Return some words of a peer's stream memory as one strided row of one descriptor."""
    address, device = location[:2]
    return np.array([[address + 8 * first, 8 * words, device, 8 * words, 1]], dtype=np.uint64)


_LOOK_OUT_FIRST_S: Final = 0.01
"""Interval of polls right after a slot was opened. A poll takes the interpreter from the engine for about 80 us."""
_LOOK_OUT_S: Final = 0.1
"""Interval of polls later on."""
_FIRST_FOR_S: Final = 0.2
"""Time after a slot was opened during which polls use the short interval."""


def _nothing() -> None:
    pass


@final
class StreamWords:
    """Progress words and tables of the stream slots; fence word, progress word and table of a slot have the same number.

    Every method may be called on any thread; a lock keeps the stores of one call together. Tags are 0 to 2**32 - 1; block ids are
    0 to 2**32 - 2.

    Args:
        fences: The agent's fence array, of at least as many words.
        slots: Stream slots.
        capacity: Block ids that a table has room for.
        is_alone: Whether NIXL makes progress only on the owner thread.
    """

    def __init__(self, fences: FenceArray, slots: int, capacity: int, *, is_alone: bool = True) -> None:
        self._fences = fences
        self._layout = StreamLayout(slots, capacity)
        self._memory = aligned_words(self._layout.words)
        # Mark every entry as not stored; zeros would not do, because 0 is a valid tag.
        self._memory[self._layout.first_table :] = (1 << 64) - 1
        self._tags: list[int | None] = [None] * slots
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._is_alone = is_alone
        self.has_opened = False
        """Whether a slot was opened since the last `look_out_s`."""
        self._first_until_s = -math.inf
        self.open_count = 0
        """Number of slots with a tag, which peers may poll."""
        self.on_open: Callable[[], None] = _nothing
        """Called on the caller's thread when a slot has been given to a tag."""

    @property
    def location(self) -> StreamLocation:
        """(address, device, slots, capacity) for peers."""
        return (int(self._memory.ctypes.data), 0, self._layout.slots, self._layout.capacity)

    @property
    def total_bytes(self) -> int:
        """Bytes to register."""
        return int(self._memory.nbytes)

    def look_out_s(self, now_s: float) -> float:
        """Return the latest time for the owner's next poll for notifications while slots are open; infinite if none is needed.

        NIXL completes a read that follows a notification to the same peer only once that peer has made progress. A reader's first
        poll follows a notification, the end of its previous read. So the owner polls every 10 ms for 0.2 s after a slot was
        opened, and every 0.1 s from then on. Owner thread only.
        """
        if self.has_opened:
            self.has_opened = False
            self._first_until_s = now_s + _FIRST_FOR_S
        if not self._is_alone or not self.open_count:
            return math.inf
        return now_s + (_LOOK_OUT_FIRST_S if now_s < self._first_until_s else _LOOK_OUT_S)

    def open(self, slot: int, generation: int, tag: int) -> None:
        """Give a slot to a tag: store the generation as its fence word, then progress 0; its table starts without entries.

        Raises:
            AgentError: `bad-streams`, `bad-fence`, `agent-closed`.
        """
        with self._lock:
            self._check(slot, tag)
            self._fences.write(slot, generation)
            self._give(slot, tag)
            self._put_progress(slot, tag, 0)
        self.has_opened = True
        self.on_open()

    def void(self, slot: int, word: int, tag: int) -> None:
        """Store a fence word that no reader accepts, then void the progress of the tag, which shows nothing from then on.

        Raises:
            AgentError: as `open`.
        """
        with self._lock:
            self._check(slot, tag)
            self._fences.write(slot, word)
            self._give(slot, None)
            self._put_progress(slot, tag, LOW_HALF)

    def put(self, slot: int, tag: int, first: int, ids: Sequence[int]) -> None:
        """Store block ids as the entries `first` and following of the tag's table.

        Raises:
            AgentError: `bad-streams` for ids or entries out of range, or another tag than the slot has.
        """
        with self._lock:
            self._check(slot, tag)
            numbers = np.array(ids, dtype=np.int64)
            is_inside = first >= 0 and first + len(numbers) <= self._layout.capacity
            if self._tags[slot] != tag or not is_inside or ((numbers < 0) | (numbers >= LOW_HALF)).any():
                raise AgentError(
                    "bad-streams",
                    f"{len(numbers)} ids from entry {first} on for tag {tag}: slot {slot} has the tag {self._tags[slot]} and "
                    f"{self._layout.capacity} entries, and ids are 0 to 2**32-2",
                    slot=slot,
                )
            self._put_entries(slot, first, tag, numbers.astype(np.uint64))

    def show(self, slot: int, tag: int, tokens: int) -> None:
        """Store the progress, after all data that it covers; dropped if the slot has another tag by now.

        Raises:
            AgentError: `bad-streams`.
        """
        with self._lock:
            self._check(slot, tag)
            if not 0 <= tokens < LOW_HALF:
                raise AgentError("bad-streams", f"progress of {tokens} tokens: it is 0 to 2**32-2", slot=slot)
            if self._tags[slot] == tag:
                self._put_progress(slot, tag, tokens)

    def void_all(self) -> None:
        """Permanently void the progress of every slot; the fence words are already void and can no longer be written."""
        with self._lock:
            self._tags[:] = [None] * len(self._tags)
            self.open_count = 0
            self._memory[: self._layout.slots] |= np.uint64(LOW_HALF)

    def _give(self, slot: int, tag: int | None) -> None:
        self.open_count += (tag is not None) - (self._tags[slot] is not None)
        self._tags[slot] = tag

    def _check(self, slot: int, tag: int) -> None:
        if not 0 <= slot < self._layout.slots or not 0 <= tag <= LOW_HALF:
            raise AgentError(
                "bad-streams",
                f"stream slot {slot} with tag {tag}: slots are 0 to {self._layout.slots - 1}, tags 0 to 2**32-1",
                slot=slot,
            )

    def _put_progress(self, slot: int, tag: int, tokens: int) -> None:
        with self._gate:  # leaving it is the release
            pass
        with self._gate:  # entering it is the acquisition
            self._memory[slot] = tag << TAG_SHIFT | tokens

    def _put_entries(self, slot: int, first: int, tag: int, ids: Words) -> None:
        begin = self._layout.entry(slot, first)
        self._memory[begin : begin + len(ids)] = ids | np.uint64(tag << TAG_SHIFT)
