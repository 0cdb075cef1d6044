"""Block lists into pairs: prefix hits, ratios, windows, null blocks, and every refusal."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import DENSE, indices, lists, plan_of, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_topology import BlockList, Group, InvalidBlocks, TokenDeal, plan_transfer
from kv_topology.plan.blocks import ListRules, pair_blocks, pair_short, read_lists, short_list
from kv_topology.plan.slices import pair_groups
from kv_topology.tools import EngineSpec, ModelSpec, build_engine


def pairing(block, peer_block, pages=1, peer_pages=1, window=0, peer_deal=None):
    kind: Any = "sliding-window" if window else "attention"
    theirs = Group(kind, peer_block, peer_pages, window, peer_deal or TokenDeal())
    return pair_groups(0, Group(kind, block, pages, window), 0, theirs)


def pairs(pair, local, peer, firsts=(0, 0), nulls=(None, None), tokens=10_000):
    """Return the pairs (page, unit, peer page, peer unit) of two lists that begin at the given places, counted in blocks."""
    mine, theirs = pair.local, pair.peer
    sides = (
        ([BlockList(local, firsts[0] * mine.span_tokens, nulls[0])], ListRules("local", (mine,), (1 << 20,), None)),
        ([BlockList(peer, firsts[1] * theirs.span_tokens, nulls[1])], ListRules("peer", (theirs,), (1 << 20,), None)),
    )
    (near,), (far,) = (read_lists(*side) for side in sides)
    found = pair_blocks(pair, near, far, tokens)
    short = short_list(*sides[0])
    for same in [] if short is None else pair_short([pair], short, short_list(*sides[1]), tokens):
        assert [*map(np.ndarray.tolist, same)] == [*map(np.ndarray.tolist, found)], "without NumPy, too"
    columns = (*divmod(found.local, pair.local_units), *divmod(found.peer, pair.peer_units))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def held_places(group, ids, first):
    """Return {global token: (page, token in the page)} of a block list, token by token."""
    found = {}
    for place, block in enumerate(ids, first):
        for token in range(group.block_tokens):
            turn, rest = divmod(place * group.block_tokens + token, group.deal.interleave_tokens)
            where = (turn * group.deal.size + group.deal.rank) * group.deal.interleave_tokens + rest
            page, inside = divmod(token, group.page_tokens)
            found[where] = (block * group.pages_per_block + page, inside)
    return found


sides = st.builds(
    lambda turn, turns, pages, size, rank: Group(
        "attention", turn * turns * pages, pages, deal=TokenDeal(size, rank % size, turn if size > 1 else 1)
    ),
    turn=st.integers(1, 4),
    turns=st.integers(1, 3),
    pages=st.integers(1, 3),
    size=st.sampled_from([1, 1, 2, 3]),
    rank=st.integers(0, 2),
)


@settings(deadline=None, max_examples=200)
@given(sides, sides, st.permutations(range(7)), st.permutations(range(7)), st.data())
def test_pairs_are_those_found_token_by_token(mine, theirs, local_ids, peer_ids, data):
    peer_first = data.draw(st.integers(0, 2))
    peer_ids = peer_ids[: data.draw(st.integers(1, 7))]
    low, high = peer_first * theirs.span_tokens, (peer_first + len(peer_ids)) * theirs.span_tokens
    earliest, last = -(-low // mine.span_tokens), high // mine.span_tokens
    first = data.draw(st.integers(earliest, max(earliest, last)))
    local_ids = local_ids[: data.draw(st.integers(0, max(0, last - first + 1)))]
    tokens = data.draw(st.integers(0, high))
    pair = pair_groups(0, mine, 0, theirs)
    unit = pair.unit_tokens
    far = [block for place, block in enumerate(peer_ids, peer_first) if place * theirs.span_tokens < tokens]
    near = [block for place, block in enumerate(local_ids, first) if place * mine.span_tokens < tokens]
    peer, deal = held_places(theirs, far, peer_first), theirs.deal
    expected = set()
    for token, place in held_places(mine, near, first).items():
        if token in peer:
            expected.add((*peer[token], *place))
        elif token // deal.interleave_tokens % deal.size == deal.rank:
            last = (far[-1] + 1) * theirs.pages_per_block - 1, theirs.page_tokens - unit + token % unit
            expected.add((*last, *place))
    ordered = sorted(both for both in expected if both[1] % unit == 0)
    whole = [(page, inside // unit, at, within // unit) for at, within, page, inside in ordered]
    ids = np.array(local_ids, dtype=np.int64)
    assert pairs(pair, ids, peer_ids, (first, peer_first), tokens=tokens) == whole


def test_pairs_are_sorted_at_the_peer():
    assert indices(plan_of(), lists([8, 3, 6]), lists([9, 2, 7]), tokens=48) == ([3, 6, 8], [2, 7, 9])


@pytest.mark.never_wrong("A11")
@pytest.mark.parametrize(
    ("local", "peer", "first", "tokens", "found"),
    [
        ((7, 2, 5), (9, 4, 8), 0, 48, [(2, 4), (5, 8), (7, 9)]),
        ((7, 2), (9, 4, 8), 16, 48, [(7, 4), (2, 8)]),
        ((7, 2, 5), (9, 4, 8), 0, 17, [(2, 4), (7, 9)]),
        ((0, 2), (9, 4), 0, 32, None),
        ((7, 7), (9, 4), 0, 32, None),
        ((7, -1), (9, 4), 0, 32, None),
        ((7, 100), (9, 4), 0, 32, None),
        ((7, True), (9, 4), 0, 32, None),
        ((7, 2), (9,), 0, 32, []),
        (tuple(range(1, 66)), tuple(range(1, 66)), 0, 65 * 16, None),
    ],
)
def test_short_plain_lists_are_paired_at_once_and_others_left_to_all_checks(local, peer, first, tokens, found):
    """The null block is 0, there are 100 blocks of 16 tokens, and the peer's list begins at token 0."""
    pair = pairing(16, 16)
    rules = ListRules("local", (pair.local,), (100,), 0)
    mine, theirs = short_list([BlockList(local, first)], rules), short_list([BlockList(peer)], rules)
    assert (mine is None) is (found is None)
    if mine is not None:
        pairs = pair_short([pair], mine, theirs, tokens)
        assert [list(zip(*map(np.ndarray.tolist, each), strict=True)) for each in pairs] == [found] * bool(found)


