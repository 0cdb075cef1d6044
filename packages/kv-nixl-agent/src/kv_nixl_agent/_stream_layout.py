"""Layout of stream memory: the progress words of all slots, then each slot's table of block ids.

Every word has 8 bytes, with its owner's tag in the upper half: a progress word holds (tag, tokens), a table entry (tag, id). A
word is stored and read whole, so it never shows the number of one owner under the tag of another, whatever the order of stores
on one side and reads on the other. An entry that is not stored yet carries another tag.

Worked example. 5 slots with room for 20 ids each, at address 0x10000. Progress words are the words 0 to 4; tables begin at word
8, the next multiple of a 64-byte line, and take 24 words each, 20 rounded up the same way. Entry 3 of slot 2 is word 8 + 2 * 24
+ 3 = 59, at 0x10000 + 8 * 59 = 66008. All of it has 8 + 5 * 24 = 128 words. Tag 7 with 40 tokens is the word 7 * 2**32 + 40 =
30064771112.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ._errors import AgentError

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._values import StreamLocation

__all__ = [
    "LOW_HALF",
    "MAX_CAPACITY",
    "MAX_SLOTS",
    "TAG_SHIFT",
    "StreamLayout",
    "check_streams",
    "layout_of",
    "row_of",
]

MAX_SLOTS: Final = 1024
"""Most slots of an agent: all progress words are read at once."""
MAX_CAPACITY: Final = 1 << 20
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


def check_streams(key: str, location: StreamLocation | None) -> None:
    """Refuse a location that no agent of this package can have.

    Raises:
        AgentError: `bad-streams`.
    """
    if location is None:
        return
    address, device, slots, capacity = location
    is_sized = 0 < slots <= MAX_SLOTS and 0 < capacity <= MAX_CAPACITY
    if not is_sized or device < 0 or not 0 < address < 1 << 62 or address % 8:
        raise AgentError("bad-streams", f"peer {key!r} names stream memory {location} that cannot be", peer=key)
