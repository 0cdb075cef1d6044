"""Block lists, checked, and turned into (page, unit) pairs: the one place that decides what fills a local block.

A list says everything that pairing needs, so nothing is aligned by guess. With blocks of 4 tokens, a prefix hit of 8
tokens and a null block 0, the blocks still to be filled are `BlockList((5, 6), first_token=8, null=0)`: block 5 stands
for tokens 8..11 and block 6 for tokens 12..15.

Theory of operation. Both lists are laid on one line of *units* (see `shards`), the largest runs of tokens that no page
and no turn of context parallelism cuts on either side. Every local unit gets its global number, is kept if it is
ordered and the producer rank holds it, and is looked up in the producer's list by that number. Prefix hits, pages of 48
against 64 tokens, kernel blocks and dealt-out tokens are the same few integer divisions.

Worked example. Local blocks of 4 tokens, 8 tokens cached here: `BlockList((5, 6), first_token=8)`. Peer blocks of 8
tokens, one page each: `BlockList((3, 9), first_token=0)`. The unit is gcd(4, 8) = 4 tokens, so a local block is 1 unit
and a peer block is 2. `tokens` is 14.

    local block 5   place 8 // 4 = 2   global unit 2   tokens  8..11   2 - 0 = 2 -> peer block 2 // 2 = 1 (id 9), unit 0
    local block 6   place 3            global unit 3   tokens 12..15   3 - 0 = 3 -> peer block 3 // 2 = 1 (id 9), unit 1

Unit 3 begins at token 12, before 14, so it is ordered although it is half full. Blocks that begin at token 14 or later
hold nothing ordered and are left out, on both sides. With context parallelism of 2 and turns of 4 tokens, rank 1 packs the
global units 1, 3, 5, ... densely, and units that the producer rank does not hold are left out: another rank has them.

A local block that holds an ordered token is filled whole, because the host does not zero the blocks of a read, and attention
kernels multiply by zero what lies behind the prompt: a NaN of the block's last owner would spread. Units that an ordered
block of the peer holds come from there; all others repeat the last unit of the peer's last ordered block. With local blocks
of 24 tokens, peer blocks of 8, kernel pages of 4 on both sides, and `tokens` 10, local block 5 (pages 30..35) is filled from
the peer list (7, 8) (pages 14..17):

    page 30   tokens  0..3    page 14           page 33   tokens 12..15   page 17
    page 31   tokens  4..7    page 15           page 34   tokens 16..19   none: page 17 again
    page 32   tokens  8..11   page 16           page 35   tokens 20..23   none: page 17 again

A unit that is ordered and held by the producer, but missing from its list, is refused (`peer-blocks-too-few`), unless
its whole local block lies outside the attention window of the next token. With a window of 4 and 16 tokens, the next
token (number 16) sees tokens 13..15: units of local blocks that end at or before token 13 may be missing. A local block
of tokens 8..15 must be filled from token 8 on, although 8..12 are out of sight: a prefix cache keeps it as a whole, and a
shorter prefix may see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from kv_topology.arithmetic import count_up, flat_outer_sum
from kv_topology.checks import LIMITS
from kv_topology.errors import InvalidBlocks, shown

if TYPE_CHECKING:
    from kv_topology.arithmetic import Bools, Indices, Ints
    from kv_topology.errors import Fault
    from kv_topology.geometry import RankGeometry
    from kv_topology.model import Group
    from kv_topology.plan.slices import Pairing

__all__ = [
    "MAX_TOKENS",
    "AnyBlockList",
    "BlockList",
    "ListRules",
    "list_rules",
    "pair_blocks",
    "pair_short",
    "read_lists",
    "short_list",
]

MAX_TOKENS = 1 << 40
"""Tokens of a sequence beyond which a number is refused as absurd."""


class BlockList(NamedTuple):
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


AnyBlockList = tuple[Sequence[int], int, int | None]
"""A `BlockList`, or the caller's own named tuple of the same three values."""