def test_a_block_that_begins_before_the_end_is_filled_whole():
    """A block of 64 tokens here, of 16 at the peer, 20 tokens: what no peer unit covers repeats one of this prompt."""
    assert pairs(pairing(64, 16), [5], [7, 8], tokens=20) == [(5, 0, 7, 0), (5, 1, 8, 0), (5, 2, 8, 0), (5, 3, 8, 0)]
    # The peer's third block holds none of the 20 tokens: perhaps its engine never wrote it.
    assert pairs(pairing(64, 16), [5], [7, 8, 9], tokens=20) == pairs(pairing(64, 16), [5], [7, 8], tokens=20)
    # Kernel pages of 16 in equal blocks: the whole block comes, as contiguous as it lies there.
    assert pairs(pairing(64, 64, 4, 4), [5], [7], tokens=20) == [(20 + n, 0, 28 + n, 0) for n in range(4)]
    # Blocks that begin at the end or behind it are the host's to zero.
    assert pairs(pairing(32, 16), [5, 6], [7, 8], tokens=32) == [(5, 0, 7, 0), (5, 1, 8, 0)]
    # Each rank of a peer that deals its tokens out fills its own turns; rank 1 holds none of the 10 tokens.
    for rank, unit in ((0, 0), (1, 1)):
        dealt = pairing(64, 16, peer_deal=TokenDeal(2, rank, 16))
        assert pairs(dealt, [5], [7], tokens=10) == [(5, unit, 7, 0), (5, unit + 2, 7, 0)]


def test_a_route_has_the_indices_of_every_rank():
    """Context parallelism gives the ranks of one engine different pairs, tensor parallelism the same."""
    for model, dcp in ((ModelSpec(("latent", "latent"), latent_dim=4), 2), (ModelSpec(("attention",), 4, 4), 1)):
        plan = plan_of(model, {"tp": 4, "dcp": dcp, "block_tokens": 8}, block_tokens=8)
        asked = (lists([5, 2, 9, 7]), lists([3, 8, 1, 4]))
        route = plan.route(*asked, tokens=30)
        assert len(plan.producer_ranks) == (2 if dcp > 1 else 4)
        found = {rank: tuple(side.tolist() for side in pair) for rank, pair in route.indices.items()}
        assert found == {rank: indices(plan, *asked, tokens=30, rank=rank) for rank in plan.producer_ranks}
        assert route.staged == ()


