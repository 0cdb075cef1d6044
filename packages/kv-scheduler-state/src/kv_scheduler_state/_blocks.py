"""Block lists: which of a request's blocks cross between two engines, and which tokens each of them stands for.

A block of a group covers `span_tokens` tokens of the prompt (`block_tokens * dcp`). A list names its blocks in token order and
the token with which it begins, so that no side has to guess where the other side's list begins.

Example: 4 tokens per block, a prompt of 18 tokens, a window of 6 tokens.

- A producer has the blocks 10 11 12 13 14 and one more, 15, that was allocated ahead. 18 tokens need ceil(18 / 4) = 5 blocks, so
  15 is cut off. A window of 6 tokens touches at most ceil(6 / 4) + 1 = 3 blocks: the ticket lists (12, 13, 14), which begin
  with token (5 - 3) * 4 = 8. A group that keeps the whole prompt lists all five blocks from token 0.
- A consumer has a prefix hit of 8 tokens and the blocks 20 21 22 23 24, of which 20 and 21 are the hit. It fills (22, 23, 24),
  which begin with token 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar, cast, final

from kv_scheduler_state._errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kv_scheduler_state._config import GroupConfig

__all__ = ["BlockIds", "BlockList", "BlockRules", "new_tuple", "running_state"]

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids, one tuple per KV-cache group, in token order."""


_Row = tuple[str, int, int, int]
"""Kind, span, window blocks and scratch blocks of a group."""

_Record = TypeVar("_Record", bound="tuple[object, ...]")


class _NewTuple(Protocol):
    def __call__(self, kind: type[_Record], fields: Iterable[object], /) -> _Record: ...


new_tuple: Final = cast("_NewTuple", tuple.__new__)  # pyright: ignore[reportUnknownMemberType] -- of any element type
"""Make a named tuple in half the time of its own constructor, which is a Python function.

It fills in no defaults and counts no fields, so it is for hot paths only, with every field in its place.
"""


@final
class BlockList(NamedTuple):
    """Blocks of one KV-cache group, in token order.

    Attributes:
        ids: Block ids.
        first_token: Index in the prompt of the first token that `ids[0]` stands for; 0 for a state, where it means nothing.
        null: The id that stands for "no block here"; None if every id is a block.
    """

    ids: tuple[int, ...]
    first_token: int = 0
    null: int | None = None