class Blocks(NamedTuple):
    """A checked block list.

    Attributes:
        ids: int64 (n,).
        is_real: Whether each id is a block, bool (n,).
        first: Place of the first block in the sequence, counted in blocks.
    """

    ids: Ints
    is_real: Bools
    first: int


class ListRules(NamedTuple):
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

    def refuse(self, code: str, group: int, problem: str, **context: object) -> InvalidBlocks:
        """Return the refusal of the list of one group."""
        context = {"side": self.side, "group": group, **context}
        message = f"The {self.side} block list of group {group} {problem}"
        return InvalidBlocks(code, message, context, fault=self.side)


def list_rules(geometry: RankGeometry, side: Fault) -> ListRules:
    """Return the rules that a rank's block lists must keep; a group without layers here has no block count to keep to."""
    counts = [LIMITS["page_count"]] * len(geometry.groups)
    pages = {(member.group, region.page_count) for region in geometry.regions for member in region.members}
    for group, count in pages:
        counts[group] = min(counts[group], count // geometry.groups[group].pages_per_block)
    return ListRules(side, geometry.groups, tuple(counts), geometry.null_block)


def read_lists(lists: Sequence[AnyBlockList], rules: ListRules) -> list[Blocks]:
    """Return the block lists of all groups, checked.

    Raises:
        InvalidBlocks: `group-count`, `block-list-malformed`, `block-id-malformed`, `block-id-out-of-range`,
            `first-token-unaligned`, and for local lists `local-block-twice`.
    """
    if not isinstance(cast("object", lists), Sequence):
        problem = f"The {rules.side} block lists are {shown(lists)}; pass a list with a `BlockList` per group."
        raise InvalidBlocks("block-list-malformed", problem, {"side": rules.side}, fault=rules.side)
    if len(lists) != len(rules.groups):
        message = f"There are {len(lists)} {rules.side} block lists for {len(rules.groups)} groups."
        context = {"side": rules.side, "lists": len(lists), "groups": len(rules.groups)}
        raise InvalidBlocks("group-count", message, context, fault=rules.side)
    return [_read(blocks, number, rules) for number, blocks in enumerate(lists)]


def _read(blocks: object, number: int, rules: ListRules) -> Blocks:
    is_list = isinstance(blocks, tuple) and len(cast("tuple[object, ...]", blocks)) == 3
    if not is_list or type(cast("AnyBlockList", blocks)[2]) not in (int, NoneType):
        problem = "is not (ids, first_token, null), null an integer or None; pass a `BlockList`."
        raise rules.refuse("block-list-malformed", number, problem)
    ids, first_token, null = cast("AnyBlockList", blocks)
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, OverflowError):
        array = np.array(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise rules.refuse("block-id-malformed", number, "is not a flat list of integers.")
    found, count = array.astype(np.int64, copy=False), rules.counts[number]
    if len(found) and int(found.astype(np.uint64).max()) >= count:  # as unsigned numbers, negative ids are the largest
        worst = min(int(found.min()), 0) or int(found.max())
        problem = f"names block {worst}, which does not exist; there are {count} blocks."
        raise rules.refuse("block-id-out-of-range", number, problem, block=worst, blocks=count)
    null = rules.null if null is None else null
    is_real: Bools = np.not_equal(found, -1 if null is None else null)
    if rules.side == "local":
        ordered = np.sort(found[is_real])
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if len(twice):
            block = int(ordered[twice[0]])
            problem = f"names block {block} twice; two reads would write into it."
            raise rules.refuse("local-block-twice", number, problem, block=block)
    # A list's place in the sequence, counted in blocks: token 32 in blocks of 16 is block 2.
    span = 1 if rules.groups[number].is_state else rules.groups[number].span_tokens
    if type(first_token) is not int or not 0 <= first_token <= MAX_TOKENS or first_token % span:
        problem = f"begins at token {first_token!r:.40}; it must be a multiple of the {span} tokens of a block."
        raise rules.refuse("first-token-unaligned", number, problem, span_tokens=span)
    return Blocks(found, is_real, first_token // span)


class BlockPairs(NamedTuple):
    """Pairs of units to move, ascending at the peer; a unit's number is page * units of a page + unit in the page.

    Attributes:
        local: int32 (n,), unit numbers here.
        peer: int32 (n,), unit numbers at the peer.
    """

    local: Indices
    peer: Indices


def pair_blocks(pairing: Pairing, local: Blocks, peer: Blocks, tokens: int) -> BlockPairs:
    """Return which unit of which peer page goes to which unit of which local page, for one producer rank.

    Args:
        pairing: The two groups and their unit.
        local: Blocks to fill; an empty list means nothing, not everything.
        peer: The producer's blocks.
        tokens: End of what is ordered, in tokens of the sequence.

    Raises:
        InvalidBlocks: `peer-blocks-too-few`, `state-list-too-long`.
    """
    if pairing.local.is_state:
        return _pair_states(pairing, local, peer)
    # Only blocks that hold an ordered token: of 16 tokens, from place 2, 40 tokens: one block, of 32..47.
    count = max(0, -(-tokens // pairing.local.span_tokens) - local.first)
    local = Blocks(local.ids[:count], local.is_real[:count], local.first)
    count = max(0, -(-tokens // pairing.peer.span_tokens) - peer.first)
    peer = Blocks(peer.ids[:count], peer.is_real[:count], peer.first)
    ahead = local.first - peer.first
    if (
        pairing.is_page_to_page
        and 0 <= ahead <= len(peer.ids) - len(local.ids)
        and local.is_real.all()
        and peer.is_real.all()
    ):
        # A shift of the peer's list. Example: blocks of 4 tokens, local (5,) from place 2, peer (1, 2, 3) from place 0: block 5
        # is filled from (1, 2, 3)[2 - 0] = 3. Without this case indices of a long prompt take a fifth longer.
        return _ascending(local.ids, peer.ids[ahead : ahead + len(local.ids)])
    unit = pairing.unit_tokens
    per_local, per_peer = pairing.local.block_tokens // unit, pairing.peer.block_tokens // unit
    source = count_up(len(local.ids) * per_local)
    units = pairing.local.deal.spread(source + local.first * per_local, unit)
    wanted = pairing.peer.deal.owned(units, unit) & np.repeat(local.is_real, per_local)
    source, units = source[wanted], units[wanted]
    place = pairing.peer.deal.packed(units, unit) - peer.first * per_peer
    held = (place >= 0) & (place < len(peer.ids) * per_peer)
    held[held] = peer.is_real[place[held] // per_peer]
    if not held.all():
        _check_missing(pairing, units[~held & (units * unit < tokens)], tokens, peer)
        last = (int(np.flatnonzero(peer.is_real).max(initial=-1)) + 1) * per_peer - 1
        filled = held | (last >= 0)
        source, place = source[filled], np.where(held, place, last)[filled]
    return _ascending(
        local.ids[source // per_local] * per_local + source % per_local,
        peer.ids[place // per_peer] * per_peer + place % per_peer,
    )


_SHORT = 64
"""Blocks up to which a list is paired without NumPy: its calls take 0.2 ms in code that runs ten times a second."""


def short_list(lists: Sequence[AnyBlockList], rules: ListRules) -> tuple[Sequence[int], int] | None:
    """Return the ids and the first place of the list of a single group, if it is short and plain; else None, for `read_lists`."""
    if type(lists) not in (tuple, list) or not len(lists) == len(rules.groups) == 1 or rules.groups[0].is_state:
        return None
    if not isinstance(cast("object", lists[0]), tuple) or len(lists[0]) != 3:
        return None
    ids, first_token, null = lists[0]
    if type(ids) not in (tuple, list) or not 0 < len(ids) <= _SHORT or {type(first_token), *map(type, ids)} != {int}:
        return None
    null, span = rules.null if null is None else null, rules.groups[0].span_tokens
    if type(null) not in (int, NoneType):
        return None
    is_plain = min(ids) >= 0 and max(ids) < rules.counts[0] and len({*ids}) == len(ids) and null not in ids
    is_known = 0 <= first_token <= MAX_TOKENS and not first_token % span
    return (ids, first_token // span) if is_plain and is_known else None


def pair_short(
    pairings: Sequence[Pairing], local: tuple[Sequence[int], int], peer: tuple[Sequence[int], int] | None, tokens: int
) -> list[BlockPairs]:
    """Return the pairs of `pair_blocks` for two short lists that go page to page; empty for all others."""
    if peer is None or len(pairings) != 1 or not pairings[0].is_page_to_page:
        return []
    (mine, first), (theirs, peer_first), (pairing,) = local, peer, pairings
    mine = mine[: max(0, -(-tokens // pairing.local.span_tokens) - first)]
    theirs = theirs[: max(0, -(-tokens // pairing.peer.span_tokens) - peer_first)]
    ahead = first - peer_first
    if not 0 <= ahead <= len(theirs) - len(mine):
        return []
    pairs = sorted(zip(theirs[ahead : ahead + len(mine)], mine, strict=True))
    return [BlockPairs(*(np.array([pair[side] for pair in pairs], dtype=np.int32) for side in (1, 0)))]


def _check_missing(pairing: Pairing, units: Ints, tokens: int, peer: Blocks) -> None:
    """Raise unless the local blocks of all these ordered units of the sequence lie outside the window of the next token.

    Example: window 6, 16 tokens, local blocks of 8, units of 4: the next token sees tokens 11..15. Unit 0 (tokens 0..3) may be
    missing, since its block ends at token 8; unit 2 (tokens 8..11) may not, and neither may unit 3.
    """
    window, unit, span = pairing.local.window_tokens, pairing.unit_tokens, pairing.local.span_tokens
    if window:
        units = units[(units * unit // span + 1) * span > tokens - window + 1]
    if len(units):
        first = int(units.min()) * unit
        raise InvalidBlocks(
            "peer-blocks-too-few",
            f"Tokens from {first} on are ordered up to {tokens}, but the peer's list of group {pairing.peer_group} has "
            f"no block for them: it has {len(peer.ids)} blocks from token {peer.first * pairing.peer.span_tokens} on.",
            {"token": first, "tokens": tokens, "group": pairing.peer_group, "blocks": len(peer.ids)},
            fault="peer",
        )


def _ascending(local: Ints, peer: Ints) -> BlockPairs:
    """Sort pairs of unit numbers by the peer's, so that NIXL can merge neighbours where both sides ascend together.

    Both numbers are below 2**31, as descriptor indices are, so a pair is sorted as one number: peer * 2**32 + local.
    """
    keys = np.sort(peer << 32 | local)
    return BlockPairs(keys.astype(np.int32), (keys >> 32).astype(np.int32))  # a cast keeps the lower half


def _pair_states(pairing: Pairing, local: Blocks, peer: Blocks) -> BlockPairs:
    """Return the pages of the one state to fill, paired with the pages of the peer's last state.

    Example: two pages per block, local (0, 5) with null 0, peer (7, 8): pages 10 and 11 are filled from 16 and 17.
    """
    real = local.ids[local.is_real]
    if len(real) > 1 or (len(real) and not local.is_real[-1]):
        raise InvalidBlocks(
            "state-list-too-long",
            f"The local list of state group {pairing.local_group} names {len(real)} states in {len(local.ids)} places; "
            "it must name one, in the last place: the state after the ordered tokens.",
            {"local": len(real), "group": pairing.local_group},
        )
    if len(real) and not peer.is_real[-1:].any():
        raise InvalidBlocks(
            "peer-blocks-too-few",
            f"Local state {int(real[0])} of group {pairing.local_group} must be filled, but the peer's list does not "
            "end with a state.",
            {"block": int(real[0]), "group": pairing.peer_group, "blocks": len(peer.ids)},
            fault="peer",
        )
    # Block b covers pages b*k ... b*k+k-1; both sides have as many pages per state.
    count = pairing.local.pages_per_block
    sides = (real, peer.ids[-1:][: len(real)])
    return _ascending(*(flat_outer_sum(ids * count, count_up(count)) for ids in sides))
