"""Block lists into (page, unit) pairs: prefix hits, windows, kernel blocks, block-size ratios, context parallelism.

Theory of operation. A block list is a run of places in the sequence; place i of a list that begins at `first` stands
for the tokens from (first + i) * span. Both lists are laid on one line of *units* (see `_shards`): every local unit in
the list is turned into its global number, kept if the producer rank holds it, and found again in the producer's list.
Thus a prefix hit, pages of 48 against 64 tokens, kernel blocks and dealt-out tokens are the same few integer divisions.

Where a list begins is not in the list. Equal spans need no more: lists end at the same token, and a shorter local list
is the uncached tail. With different spans the counts often decide it; where they do not, the caller must say (`tokens`,
or both firsts), and a guess is refused, because a wrong one would put bytes at the wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import count_up, flat_outer_sum
from kv_topology._errors import InvalidBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Bools, Indices, Ints
    from kv_topology._boxes import Pairing
    from kv_topology._model import Group

__all__ = ["BlockPairs", "align", "block_array", "clip_window", "kernel_pages", "pair_blocks", "window_blocks"]


_SLOTS_PER_PLACE = 64
"""How sparse ids may be before sorting is cheaper than a table of all slots."""


def window_blocks(window_tokens: int, block_tokens: int) -> int:
    """Return how many trailing blocks a sliding window needs: ceil(window / block) + 1, or 0 without a window."""
    return -(-window_tokens // block_tokens) + 1 if window_tokens else 0


def clip_window(ids: Ints, group: Group) -> Ints:
    """Return the trailing block ids that the group's attention window can reach; all of them without a window."""
    keep = window_blocks(group.window_tokens, group.span_tokens)
    return ids[max(0, len(ids) - keep) :] if keep else ids


def kernel_pages(ids: Ints, pages_per_block: int) -> Ints:
    """Return the pages of scheduler blocks: block b covers pages b*k ... b*k+k-1. int64 (n * k,)."""
    if pages_per_block == 1:
        return ids
    return flat_outer_sum(ids * pages_per_block, count_up(pages_per_block))