@pytest.mark.parametrize(
    ("local", "peer", "peer_first", "token"), [([1], [], 0, 0), ([1, 2, 3], [4, 5], 0, 32), ([4], [1], 16, 0)]
)
@pytest.mark.never_wrong("A3")
def test_a_peer_list_that_lacks_an_ordered_token_is_refused(local, peer, peer_first, token):
    plan = plan_of()
    for call in (plan.route, partial(plan.indices, (0, 0))):
        with refused("peer-blocks-too-few", "peer", InvalidBlocks, token=token):
            call(lists(local), lists(peer, first=peer_first), tokens=16 * len(local))


def test_windows_clip_both_sides():
    """The host names no block outside the window: the null block stands there."""
    plan = plan_of(ModelSpec(("sliding",), 2, 4, window_tokens=32))
    for local, first, peer, peer_first in (
        ([0, 0, 3, 4, 5], 0, [11, 12, 13, 14, 15], 0),
        ([0, 0, 3, 4, 5], 0, [0, 0, 13, 14, 15], 0),
        ([0, 0, 3, 4, 5], 0, [13, 14, 15], 32),
        ([3, 4, 5], 32, [11, 12, 13, 14, 15], 0),
    ):
        mine, theirs = lists(local, first=first, null=0), lists(peer, first=peer_first, null=0)
        assert indices(plan, mine, theirs, tokens=80) == ([3, 4, 5], [13, 14, 15])
    # A block that it names all the same is filled: it has not been zeroed.
    found = indices(plan, lists([2, 3, 4, 5], first=16), lists([13, 14, 15], first=32), tokens=80)
    assert found == ([3, 4, 2, 5], [13, 14, 15, 15])


def test_a_window_may_begin_inside_a_local_block():
    window = pairing(36, 24, window=16)
    # Places 0-1 of 36 tokens against places 1-2 of 24: tokens before 24 are outside the window of token 72.
    found = pairs(window, [0, 1], [5, 6], (0, 1), tokens=72)
    assert found == [(0, 2, 5, 0), (1, 0, 5, 1), (1, 1, 6, 0), (0, 0, 6, 1), (0, 1, 6, 1), (1, 2, 6, 1)]


@pytest.mark.never_wrong("B8")
@pytest.mark.never_wrong("A3")
def test_a_local_block_is_filled_whole_or_not_at_all():
    """A prefix cache keeps block 1 (tokens 64..79) as a whole; a hit that ends at token 96 would read tokens 64..67 of it."""
    window = pairing(16, 4, window=33)
    # The next token, 100, sees tokens 68..99: the peer's blocks of 4 from token 68 on hold all that it needs.
    with refused("peer-blocks-too-few"):
        pairs(window, [1, 2, 3], list(range(10, 18)), (4, 17), tokens=100)
    assert len(pairs(window, [1, 2, 3], list(range(9, 18)), (4, 16), tokens=100)) == 3 * 4


def test_exactly_the_tokens_in_the_window_suffice():
    """Blocks of 1 token, window 4, 10 tokens: token 10 sees 7, 8 and 9, so the peer may begin at 7 but not at 8."""
    window = pairing(1, 1, window=4)
    local = [0] * 7 + [7, 8, 9]
    needed = partial(pairs, nulls=(0, 0), tokens=10)
    assert needed(window, local, [20, 21, 22], (0, 7)) == [(7, 0, 20, 0), (8, 0, 21, 0), (9, 0, 22, 0)]
    assert len(needed(pairing(1, 2, window=4), local, [20, 21], (0, 3))) == 3
    with refused("peer-blocks-too-few", token=7):
        needed(window, local, [21, 22], (0, 8))


