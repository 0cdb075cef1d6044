"""Parts of a streamed read: the places of the peer's table that they need, and the blocks that they move.

The table holds the groups one after the other, each with a place for every block that the prompt's tokens need; a group of
states has one place.

Worked example. 100 tokens; groups with blocks of 16 and of 32 tokens and one of states: 7 + 4 + 1 = 12 places; the groups begin
at 0, 7 and 11. Parts are whole multiples of 32 tokens. The part of tokens 32 to 64 needs places 2, 3 and 8. The last part, from
token 96 on, needs 6, 10 and 11. With a window of 20 tokens in the first group, only its blocks from token 80 on are needed:
places 5 and 6.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports import BlockList

__all__ = ["Part", "PartBlocks", "StreamShape"]


class PartBlocks(NamedTuple):
    """Blocks of one group that a part moves: `length` blocks from the prompt's block `first`, listed from `place` on."""

    first: int
    length: int
    place: int


@final
class StreamShape:
    """Groups of an engine and its peer, whose blocks stand for equal numbers of tokens.

    Args:
        groups: (tokens per block, window in tokens) of each group; 0 tokens for states, window 0 for none.
    """

    __slots__ = ("_groups", "entry_tokens")

    def __init__(self, groups: Sequence[tuple[int, int]]) -> None:
        self._groups = tuple(groups)
        self.entry_tokens = lcm(*(span for span, _ in groups if span))
        """Tokens that become complete together; 1 for states alone."""

    def parts(self, tokens: int, first_token: int, stop_token: int, *, is_last: bool) -> list[PartBlocks]:
        """Return the blocks per group that tokens `first_token` to `stop_token - 1` need; states come with the last part."""
        found: list[PartBlocks] = []
        place = 0
        for span, window_tokens in self._groups:
            if not span:
                found.append(PartBlocks(0, int(is_last), place))
                place += 1
                continue
            earliest = max(0, tokens - window_tokens) if window_tokens else 0
            first = max(first_token, earliest) // span
            stop = max(first, -(-stop_token // span))
            found.append(PartBlocks(first, stop - first, place + first))
            place += -(-tokens // span)
        return found

    def peer_blocks(
        self, parts: Sequence[PartBlocks], ids: Mapping[int, int], offered: Sequence[BlockList]
    ) -> list[BlockList]:
        """Return the peer's blocks of a part; `ids` maps places to block ids, `offered` are the offer's lists without ids."""
        return [
            blocks._replace(
                ids=tuple(ids[part.place + number] for number in range(part.length)),
                first_token=part.first * span,
                null=None,
            )
            for (span, _), part, blocks in zip(self._groups, parts, offered, strict=True)
        ]

    def local_blocks(self, parts: Sequence[PartBlocks], whole: Sequence[BlockList]) -> list[BlockList]:
        """Return our blocks of a part, taken from those of the whole read.

        Example: blocks of 16, the read begins at token 32 (`first_token`): block 3 of the prompt is the read's second block.
        """
        found: list[BlockList] = []
        for (span, _), part, blocks in zip(self._groups, parts, whole, strict=True):
            ahead = blocks.first_token // span if span else 0
            first = max(part.first - ahead, 0)
            stop = max(part.first + part.length - ahead, first)
            found.append(blocks._replace(ids=blocks.ids[first:stop], first_token=(first + ahead) * span))
        return found


class Part(NamedTuple):
    """A part of a stream: its blocks by group, and the tokens of the prompt that are read once it has landed."""

    blocks: list[PartBlocks]
    tokens: int

    def is_listed(self, ids: Mapping[int, int]) -> bool:
        """Return whether the table has listed all its blocks; `ids` maps places to block ids."""
        return all(each.place + each.length - 1 in ids for each in self.blocks if each.length)