@final
class BlockRules:
    """Cuts a request's blocks to those that cross between engines, group by group.

    Args:
        groups: The model's groups.
        null: The engine's id for "no block here", or None.
    """

    __slots__ = ("_count", "_groups", "_null", "_only_span", "_rows", "nothing")

    def __init__(self, groups: tuple[GroupConfig, ...], null: int | None = None) -> None:
        self._groups = groups
        self._count = len(groups)
        self._null = null
        self._rows: tuple[_Row, ...] = tuple(
            [(group.kind, group.span_tokens, group.window_blocks, group.scratch_blocks) for group in groups]
        )
        # Span of a model with one group that keeps the whole prompt, which is nearly every model; else 0.
        self._only_span = groups[0].span_tokens if len(groups) == 1 and groups[0].kind == "full" else 0
        self.nothing = tuple([BlockList(()) for _ in groups])

    def require_groups(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Refuse block lists of another model.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        if len(block_ids) != self._count:
            raise InvalidEvent(
                f"block ids come in {len(block_ids)} groups, the model has {self._count}",
                groups=len(block_ids),
                expected=self._count,
            )

    def offered(self, block_ids: Sequence[Sequence[int]], tokens: int) -> tuple[list[list[int]], list[int]]:
        """Return the blocks that a producer offers of its first `tokens` tokens, and the first token of each list."""
        if self._only_span:
            kept, count = list(block_ids[0]), -(-tokens // self._only_span)
            if len(kept) > count:
                del kept[count:]
            return [kept], [0]
        lists: list[list[int]] = []
        first_tokens: list[int] = []
        for (kind, span, window_blocks, scratch_blocks), ids in zip(self._rows, block_ids, strict=True):
            if kind == "state":
                lists.append(list(running_state(scratch_blocks, ids)))
                first_tokens.append(0)
                continue
            kept = list(ids)
            del kept[-(-tokens // span) :]
            first = max(0, len(kept) - window_blocks) if window_blocks else 0
            lists.append(kept[first:] if first else kept)
            first_tokens.append(first * span)
        return lists, first_tokens

    def wanted(
        self, block_ids: Sequence[Sequence[int]], new_block_ids: Sequence[Sequence[int]], start: int, tokens: int
    ) -> tuple[BlockList, ...]:
        """Return the blocks that a consumer fills with the tokens from `start` up to `tokens`.

        Args:
            block_ids: All blocks of the request.
            new_block_ids: Those that no prefix hit covers; nothing else is ever filled.
            start: Tokens that a prefix hit covers.
            tokens: Tokens that the blocks hold after the read.

        Raises:
            InvalidEvent: `invalid-event`, for another number of groups, a prefix hit that ends inside a block, or fewer blocks
                than the tokens need.
        """
        if len(block_ids) != self._count or len(new_block_ids) != self._count:
            self.require_groups(block_ids)
            self.require_groups(new_block_ids)
        if not any(new_block_ids):
            return self.nothing
        if self._only_span:
            return (self._tail(self._only_span, 0, block_ids[0], new_block_ids[0], start, tokens),)
        groups = zip(self._rows, block_ids, new_block_ids, strict=True)
        return tuple([self._filled(row, ids, new, start, tokens) for row, ids, new in groups])

    def _filled(self, row: _Row, ids: Sequence[int], new: Sequence[int], start: int, tokens: int) -> BlockList:
        """Return the blocks of one group that a consumer fills, see `wanted`."""
        kind, span, window_blocks, scratch_blocks = row
        if kind == "state":
            return BlockList(running_state(scratch_blocks, new), 0, self._null)
        return self._tail(span, window_blocks, ids, new, start, tokens)

    def _tail(
        self, span: int, window_blocks: int, ids: Sequence[int], new: Sequence[int], start: int, tokens: int
    ) -> BlockList:
        """Return the blocks that a consumer fills of a group that keeps its prompt, or the end of it if there is a window."""
        first, end = start // span, -(-tokens // span)
        if start % span or len(ids) < end:
            raise InvalidEvent(
                f"a read of tokens {start} to {tokens} needs whole blocks of {span} tokens from the first on, and {end} of "
                f"them; the request has {len(ids)}",
                start=start,
                tokens=tokens,
                span_tokens=span,
                blocks=len(ids),
            )
        if window_blocks:
            first = max(first, end - window_blocks)
        kept = tuple(ids if not first and end == len(ids) else ids[first:end])
        # The new blocks are some of the request's, in its order. If they are as many as those from `first` on, none is a hit.
        if len(new) != len(ids) - first or not new or new[0] != ids[first]:
            kept = self._without_hits(kept, new)
        return new_tuple(BlockList, (kept, first * span, self._null))

    def _without_hits(self, ids: tuple[int, ...], new_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids with null in place of every block that a prefix hit covers."""
        fillable, null = frozenset(new_ids), self._null
        if null is not None:
            return tuple([block if block in fillable else null for block in ids])
        if not fillable.issuperset(ids):
            raise InvalidEvent(
                f"blocks of a prefix hit lie among those to fill, and this engine has no null block: {ids}"
            )
        return ids

    def chunk(self, block_ids: Sequence[Sequence[int]]) -> BlockIds:
        """Return the blocks of one chunk of a prefill that have to be saved: all blocks of a state, since none is final yet.

        Raises:
            InvalidEvent: `invalid-event`, if the number of groups is not the model's.
        """
        self.require_groups(block_ids)
        return tuple([tuple(ids[-group.window_blocks :]) for group, ids in zip(self._groups, block_ids, strict=True)])


def running_state(scratch_blocks: int, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the block with the running state: the last one in front of the scratch blocks.

    Example: `scratch_blocks` 2 and the blocks 1 2 3 4: block 2. Scratch blocks may not be allocated yet, so the running state is
    at least the first block: of 1 2 it is block 1.
    """
    if not ids:
        return ()
    last = len(ids) - 1 - min(scratch_blocks, len(ids) - 1)
    return (ids[last],)