@pytest.mark.never_wrong("A3")
def test_null_blocks():
    assert pairs(pairing(16, 16), [0, 4, 5], [0, 8, 9], nulls=(0, 0), tokens=48) == [(4, 0, 8, 0), (5, 0, 9, 0)]
    with refused("peer-blocks-too-few", "peer", token=0):
        pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, 0), tokens=32)
    assert pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, None), tokens=32) == [(3, 0, 0, 0), (4, 0, 8, 0)]
    assert pairs(pairing(16, 16), [0, 4], [7, 8], nulls=(None, 5), tokens=32) == [(0, 0, 7, 0), (4, 0, 8, 0)]
    with refused("peer-blocks-too-few"):
        pairs(pairing(16, 16), [0, 4], [5, 8], nulls=(None, 5), tokens=32)
    assert pairs(pairing(16, 16), [5, 4], [7, 8], nulls=(5, 9), tokens=32) == [(4, 0, 8, 0)]
    # Other block sizes, a null block in the middle of either list.
    assert pairs(pairing(4, 8), [1, 2, 0, 4], [0, 9], (2, 0), nulls=(0, 0), tokens=16) == [(1, 0, 9, 0), (2, 0, 9, 1)]


def test_only_the_null_block_may_be_there_twice():
    local = replace(build_engine(DENSE, EngineSpec())[0, 0], null_block=0)
    plan = plan_transfer(local, build_engine(DENSE, EngineSpec()))
    for null in (None, 0):  # the geometry names it, and so may the list
        assert indices(plan, lists([0, 0, 5], null=null), lists([1, 2, 3]), tokens=48) == ([5], [3])
        with refused("local-block-twice", "local", block=5):
            plan.route(lists([0, 5, 0, 5], null=null), lists([1, 2, 3, 4]), tokens=64)


@pytest.mark.parametrize(
    ("ids", "code", "context"),
    [
        ([64], "block-id-out-of-range", {"block": 64, "blocks": 64}),
        ([-1], "block-id-out-of-range", {"block": -1}),
        ([70, -2], "block-id-out-of-range", {"block": -2}),
        ([1.5], "block-id-malformed", {}),
        (["a"], "block-id-malformed", {}),
        ([[1, 2]], "block-id-malformed", {}),
        ([1, [2]], "block-id-malformed", {}),
        ([[]], "block-id-malformed", {}),
        (7, "block-id-malformed", {}),
        ([1 << 70], "block-id-malformed", {}),
    ],
)
def test_bad_ids_are_refused_and_blamed_on_their_side(ids, code, context):
    for side, local, peer in (("local", ids, [1]), ("peer", [1], ids)):
        with refused(code, side, InvalidBlocks, side=side, **context):
            plan_of().route(lists(local), lists(peer), tokens=16)


def test_bad_lists_are_refused_and_blamed_on_their_side():
    bare: Any = [[4]]
    odd: Any = np.array([1, 2])
    for good, bad, code in (
        (lists([1]), bare, "block-list-malformed"),
        (lists([1]), [BlockList([1], 0, odd)], "block-list-malformed"),
        (lists([1]), lists([1], [2]), "group-count"),
        *(
            (lists([1]), lists([1], first=first), "first-token-unaligned")
            for first in (-16, 8, 16.0, None, True, 1 << 70)
        ),
    ):
        for side, local, peer in (("local", bad, good), ("peer", good, bad)):
            with refused(code, side, InvalidBlocks):
                plan_of().route(local, peer, tokens=16)


@pytest.mark.parametrize("tokens", [10**30, -5, 2.5, float("nan"), True, None, "16"])
def test_malformed_tokens(tokens):
    for call in (partial(plan_of().indices, (0, 0)), plan_of().route):
        with refused("tokens-malformed", "local", InvalidBlocks):
            call(lists([4]), lists([1]), tokens=tokens)


def test_blocks_of_several_pages_are_counted_as_blocks():
    plan = plan_of(block_tokens=64, kernel_block_tokens=16, block_count=10)
    assert indices(plan, lists([9]), lists([9]), tokens=64)[1][:4] == [36, 37, 38, 39]
    for local, peer in ([10], [9]), ([9], [10]):
        with refused("block-id-out-of-range", blocks=10):
            plan.route(lists(local), lists(peer), tokens=64)
