"""Block lists into pairs: prefix hits, ratios, windows, null blocks, and every refusal."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from block_lists import lists, pairing, pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_topology import Group, InvalidBlocks, TokenDeal, plan_transfer
from kv_topology.arithmetic import common_unit_tokens
from kv_topology.plan import plan as plans
from kv_topology.plan.blocks import Blocks, _is_one_to_one, _pages, read_lists
from kv_topology.plan.boxes import Pairing
from kv_topology.tools import EngineSpec, ModelSpec, build_engine

DENSE = ModelSpec(("attention",), 2, 4)


def plan_of(model=DENSE, peer=None, **mine):
    local = build_engine(model, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(model, EngineSpec(**(peer if peer is not None else mine))))


def test_a_prefix_hit_reads_the_tail():
    mine, theirs = plan_of().indices((0, 0), lists([8, 3], first=32), lists([5, 9, 2, 7]), tokens=64)
    assert theirs.tolist() == [2, 7]
    assert mine.tolist() == [8, 3]


def test_pairs_are_sorted_at_the_peer():
    mine, theirs = plan_of().indices((0, 0), lists([8, 3, 6]), lists([9, 2, 7]), tokens=48)
    assert theirs.tolist() == [2, 7, 9]
    assert mine.tolist() == [3, 6, 8]
    mine, theirs = plan_of().indices((0, 0), lists([8, 3, 6]), lists([2, 9, 7]), tokens=48)
    assert (mine.tolist(), theirs.tolist()) == ([8, 6, 3], [2, 7, 9])


def test_smaller_peer_blocks():
    assert pairs(pairing(32, 16), [5, 1], [7, 8, 9, 6], tokens=50) == [
        (1, 1, 6, 0),
        (5, 0, 7, 0),
        (5, 1, 8, 0),
        (1, 0, 9, 0),
    ]


@pytest.mark.never_wrong("A11")
def test_a_block_that_begins_before_the_end_is_filled_whole():
    """A block of 64 tokens here, of 16 at the peer, 20 tokens: what no peer unit covers repeats one of this prompt."""
    assert pairs(pairing(64, 16), [5], [7, 8], tokens=20) == [(5, 0, 7, 0), (5, 1, 8, 0), (5, 2, 8, 0), (5, 3, 8, 0)]
    # The peer's third block holds none of the 20 tokens: perhaps its engine never wrote it.
    assert pairs(pairing(64, 16), [5], [7, 8, 9], tokens=20) == pairs(pairing(64, 16), [5], [7, 8], tokens=20)
    # Kernel pages of 16 in equal blocks: the whole block comes, as contiguous as it lies there.
    assert pairs(pairing(64, 64, 4, 4), [5], [7], tokens=20) == [(20 + n, 0, 28 + n, 0) for n in range(4)]
    assert pairs(pairing(48, 64), [5], [7], tokens=20) == [(5, n, 7, n) for n in range(3)]
    # Blocks that begin at the end or behind it are the host's to zero.
    assert pairs(pairing(32, 16), [5, 6], [7, 8], tokens=32) == [(5, 0, 7, 0), (5, 1, 8, 0)]
    # Each rank of a peer that deals its tokens out fills its own turns; rank 1 holds none of the 10 tokens.
    for rank, unit in ((0, 0), (1, 1)):
        dealt = pairing(64, 16, peer_deal=TokenDeal(2, rank, 16))
        assert pairs(dealt, [5], [7], tokens=10) == [(5, unit, 7, 0), (5, unit + 2, 7, 0)]


def test_larger_peer_blocks():
    assert pairs(pairing(16, 48), [5, 1, 2, 3], [7, 4], (2, 0)) == [
        (1, 0, 4, 0),
        (2, 0, 4, 1),
        (3, 0, 4, 2),
        (5, 0, 7, 2),
    ]


def test_blocks_without_a_common_divisor_but_one():
    found = pairs(pairing(48, 32), [1, 0], [3, 2, 1])
    assert found == [(0, 1, 1, 0), (0, 2, 1, 1), (1, 2, 2, 0), (0, 0, 2, 1), (1, 0, 3, 0), (1, 1, 3, 1)]


def test_kernel_blocks_on_both_sides():
    assert pairs(pairing(32, 32, 2, 4), [3], [1]) == [(6, 0, 4, 0), (6, 1, 5, 0), (7, 0, 6, 0), (7, 1, 7, 0)]
    assert _pages(np.array([2, 0]), Group("attention", 48, 3)).tolist() == [6, 7, 8, 0, 1, 2]
    assert _pages(np.array([2, 0]), Group("attention", 48, 2)).tolist() == [4, 5, 0, 1]
    assert _pages(np.array([2, 0]), Group("attention", 48, 1)).tolist() == [2, 0]


def test_dealt_out_tokens():
    half = pairing(16, 16, peer_deal=TokenDeal(2, 1, 16))
    assert pairs(half, [4, 5, 6, 7], [9, 8]) == [(7, 0, 8, 0), (5, 0, 9, 0)]
    both = pairing(16, 16, deal=TokenDeal(4, 3, 16), peer_deal=TokenDeal(2, 1, 16))
    assert pairs(both, [4], [9, 8]) == [(4, 0, 8, 0)]
    fine = pairing(16, 16, peer_deal=TokenDeal(2, 0, 8))
    assert pairs(fine, [4, 5], [9]) == [(4, 0, 9, 0), (5, 0, 9, 1)]


def test_turns_of_several_units():
    local_dealt = pairing(16, 8, deal=TokenDeal(2, 1, 16))
    assert pairs(local_dealt, [4], [5, 6, 7, 8]) == [(4, 0, 7, 0), (4, 1, 8, 0)]
    peer_dealt = pairing(8, 16, peer_deal=TokenDeal(2, 0, 16))
    assert pairs(peer_dealt, [4, 5, 6, 7], [9]) == [(4, 0, 9, 0), (5, 0, 9, 1)]


def test_a_window_that_begins_before_the_peers_list():
    window = pairing(16, 16, window=16)
    filled = [(3, 0, 8, 0), (1, 0, 9, 0), (2, 0, 9, 0), (4, 0, 9, 0)]
    assert pairs(window, [1, 2, 3, 4], [8, 9], (0, 2), tokens=64) == filled
    assert pairs(window, [1, 2, 3, 4], [8, 9, 7], (0, 2), tokens=64) == filled
    assert pairs(window, [0, 0, 3, 4], [8, 9], (0, 2), (0, 0), tokens=64) == [(3, 0, 8, 0), (4, 0, 9, 0)]


@pytest.mark.parametrize(
    ("block", "peer_block", "local", "peer", "tokens", "firsts"),
    [
        (16, 16, 3, 5, 80, (2, 0)),
        (16, 16, 5, 5, 80, (0, 0)),
        (16, 16, 6, 5, 80, (0, 0)),
        (64, 16, 1, 5, 80, (1, 0)),
        (64, 16, 2, 5, 80, (0, 0)),
        (16, 64, 8, 2, 128, (0, 0)),
        (16, 64, 9, 2, 128, (0, 0)),
        (16, 64, 2, 2, 80, (3, 0)),
        (48, 32, 2, 2, 64, (0, 0)),
    ],
)
def test_every_ordered_block_of_the_lists_is_filled(block, peer_block, local, peer, tokens, firsts):
    """Lists of every length relation; each unit is found at the place that its token number says, or repeats another."""
    pair = pairing(block, peer_block)
    unit = pair.unit_tokens
    mine, theirs = list(range(100, 100 + local)), list(range(200, 200 + peer))
    expected = []
    last = (tokens - 1) // peer_block - firsts[1]
    for token in range(firsts[0] * block, min(-(-tokens // block), firsts[0] + local) * block, unit):
        here, there = divmod(token - firsts[0] * block, block), divmod(token - firsts[1] * peer_block, peer_block)
        there = there if there[0] <= last else (last, peer_block - unit)
        expected.append((mine[here[0]], here[1] // unit, theirs[there[0]], there[1] // unit))
    found = pairs(pair, mine, theirs, firsts, tokens=tokens)
    assert sorted(found) == sorted(expected)


def test_lists_begin_where_they_say():
    plan = plan_of(block_tokens=16, block_count=9)
    for first, peer_ids, peer_first, tokens, expected in (
        (0, [1, 2, 3], 0, 48, ([4, 5], [1, 2])),
        (32, [1, 2, 3], 16, 64, ([4, 5], [2, 3])),
        (16, [2, 3], 16, 48, ([4, 5], [2, 3])),
        (0, [2, 3], 0, 32, ([4, 5], [2, 3])),
        (16, [2, 3], 16, 33, ([4, 5], [2, 3])),
    ):
        found = plan.indices((0, 0), lists([4, 5], first=first), lists(peer_ids, first=peer_first), tokens=tokens)
        assert tuple(side.tolist() for side in found) == expected


@pytest.mark.parametrize("first", [-16, 8, 16.0, None, True, 1 << 70])
def test_malformed_first_tokens(first):
    for side, local, peer in (("local", first, 0), ("peer", 0, first)):
        with pytest.raises(InvalidBlocks) as caught:
            plan_of().indices((0, 0), lists([4], first=local), lists([1], first=peer), tokens=16)
        assert (caught.value.code, caught.value.fault) == ("first-token-unaligned", side)


def test_a_route_has_the_indices_of_every_rank():
    """Context parallelism gives the ranks of one engine different pairs, tensor parallelism the same."""
    latent = ModelSpec(("latent", "latent"), latent_dim=4)
    dense = ModelSpec(("attention",), 4, 4)
    for model, dcp in ((latent, 2), (dense, 1)):
        engine = EngineSpec(4, dcp=dcp, block_tokens=8, block_count=12)
        plan = plan_transfer(
            build_engine(model, EngineSpec(block_tokens=8, block_count=12))[0, 0], build_engine(model, engine)
        )
        asked = (lists([5, 2, 9, 7]), lists([3, 8, 1, 4]))
        route = plan.route(*asked, tokens=30)
        assert tuple(route.indices) == plan.producer_ranks
        assert len(plan.producer_ranks) == (2 if dcp > 1 else 4)
        for rank, pair in route.indices.items():
            one = plan.indices(rank, *asked, tokens=30)
            assert [side.tolist() for side in pair] == [side.tolist() for side in one]
        assert route.staged == ()


def test_a_route_checks_lists_once_for_ranks_that_pair_alike(monkeypatch):
    checked = []

    def counted(given, rules):
        checked.append(rules.side)
        return read_lists(given, rules)

    monkeypatch.setattr(plans, "read_lists", counted)
    model = ModelSpec(("attention",), 4, 4)
    plan = plan_transfer(build_engine(model, EngineSpec())[0, 0], build_engine(model, EngineSpec(4)))
    plan.route(lists([4]), lists([1]), tokens=16)
    assert checked == ["local", "peer"]


@pytest.mark.parametrize("tokens", [10**30, -5, 2.5, float("nan"), True, None, "16"])
def test_malformed_tokens(tokens):
    plan = plan_of()
    for call in (partial(plan.indices, (0, 0)), plan.route):
        with pytest.raises(InvalidBlocks) as caught:
            call(lists([4]), lists([1]), tokens=tokens)
        assert (caught.value.code, caught.value.fault) == ("tokens-malformed", "local")


def test_bare_ids_are_no_block_list():
    for side, local, peer in (("local", [[4]], lists([1])), ("peer", lists([4]), [[1]])):
        with pytest.raises(InvalidBlocks) as caught:
            plan_of().indices((0, 0), local, peer, tokens=16)
        assert (caught.value.code, caught.value.fault) == ("block-list-malformed", side)


def test_blocks_beyond_the_ordered_tokens_are_left_alone():
    mine, theirs = plan_of().indices((0, 0), lists([4, 5, 6]), lists([1, 2]), tokens=32)
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [1, 2])
    for local, peer, first in (([4, 5, 6], [1], 0), ([4], [1], 16)):
        with pytest.raises(InvalidBlocks) as caught:
            plan_of().indices((0, 0), lists(local), lists(peer, first=first), tokens=48)
        assert (caught.value.code, caught.value.fault) == ("peer-blocks-too-few", "peer")
        assert caught.value.context["token"] == (16 if len(local) == 3 else 0)


@pytest.mark.never_wrong("A3")
def test_a_spare_block_does_not_shift_the_others():
    """Blocks of 4, 8 tokens computed, 1 block cached: 5 stands for tokens 4..7, which the peer keeps in its second."""
    plan = plan_of(block_tokens=4)
    mine, theirs = plan.indices((0, 0), lists([5, 6], first=4), lists([1, 2]), tokens=8)
    assert (mine.tolist(), theirs.tolist()) == ([5], [2])


@pytest.mark.never_wrong("A3")
def test_windows_with_spare_and_missing_blocks_are_not_shifted():
    sliding = plan_of(ModelSpec(("sliding",), 2, 4, window_tokens=4), block_tokens=4)
    mine, theirs = sliding.indices((0, 0), lists([9, 9, 9, 3, 4], null=9), lists([0, 1, 2, 3]), tokens=16)
    assert (mine.tolist(), theirs.tolist()) == ([3], [3])
    short = plan_of(ModelSpec(("sliding",), 2, 4, window_tokens=3), block_tokens=2)
    mine, theirs = short.indices((0, 0), lists([5, 6, 7]), lists([1, 2], first=2), tokens=6)
    assert (mine.tolist(), theirs.tolist()) == ([6, 5, 7], [1, 2, 2])


@pytest.mark.parametrize(("local", "peer"), [([1], []), ([1, 2, 3], [4, 5])])
@pytest.mark.never_wrong("A3")
def test_a_peer_list_that_ends_early_is_refused(local, peer):
    plan = plan_of()
    for call in (plan.route, partial(plan.indices, (0, 0))):
        with pytest.raises(InvalidBlocks) as caught:
            call(lists(local), lists(peer), tokens=16 * len(local))
        assert (caught.value.code, caught.value.fault) == ("peer-blocks-too-few", "peer")


def test_windows_clip_both_sides():
    """The host names no block outside the window: the null block stands there."""
    model = ModelSpec(("sliding",), 2, 4, window_tokens=32)
    plan = plan_of(model)
    for local, first, peer, peer_first in (
        ([0, 0, 3, 4, 5], 0, [11, 12, 13, 14, 15], 0),
        ([0, 0, 3, 4, 5], 0, [0, 0, 13, 14, 15], 0),
        ([0, 0, 3, 4, 5], 0, [13, 14, 15], 32),
        ([3, 4, 5], 32, [11, 12, 13, 14, 15], 0),
        ([0, 3, 4, 5], 16, [11, 12, 13, 14, 15], 0),
    ):
        found = plan.indices(
            (0, 0), lists(local, first=first, null=0), lists(peer, first=peer_first, null=0), tokens=80
        )
        assert tuple(side.tolist() for side in found) == ([3, 4, 5], [13, 14, 15])
    # A block that it names all the same is filled: it has not been zeroed.
    found = plan.indices((0, 0), lists([2, 3, 4, 5], first=16), lists([13, 14, 15], first=32), tokens=80)
    assert tuple(side.tolist() for side in found) == ([3, 4, 2, 5], [13, 14, 15, 15])


def test_a_window_may_begin_inside_a_local_block():
    window = pairing(36, 24, window=16)
    # Places 0-1 of 36 tokens against places 1-2 of 24: tokens before 24 are outside the window of token 72.
    assert pairs(window, [0, 1], [5, 6], (0, 1), tokens=72) == [
        (0, 2, 5, 0),
        (1, 0, 5, 1),
        (1, 1, 6, 0),
        (0, 0, 6, 1),
        (0, 1, 6, 1),
        (1, 2, 6, 1),
    ]


@pytest.mark.never_wrong("B8")
@pytest.mark.never_wrong("A3")
def test_a_local_block_is_filled_whole_or_not_at_all():
    """A prefix cache keeps block 1 (tokens 64..79) as a whole; a hit that ends at token 96 would read tokens 64..67 of it."""
    window = pairing(16, 4, window=33)
    # The next token, 100, sees tokens 68..99: the peer's blocks of 4 from token 68 on hold all that it needs.
    from_68, from_64 = list(range(10, 18)), list(range(9, 18))
    with pytest.raises(InvalidBlocks) as refused:
        pairs(window, [1, 2, 3], from_68, (4, 17), tokens=100)
    assert refused.value.code == "peer-blocks-too-few"
    assert len(pairs(window, [1, 2, 3], from_64, (4, 16), tokens=100)) == 3 * 4


def test_exactly_the_tokens_in_the_window_suffice():
    """Blocks of 1 token, window 4, 10 tokens: token 10 sees 7, 8 and 9, so the peer may begin at 7 but not at 8."""
    window = pairing(1, 1, window=4)
    local = [0] * 7 + [7, 8, 9]
    needed = partial(pairs, nulls=(0, 0), tokens=10)
    assert needed(window, local, [20, 21, 22], (0, 7)) == [(7, 0, 20, 0), (8, 0, 21, 0), (9, 0, 22, 0)]
    assert len(needed(pairing(1, 2, window=4), local, [20, 21], (0, 3))) == 3
    with pytest.raises(InvalidBlocks) as caught:
        needed(window, local, [21, 22], (0, 8))
    assert (caught.value.code, caught.value.context["token"]) == ("peer-blocks-too-few", 7)
    whole = pairing(16, 16, window=16)
    assert pairs(whole, [3, 4], [8], (0, 1), tokens=32) == [(3, 0, 8, 0), (4, 0, 8, 0)]


@pytest.mark.never_wrong("A3")
def test_null_blocks():
    assert pairs(pairing(16, 16), [0, 4, 5], [0, 8, 9], nulls=(0, 0), tokens=48) == [(4, 0, 8, 0), (5, 0, 9, 0)]
    with pytest.raises(InvalidBlocks) as caught:
        pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, 0), tokens=32)
    assert (caught.value.code, caught.value.fault, caught.value.context["token"]) == ("peer-blocks-too-few", "peer", 0)
    assert pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, None), tokens=32) == [(3, 0, 0, 0), (4, 0, 8, 0)]
    assert pairs(pairing(16, 16), [0, 4], [7, 8], nulls=(None, 5), tokens=32) == [(0, 0, 7, 0), (4, 0, 8, 0)]
    with pytest.raises(InvalidBlocks):
        pairs(pairing(16, 16), [0, 4], [5, 8], nulls=(None, 5), tokens=32)
    assert pairs(pairing(16, 16), [5, 4], [7, 8], nulls=(5, 9), tokens=32) == [(4, 0, 8, 0)]
    assert pairs(pairing(16, 16), [5, 4], [7, 8], nulls=(5, None), tokens=32) == [(4, 0, 8, 0)]
    # Chunked local attention: the peer keeps the last chunk only, and so does this rank.
    assert pairs(pairing(4, 4), [0, 0, 7], [0, 0, 9], nulls=(0, 0), tokens=12) == [(7, 0, 9, 0)]
    # Other block sizes, a null block in the middle of either list.
    assert pairs(pairing(4, 8), [1, 2, 0, 4], [0, 9], (2, 0), nulls=(0, 0), tokens=16) == [(1, 0, 9, 0), (2, 0, 9, 1)]


@pytest.mark.parametrize(
    ("local", "peer", "code"),
    [
        ([[4, 4]], [[1, 2]], "local-block-twice"),
        ([[[]]], [[1]], "block-id-malformed"),
        ([[64]], [[1]], "block-id-out-of-range"),
        ([[-1]], [[1]], "block-id-out-of-range"),
        ([[1]], [[64]], "block-id-out-of-range"),
        ([[1]], [[-2]], "block-id-out-of-range"),
        ([[1.5]], [[1]], "block-id-malformed"),
        ([["a"]], [[1]], "block-id-malformed"),
        ([[[1, 2]]], [[1]], "block-id-malformed"),
        ([[1, [2]]], [[1]], "block-id-malformed"),
        ([[1 << 70]], [[1]], "block-id-malformed"),
        ([[1], [2]], [[1]], "group-count"),
        ([[1]], [[1], [2]], "group-count"),
    ],
)
def test_bad_lists_are_refused(local, peer, code):
    with pytest.raises(InvalidBlocks) as caught:
        plan_of().indices((0, 0), lists(*local), lists(*peer), tokens=32)
    assert caught.value.code == code
    assert caught.value.fault == ("peer" if local == [[1]] else "local")


def test_the_block_that_does_not_exist_is_named():
    for blocks, worst in (([0, 64], 64), ([5, -3], -3), ([70, -1], -1)):
        with pytest.raises(InvalidBlocks) as caught:
            plan_of().indices((0, 0), lists(blocks), lists([1, 2]), tokens=32)
        assert caught.value.context["block"] == worst


def test_blocks_of_several_pages_are_counted_as_blocks():
    plan = plan_of(block_tokens=64, kernel_block_tokens=16, block_count=10)
    assert plan.indices((0, 0), lists([9]), lists([9]), tokens=64)[1].tolist()[:4] == [36, 37, 38, 39]
    for local, peer in ([10], [9]), ([9], [10]):
        with pytest.raises(InvalidBlocks) as caught:
            plan.indices((0, 0), lists(local), lists(peer), tokens=64)
        assert caught.value.context["blocks"] == 10


def test_the_highest_block_is_allowed():
    mine, theirs = plan_of().indices((0, 0), lists([63]), lists([63]), tokens=16)
    assert (mine.tolist(), theirs.tolist()) == ([63], [63])


def test_sparse_ids_are_checked_too():
    plan = plan_of(block_count=1 << 20)
    far = (1 << 20) - 1
    mine, theirs = plan.indices((0, 0), lists([far, 2]), lists([far, 3]), tokens=32)
    assert (mine.tolist(), theirs.tolist()) == ([2, far], [3, far])
    for blocks, twice in (([far, far], far), ([2, far, far], far), ([4, 2, 4], 4), ([1, 3, 3, 7], 3)):
        with pytest.raises(InvalidBlocks) as caught:
            plan.indices((0, 0), lists(blocks), lists([far, 3, 5, 6]), tokens=64)
        assert (caught.value.code, caught.value.context["block"]) == ("local-block-twice", twice)


def test_only_the_null_block_may_be_there_twice():
    local = replace(build_engine(DENSE, EngineSpec())[0, 0], null_block=0)
    plan = plan_transfer(local, build_engine(DENSE, EngineSpec()))
    for null in (None, 0):  # the geometry names it, and so may the list
        mine, theirs = plan.indices((0, 0), lists([0, 0, 5], null=null), lists([1, 2, 3]), tokens=48)
        assert (mine.tolist(), theirs.tolist()) == ([5], [3])
        with pytest.raises(InvalidBlocks) as caught:
            plan.indices((0, 0), lists([0, 5, 0, 5], null=null), lists([1, 2, 3, 4]), tokens=64)
        assert caught.value.context["block"] == 5


def test_which_lists_need_no_arithmetic():
    plain, with_null = Blocks(np.array([1]), 0, -1, False, 9), Blocks(np.array([1]), 0, 1, True, 9)
    whole = pairing(16, 16)
    assert _is_one_to_one(whole, plain, plain)
    assert _is_one_to_one(pairing(16, 16, window=4), plain, plain)
    for mine, theirs in ((plain, with_null), (with_null, plain), (with_null, with_null)):
        assert not _is_one_to_one(whole, mine, theirs)
    for other in (
        pairing(32, 16),
        pairing(16, 32),
        pairing(48, 32),
        pairing(32, 32, 2, 2),
        pairing(32, 16, 2, 1),
        pairing(16, 32, 1, 2),
        pairing(16, 16, deal=TokenDeal(2, 0, 16)),
        pairing(16, 16, peer_deal=TokenDeal(2, 0, 16)),
        pairing(16, 16, deal=TokenDeal(2, 0, 16), peer_deal=TokenDeal(2, 0, 16)),
    ):
        assert not _is_one_to_one(other, plain, plain)


def held_places(group, ids, first):
    """{global token: (page, token in the page)} of a block list, token by token."""
    found = {}
    for place, block in enumerate(ids, first):
        for token in range(group.block_tokens):
            own = place * group.block_tokens + token
            deal = group.deal
            turn, rest = divmod(own, deal.interleave_tokens)
            where = (turn * deal.size + deal.rank) * deal.interleave_tokens + rest
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
    unit = common_unit_tokens(mine.page_tokens, theirs.page_tokens, mine.deal, theirs.deal)
    pair = Pairing(0, 0, mine, theirs, unit, mine.page_tokens // unit, theirs.page_tokens // unit)
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
    for count in (7, 1 << 20):  # short and long sort keys
        ids = np.array(local_ids, dtype=np.int64)
        assert pairs(pair, ids, peer_ids, (first, peer_first), tokens=tokens, count=count) == whole
