"""Block lists: which blocks of one KV-cache group a request has, and where in the sequence they begin.

A list says everything that pairing needs, so nothing is aligned by guess. With blocks of 4 tokens, a prefix hit of 8
tokens and a null block 0, the blocks still to be filled are `BlockList((5, 6), first_token=8, null=0)`: block 5 stands
for tokens 8..11 and block 6 for tokens 12..15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np

from kv_topology._errors import InvalidBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Ints
    from kv_topology._errors import Fault
    from kv_topology._model import Group

__all__ = ["BlockList", "BlockListLike", "Blocks", "ListRules", "check_tokens", "read_lists"]

MAX_TOKENS = 1 << 40
"""Tokens of a sequence beyond which a number is refused as absurd."""

_DENSE = 64
"""Blocks of a rank per block of a list up to which ids are marked in a table of all blocks."""


@final
@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks of one request in one KV-cache group.

    Attributes:
        ids: Scheduler block ids in token order.
        first_token: Global number of the first token that `ids[0]` stands for; a multiple of the tokens that one block
            covers over all context-parallel ranks. Without meaning for states.
        null: The id that means "no block here"; None to use the null block that the rank's geometry names, if any.
    """

    ids: Sequence[int]
    first_token: int = 0
    null: int | None = None


class BlockListLike(Protocol):
    """Anything with the three members of a `BlockList`."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def first_token(self) -> int: ...
    @property
    def null(self) -> int | None: ...


class Blocks(NamedTuple):
    """A checked block list.

    Attributes:
        ids: int64 (n,).
        first: Place of the first block in the sequence, counted in blocks.
        null: The id that means "no block here", -1 if there is none.
        has_null: Whether that id occurs.
        limit: Blocks that the rank has; every id is below.
    """

    ids: Ints
    first: int
    null: int
    has_null: bool
    limit: int


@final
@dataclass(frozen=True, slots=True)
class ListRules:
    """Rules that the block lists of a rank are checked against.

    Attributes:
        side: "local" or "peer"; decides who is at fault.
        groups: The rank's groups.
        counts: Number of scheduler blocks per group.
        null: The rank's own null block, used by lists that name none.
    """

    side: Fault
    groups: tuple[Group, ...]
    counts: tuple[int, ...]
    null: int | None

    def refuse(self, code: str, message: str, **context: object) -> InvalidBlocks:
        """Return the refusal of one of these lists."""
        return InvalidBlocks(message, code=code, fault=self.side, context={"side": self.side, **context})


def check_tokens(tokens: object) -> int:
    """Return the number of ordered tokens; raises `InvalidBlocks` (`tokens-malformed`) unless it is a sane count."""
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
        shown = repr(tokens)[:60]
        raise InvalidBlocks(
            f"`tokens` must be an integer of 0..{MAX_TOKENS}, not {shown}.", code="tokens-malformed", context={}
        )
    return tokens


def read_lists(lists: Sequence[BlockListLike], rules: ListRules) -> list[Blocks]:
    """Return the block lists of all groups, checked.

    Raises:
        InvalidBlocks: `group-count`, `block-list-malformed`, `block-id-malformed`, `block-id-out-of-range`,
            `first-token-unaligned`, and for local lists `local-block-twice`.
    """
    if len(lists) != len(rules.groups):
        raise rules.refuse(
            "group-count",
            f"There are {len(lists)} {rules.side} block lists for {len(rules.groups)} groups.",
            lists=len(lists),
            groups=len(rules.groups),
        )
    return [_read(blocks, number, rules) for number, blocks in enumerate(lists)]


def _read(blocks: BlockListLike, number: int, rules: ListRules) -> Blocks:
    try:
        ids, first_token, null = blocks.ids, blocks.first_token, blocks.null
    except AttributeError:
        raise rules.refuse(
            "block-list-malformed",
            f"The {rules.side} block list of group {number} has no ids, first_token and null; pass a `BlockList`.",
            group=number,
        ) from None
    array = _array(ids, number, rules)
    first = _first_block(first_token, number, rules)
    null = rules.null if null is None else null
    null = null if type(null) is int else -1
    has_null = null >= 0 and bool((array == null).any())
    if rules.side == "local":
        _check_unique(array[array != null] if has_null else array, number, rules)
    return Blocks(array, first, null, has_null, rules.counts[number])


def _first_block(first_token: object, number: int, rules: ListRules) -> int:
    """Return the place in the sequence, counted in blocks, at which a list begins: token 32 in blocks of 16 is block 2."""
    group = rules.groups[number]
    span = 1 if group.is_state else group.span_tokens
    if type(first_token) is not int or not 0 <= first_token <= MAX_TOKENS or first_token % span:
        raise rules.refuse(
            "first-token-unaligned",
            f"The {rules.side} block list of group {number} begins at token {first_token!r:.40}; it must be a multiple "
            f"of the {span} tokens of a block.",
            group=number,
            span_tokens=span,
        )
    return first_token // span


def _array(ids: Sequence[int], number: int, rules: ListRules) -> Ints:
    """Return block ids as int64 (n,), range-checked."""
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.array(None)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise rules.refuse(
            "block-id-malformed",
            f"The {rules.side} block list of group {number} is not a flat list of integers.",
            group=number,
        )
    found = array.astype(np.int64, copy=False)
    count = rules.counts[number]
    if int(found.astype(np.uint64).max()) >= count:  # as unsigned numbers, negative ids are the largest
        worst = min(int(found.min()), 0) or int(found.max())
        raise rules.refuse(
            "block-id-out-of-range",
            f"Block {worst} of the {rules.side} list of group {number} does not exist; there are {count} blocks.",
            group=number,
            block=worst,
            blocks=count,
        )
    return found


def _check_unique(array: Ints, number: int, rules: ListRules) -> None:
    slots = rules.counts[number]
    if slots <= _DENSE * len(array):  # marking ids is four times as fast as sorting them
        seen = np.zeros(slots, dtype=np.bool_)
        seen[array] = True
        if np.count_nonzero(seen) == len(array):
            return
    ordered = np.sort(array)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        block = int(ordered[twice[0]])
        raise rules.refuse(
            "local-block-twice",
            f"Local block {block} is twice in the list of group {number}; two reads would write into it.",
            group=number,
            block=block,
        )