def block_array(ids: Sequence[int], block_count: int, side: str, group: int, null_block: int | None) -> Ints:
    """Return block ids as int64 (n,), range-checked.

    Raises:
        InvalidBlocks: `block-id-malformed`, or `block-id-out-of-range` with the id and the number of blocks.
    """
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.array(None)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidBlocks(
            f"The {side} block list of group {group} is not a flat list of integers.",
            code="block-id-malformed",
            context={"side": side, "group": group},
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= block_count:
        worst = low if low < 0 else high
        raise InvalidBlocks(
            f"Block {worst} of the {side} list of group {group} does not exist; there are {block_count} blocks.",
            code="block-id-out-of-range",
            context={"side": side, "group": group, "block": worst, "blocks": block_count},
        )
    array = array.astype(np.int64, copy=False)
    if side == "local":
        _check_unique(array, group, null_block)
    return array


def _table_slots(places: Ints) -> int | None:
    """Return the size of a table with a slot for every place, None if it would be mostly empty."""
    slots = int(places.max()) + 1
    return slots if slots <= _SLOTS_PER_PLACE * len(places) + 4096 else None


def place_order(places: Ints) -> Indices | None:
    """Return the order that sorts places, by writing each into its slot; None if some repeat or lie too far apart."""
    slots = _table_slots(places)
    if slots is None:
        return None
    owner = np.full(slots, -1, dtype=np.int32)
    owner[places] = np.arange(len(places), dtype=np.int32)
    order = owner[owner >= 0]
    return order if len(order) == len(places) else None


def _check_unique(array: Ints, group: int, null_block: int | None) -> None:
    slots = _table_slots(array)
    if slots is not None:
        seen = np.zeros(slots, dtype=np.bool_)
        seen[array] = True
        if np.count_nonzero(seen) == len(array):
            return
    ordered = np.sort(array)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if null_block is not None:
        twice = twice[twice != null_block]
    if len(twice):
        raise InvalidBlocks(
            f"Local block {int(twice[0])} is twice in the list of group {group}; two reads would write into it.",
            code="local-block-twice",
            context={"group": group, "block": int(twice[0])},
        )


def align(pairing: Pairing, local_count: int, peer_count: int, tokens: int | None) -> tuple[int, int]:
    """Return the places in the sequence at which a local and a peer list begin.

    Args:
        pairing: The groups.
        local_count: Blocks in the local list, at least 1.
        peer_count: Blocks in the peer's list.
        tokens: Tokens of the whole sequence, if known; else the counts must decide.

    Raises:
        InvalidBlocks: `local-list-too-long` or `alignment-unknown`.
    """
    mine, theirs = pairing.local.span_tokens, pairing.peer.span_tokens
    if tokens is not None:
        return max(0, -(-tokens // mine) - local_count), max(0, -(-tokens // theirs) - peer_count)
    least = -(-((peer_count - 1) * theirs + 1) // mine)
    most = -(-(peer_count * theirs) // mine)
    if local_count > most + 1:
        raise InvalidBlocks(
            f"The local list has {local_count} blocks of {mine} tokens; the peer's {peer_count} of {theirs} "
            f"cover at most {most}.",
            code="local-list-too-long",
            context={"local": local_count, "peer": peer_count, "most": most},
        )
    # Lists of a window are tails, so with different spans their counts tell nothing.
    if not pairing.local.window_tokens or mine == theirs:
        if local_count >= most:
            # Every block that the peer can cover is here: nothing was cached. One more is a token computed here.
            return 0, 0
        if least == most:
            return most - local_count, 0
    raise InvalidBlocks(
        f"{local_count} local blocks of {mine} tokens against {peer_count} of {theirs}: the lists could begin at "
        "different tokens. Pass `tokens`, or `local_first` and `peer_first`.",
        code="alignment-unknown",
        context={"local": local_count, "peer": peer_count, "local_span": mine, "peer_span": theirs},
    )


@final
@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Pairs of units to move, sorted by the peer's place; all int64 (n,).

    Attributes:
        local_page: Page number here.
        local_unit: Unit in that page.
        peer_page: Page number at the peer.
        peer_unit: Unit in that page.
    """

    local_page: Ints
    local_unit: Ints
    peer_page: Ints
    peer_unit: Ints

    def __len__(self) -> int:
        return len(self.local_page)


def _sorted_pairs(local_page: Ints, local_unit: Ints, peer_page: Ints, peer_unit: Ints, place: Ints) -> BlockPairs:
    """Sort by the peer's place, so that NIXL can merge neighbours where both sides ascend together."""
    if bool((place[1:] < place[:-1]).any()):
        known = place_order(place)
        order = known if known is not None else np.argsort(place, kind="stable")
        sorted_units = (local_unit[order], peer_unit[order]) if local_unit is not peer_unit else (local_unit, peer_unit)
        return BlockPairs(local_page[order], sorted_units[0], peer_page[order], sorted_units[1])
    return BlockPairs(local_page, local_unit, peer_page, peer_unit)


def pair_blocks(
    pairing: Pairing,
    local_ids: Ints,
    peer_ids: Ints,
    firsts: tuple[int, int],
    null_blocks: tuple[int | None, int | None] = (None, None),
) -> BlockPairs:
    """Return which unit of which peer page goes to which unit of which local page, for one producer rank.

    Args:
        pairing: The groups and their unit.
        local_ids: int64 (n,), blocks to fill; an empty list means nothing, not everything.
        peer_ids: int64 (m,), the producer's blocks.
        firsts: Places at which the two lists begin.
        null_blocks: Ids that stand for "no block" here and at the peer.

    Raises:
        InvalidBlocks: `peer-blocks-too-few` when local tokens lie before or too far beyond the peer's list.
    """
    _check_cover(pairing, firsts, len(local_ids), len(peer_ids))
    if _is_one_to_one(pairing, null_blocks):
        start = firsts[0] - firsts[1]
        near, far = local_ids[max(0, -start) :], peer_ids[max(0, start) :]
        count = min(len(near), len(far))
        zeros = np.zeros(count, dtype=np.int64)
        return _sorted_pairs(near[:count], zeros, far[:count], zeros, far[:count])
    unit = pairing.unit_tokens
    per_local, per_peer = pairing.local.block_tokens // unit, pairing.peer.block_tokens // unit
    packed = np.arange(firsts[0] * per_local, (firsts[0] + len(local_ids)) * per_local, dtype=np.int64)
    deal = pairing.local.deal
    units = packed
    if deal.size > 1:
        turn = deal.interleave_tokens // unit
        units = (packed // turn) * (turn * deal.size) + deal.rank * turn + packed % turn
    theirs = pairing.peer.deal
    place = theirs.packed(units, unit) - firsts[1] * per_peer
    keep = theirs.owned(units, unit) & (place >= 0) & (place < len(peer_ids) * per_peer)
    source = np.flatnonzero(keep)
    place = place[source]
    local_block, peer_block = local_ids[source // per_local], peer_ids[place // per_peer]
    if null_blocks[0] is not None or null_blocks[1] is not None:
        real = _real(local_block, peer_block, null_blocks)
        source, place, local_block, peer_block = source[real], place[real], local_block[real], peer_block[real]
    inside, peer_inside = source % per_local, place % per_peer
    peer_page = peer_block * pairing.peer.pages_per_block + peer_inside // pairing.peer_units
    peer_unit = peer_inside % pairing.peer_units
    return _sorted_pairs(
        local_block * pairing.local.pages_per_block + inside // pairing.local_units,
        inside % pairing.local_units,
        peer_page,
        peer_unit,
        peer_page * pairing.peer_units + peer_unit,
    )


def _is_one_to_one(pairing: Pairing, null_blocks: tuple[int | None, int | None]) -> bool:
    """Return whether block ids are page ids on both sides and pages hold the same tokens: no arithmetic is needed."""
    groups = (pairing.local, pairing.peer)
    return (
        null_blocks == (None, None)
        and pairing.local_units == pairing.peer_units == 1
        and all(group.pages_per_block == group.deal.size == 1 for group in groups)
    )


def _real(local_block: Ints, peer_block: Ints, null_blocks: tuple[int | None, int | None]) -> Bools:
    """Return which pairs have a real local block; a real block fed from a null one is an error."""
    real = np.ones(len(local_block), dtype=np.bool_)
    if null_blocks[0] is not None:
        real = local_block != null_blocks[0]
    if null_blocks[1] is not None:
        missing = real & (peer_block == null_blocks[1])
        if missing.any():
            block = int(local_block[missing][0])
            raise InvalidBlocks(
                f"Local block {block} needs tokens for which the peer has only its null block {null_blocks[1]}.",
                code="peer-blocks-too-few",
                context={"block": block, "null_block": null_blocks[1]},
            )
    return real


def _check_cover(pairing: Pairing, firsts: tuple[int, int], local_count: int, peer_count: int) -> None:
    mine, theirs = pairing.local.span_tokens, pairing.peer.span_tokens
    start, peer_start = firsts[0] * mine, firsts[1] * theirs
    stop, peer_stop = start + local_count * mine, peer_start + peer_count * theirs
    window = pairing.peer.window_tokens
    # What lies before the window is not needed, wherever the last token is in the last block.
    is_head_spare = bool(window) and peer_stop - peer_start >= window + theirs - 1
    # A local list may end one block later: the last token is computed here when the producer stopped before it.
    if (start < peer_start and not is_head_spare) or stop - peer_stop > mine:
        raise InvalidBlocks(
            f"Local blocks stand for tokens [{start}, {stop}), the peer's for [{peer_start}, {peer_stop}).",
            code="peer-blocks-too-few",
            context={"local": (start, stop), "peer": (peer_start, peer_stop)},
        )


def pair_states(pairing: Pairing, local_ids: Ints, peer_ids: Ints) -> BlockPairs:
    """Return pairs of whole states, last to last; states are never cut and the lists differ by what was cached.

    Raises:
        InvalidBlocks: `state-list-too-long` when more than one local state has no counterpart.
    """
    spare = len(local_ids) - len(peer_ids)
    if spare > 1:
        raise InvalidBlocks(
            f"{len(local_ids)} local states against {len(peer_ids)} of the peer; at most one may be computed here.",
            code="state-list-too-long",
            context={"local": len(local_ids), "peer": len(peer_ids), "group": pairing.local_group},
        )
    mine = local_ids[: len(peer_ids)]
    theirs = peer_ids[len(peer_ids) - len(mine) :]
    zeros = np.zeros(len(mine), dtype=np.int64)
    pages = theirs * pairing.peer.pages_per_block
    return _sorted_pairs(mine * pairing.local.pages_per_block, zeros, pages, zeros, pages)
