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

__all__ = ["PartBlocks", "StreamGroup", "StreamShape"]


class StreamGroup(NamedTuple):
    """A KV-cache group: tokens per block, 0 for states, and its window, 0 for none."""

    span_tokens: int
    window_tokens: int = 0


class PartBlocks(NamedTuple):
    """Blocks of one group that a part moves: `length` blocks from the prompt's block `first`, listed from `place` on."""

    first: int
    length: int
    place: int


@final
class StreamShape:
    """Groups of an engine and its peer, whose blocks stand for equal numbers of tokens."""

    __slots__ = ("_groups", "entry_tokens")

    def __init__(self, groups: Sequence[StreamGroup]) -> None:
        self._groups = tuple(groups)
        self.entry_tokens = lcm(*(group.span_tokens for group in groups if group.span_tokens))
        """Tokens that become complete together; 1 for states alone."""

    def parts(self, tokens: int, first_token: int, stop_token: int, *, is_last: bool) -> list[PartBlocks]:
        """Return the blocks per group that tokens `first_token` to `stop_token - 1` need; states come with the last part."""
        found: list[PartBlocks] = []
        place = 0
        for group in self._groups:
            span = group.span_tokens
            if not span:
                found.append(PartBlocks(0, int(is_last), place))
                place += 1
                continue
            earliest = max(0, tokens - group.window_tokens) if group.window_tokens else 0
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
                first_token=part.first * group.span_tokens,
                null=None,
            )
            for group, part, blocks in zip(self._groups, parts, offered, strict=True)
        ]

    def local_blocks(self, parts: Sequence[PartBlocks], whole: Sequence[BlockList]) -> list[BlockList]:
        """Return our blocks of a part, taken from those of the whole read.

        Example: blocks of 16, the read begins at token 32 (`first_token`): block 3 of the prompt is the read's second block.
        """
        found: list[BlockList] = []
        for group, part, blocks in zip(self._groups, parts, whole, strict=True):
            ahead = blocks.first_token // group.span_tokens if group.span_tokens else 0
            first = max(part.first - ahead, 0)
            stop = max(part.first + part.length - ahead, first)
            found.append(blocks._replace(ids=blocks.ids[first:stop], first_token=(first + ahead) * group.span_tokens))
        return found
