"""Block lists into pairs: prefix hits, ratios, windows, null blocks, and every refusal."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_topology import (
    Group,
    InvalidBlocks,
    Region,
    TokenDeal,
    clip_window,
    expand_rows,
    kernel_pages,
    plan_transfer,
)
from kv_topology._blocks import _is_one_to_one, align, pair_blocks, place_order
from kv_topology._boxes import Pairing
from kv_topology._engine import EngineSpec, ModelSpec, StateSpec, build_engine
from kv_topology._link import _indices, find_aliases
from kv_topology._rows import build_rows
from kv_topology._shards import common_unit_tokens

DENSE = ModelSpec(("attention",), 2, 4)


def plan_of(model=DENSE, peer=None, **mine):
    local = build_engine(model, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(model, EngineSpec(**(peer if peer is not None else mine))))


def pairing(block, peer_block, pages=1, peer_pages=1, window=0, deal=None, peer_deal=None):
    kind = "sliding-window" if window else "attention"
    mine = Group(kind, block, pages, window, deal or TokenDeal())
    theirs = Group(kind, peer_block, peer_pages, window, peer_deal or TokenDeal())
    unit = common_unit_tokens(mine.page_tokens, theirs.page_tokens, mine.deal, theirs.deal)
    return Pairing(0, 0, mine, theirs, unit, mine.page_tokens // unit, theirs.page_tokens // unit)


def pairs(pair, local, peer, firsts=(0, 0), nulls=(None, None)):
    found = pair_blocks(pair, np.array(local), np.array(peer), firsts, nulls)
    return list(
        zip(*(c.tolist() for c in (found.local_page, found.local_unit, found.peer_page, found.peer_unit)), strict=True)
    )


def test_a_prefix_hit_reads_the_tail():
    mine, theirs = plan_of().indices((0, 0), [[8, 3]], [[5, 9, 2, 7]])
    assert theirs.tolist() == [2, 7]
    assert mine.tolist() == [8, 3]


def test_pairs_are_sorted_at_the_peer():
    mine, theirs = plan_of().indices((0, 0), [[8, 3, 6]], [[9, 2, 7]])
    assert theirs.tolist() == [2, 7, 9]
    assert mine.tolist() == [3, 6, 8]
    mine, theirs = plan_of().indices((0, 0), [[8, 3, 6]], [[2, 9, 7]])
    assert (mine.tolist(), theirs.tolist()) == ([8, 6, 3], [2, 7, 9])


def test_smaller_peer_blocks():
    assert pairs(pairing(32, 16), [5, 1], [7, 8, 9]) == [(5, 0, 7, 0), (5, 1, 8, 0), (1, 0, 9, 0)]


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
    assert kernel_pages(np.array([2, 0]), 3).tolist() == [6, 7, 8, 0, 1, 2]
    assert kernel_pages(np.array([2, 0]), 2).tolist() == [4, 5, 0, 1]
    assert kernel_pages(np.array([2, 0]), 1).tolist() == [2, 0]


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
    assert pairs(window, [1, 2, 3, 4], [8, 9], (0, 2)) == [(3, 0, 8, 0), (4, 0, 9, 0)]
    assert pairs(window, [1, 2, 3, 4], [8, 9, 7], (0, 2)) == [(3, 0, 8, 0), (4, 0, 9, 0)]


@pytest.mark.parametrize(
    ("block", "peer_block", "local", "peer", "tokens", "firsts"),
    [
        (16, 16, 3, 5, None, (2, 0)),
        (16, 16, 5, 5, None, (0, 0)),
        (16, 16, 6, 5, None, (0, 0)),
        (64, 16, 1, 5, None, (1, 0)),
        (64, 16, 2, 5, None, (0, 0)),
        (16, 64, 8, 2, None, (0, 0)),
        (16, 64, 9, 2, None, (0, 0)),
        (16, 64, 2, 2, 80, (3, 0)),
        (16, 64, 5, 1, 80, (0, 1)),
        (48, 32, 2, 2, None, (0, 0)),
    ],
)
def test_alignment(block, peer_block, local, peer, tokens, firsts):
    assert align(pairing(block, peer_block), local, peer, tokens) == firsts


@pytest.mark.parametrize(
    ("block", "peer_block", "local", "peer", "code"),
    [
        (16, 16, 7, 5, "local-list-too-long"),
        (16, 64, 10, 2, "local-list-too-long"),
        (16, 64, 5, 2, "alignment-unknown"),
        (48, 32, 1, 2, "alignment-unknown"),
        (16, 5, 1, 4, "alignment-unknown"),
    ],
)
def test_alignment_is_never_guessed(block, peer_block, local, peer, code):
    with pytest.raises(InvalidBlocks) as caught:
        align(pairing(block, peer_block), local, peer, None)
    assert caught.value.code == code
    assert caught.value.context["local"] == local
    assert caught.value.context["peer"] == peer


def test_windows_of_different_spans_need_tokens():
    with pytest.raises(InvalidBlocks, match="could begin"):
        align(pairing(64, 16, window=32), 1, 3, None)
    with pytest.raises(InvalidBlocks, match="could begin"):
        align(pairing(16, 64, window=32), 8, 2, None)
    assert align(pairing(16, 16, window=32), 2, 3, None) == (1, 0)


def test_told_firsts_win():
    plan = plan_of(block_tokens=16, block_count=9)
    mine, theirs = plan.indices((0, 0), [[4, 5]], [[1, 2, 3]], local_first=[0])
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [1, 2])
    mine, theirs = plan.indices((0, 0), [[4, 5]], [[1, 2, 3]], local_first=[2], peer_first=[1])
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [2, 3])
    mine, theirs = plan.indices((0, 0), [[4, 5]], [[2, 3]], local_first=[1], tokens=48)
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [2, 3])
    mine, theirs = plan.indices((0, 0), [[4, 5]], [[2, 3]], local_first=[0], tokens=32)
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [2, 3])
    mine, theirs = plan.indices((0, 0), [[4, 5]], [[2, 3]], tokens=33)
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [2, 3])


@pytest.mark.parametrize("firsts", [[-1], [], [0, -1][1:]])
def test_malformed_firsts(firsts):
    with pytest.raises(InvalidBlocks) as caught:
        plan_of().indices((0, 0), [[4]], [[1]], local_first=firsts)
    assert caught.value.code == "block-id-malformed"


def test_one_more_local_block_is_computed_here():
    mine, theirs = plan_of().indices((0, 0), [[4, 5, 6]], [[1, 2]])
    assert (mine.tolist(), theirs.tolist()) == ([4, 5], [1, 2])
    with pytest.raises(InvalidBlocks) as caught:
        plan_of().indices((0, 0), [[4, 5, 6]], [[1]], local_first=[0])
    assert caught.value.code == "peer-blocks-too-few"
    assert caught.value.context["local"] == (0, 48)
    assert caught.value.context["peer"] == (0, 16)
    with pytest.raises(InvalidBlocks) as caught:
        plan_of().indices((0, 0), [[4]], [[1]], local_first=[0], peer_first=[1])
    assert caught.value.code == "peer-blocks-too-few"


def test_windows_clip_both_sides():
    model = ModelSpec(("sliding",), 2, 4, window_tokens=32)
    plan = plan_of(model)
    mine, theirs = plan.indices((0, 0), [[1, 2, 3, 4, 5]], [[11, 12, 13, 14, 15]])
    assert (mine.tolist(), theirs.tolist()) == ([3, 4, 5], [13, 14, 15])
    mine, theirs = plan.indices((0, 0), [[1, 2, 3, 4, 5]], [[13, 14, 15]], tokens=80)
    assert (mine.tolist(), theirs.tolist()) == ([3, 4, 5], [13, 14, 15])
    for local, peer, told in (
        ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15], {"local_first": [0]}),
        ([1, 2, 3, 4, 5], [13, 14, 15], {"local_first": [0], "peer_first": [2]}),
        ([3, 4, 5], [11, 12, 13, 14, 15], {"local_first": [2], "peer_first": [0]}),
        ([2, 3, 4, 5], [11, 12, 13, 14, 15], {"local_first": [1]}),
    ):
        mine, theirs = plan.indices((0, 0), [local], [peer], **told)
        assert (mine.tolist(), theirs.tolist()) == ([3, 4, 5], [13, 14, 15])
    group = Group("sliding-window", 16, window_tokens=32)
    assert clip_window(np.arange(3), group).tolist() == [0, 1, 2]
    assert clip_window(np.arange(9), Group("attention", 16)).tolist() == list(range(9))


def test_a_window_may_begin_inside_a_local_block():
    window = pairing(36, 24, window=16)
    # Places 0-1 of 36 tokens against places 1-2 of 24: tokens before 24 are outside the window wherever it ends.
    assert pairs(window, [0, 1], [5, 6], (0, 1)) == [(0, 2, 5, 0), (1, 0, 5, 1), (1, 1, 6, 0), (1, 2, 6, 1)]
    assert len(pairs(pairing(36, 24, window=25), [0, 1], [5, 6], (0, 1))) == 4
    with pytest.raises(InvalidBlocks):
        pairs(pairing(36, 24, window=26), [0, 1], [5, 6], (0, 1))


def test_null_blocks():
    assert pairs(pairing(16, 16), [0, 4, 5], [0, 8, 9], nulls=(0, 0)) == [(4, 0, 8, 0), (5, 0, 9, 0)]
    with pytest.raises(InvalidBlocks) as caught:
        pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, 0))
    assert caught.value.code == "peer-blocks-too-few"
    assert caught.value.context["block"] == 3
    assert pairs(pairing(16, 16), [3, 4], [0, 8], nulls=(0, None)) == [(3, 0, 0, 0), (4, 0, 8, 0)]
    assert pairs(pairing(16, 16), [0, 4], [7, 8], nulls=(None, 5)) == [(0, 0, 7, 0), (4, 0, 8, 0)]
    with pytest.raises(InvalidBlocks):
        pairs(pairing(16, 16), [0, 4], [5, 8], nulls=(None, 5))
    assert pairs(pairing(16, 16), [5, 4], [7, 8], nulls=(5, 9)) == [(4, 0, 8, 0)]
    assert pairs(pairing(16, 16), [5, 4], [7, 8], nulls=(5, None)) == [(4, 0, 8, 0)]


@pytest.mark.parametrize(
    ("local", "peer", "code"),
    [
        ([[4, 4]], [[1, 2]], "local-block-twice"),
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
        plan_of().indices((0, 0), local, peer)
    assert caught.value.code == code


def test_the_block_that_does_not_exist_is_named():
    for blocks, worst in (([0, 64], 64), ([5, -3], -3), ([70, -1], -1)):
        with pytest.raises(InvalidBlocks) as caught:
            plan_of().indices((0, 0), [blocks], [[1, 2]])
        assert caught.value.context["block"] == worst


def test_blocks_of_several_pages_are_counted_as_blocks():
    plan = plan_of(block_tokens=64, kernel_block_tokens=16, block_count=10)
    assert plan.indices((0, 0), [[9]], [[9]])[1].tolist()[:4] == [36, 37, 38, 39]
    for lists in (([[10]], [[9]]), ([[9]], [[10]])):
        with pytest.raises(InvalidBlocks) as caught:
            plan.indices((0, 0), *lists)
        assert caught.value.context["blocks"] == 10


def test_the_highest_block_is_allowed():
    mine, theirs = plan_of().indices((0, 0), [[63]], [[63]])
    assert (mine.tolist(), theirs.tolist()) == ([63], [63])


def test_sparse_ids_are_checked_too():
    plan = plan_of(block_count=1 << 20)
    far = (1 << 20) - 1
    mine, theirs = plan.indices((0, 0), [[far, 2]], [[far, 3]])
    assert (mine.tolist(), theirs.tolist()) == ([2, far], [3, far])
    for blocks, twice in (([far, far], far), ([2, far, far], far), ([4, 2, 4], 4), ([1, 3, 3, 7], 3)):
        with pytest.raises(InvalidBlocks) as caught:
            plan.indices((0, 0), [blocks], [[far, 3, 5, 6]])
        assert (caught.value.code, caught.value.context["block"]) == ("local-block-twice", twice)


def test_only_the_null_block_may_be_there_twice():
    local = replace(build_engine(DENSE, EngineSpec())[0, 0], null_block=0)
    plan = plan_transfer(local, build_engine(DENSE, EngineSpec()))
    mine, theirs = plan.indices((0, 0), [[0, 0, 5]], [[1, 2, 3]])
    assert (mine.tolist(), theirs.tolist()) == ([5], [3])
    with pytest.raises(InvalidBlocks) as caught:
        plan.indices((0, 0), [[0, 5, 0, 5]], [[1, 2, 3, 4]])
    assert caught.value.context["block"] == 5


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1))
def test_place_order_sorts(values):
    places = np.array(values)
    order = place_order(places)
    if order is None:
        assert len(set(values)) < len(values) or max(values) >= 64 * len(values) + 4096
    else:
        assert places[order].tolist() == sorted(values)


def test_tables_are_for_places_that_lie_close():
    for count in (1, 2, 3):
        last = 64 * count + 4096 - 1
        assert place_order(np.array([last, *range(count - 1)])).tolist() == [*range(1, count), 0]
        assert place_order(np.array([last + 1, *range(count - 1)])) is None


def test_which_lists_need_no_arithmetic():
    whole = pairing(16, 16)
    assert _is_one_to_one(whole, (None, None))
    assert _is_one_to_one(pairing(16, 16, window=4), (None, None))
    for nulls in ((0, None), (None, 0), (1, 1)):
        assert not _is_one_to_one(whole, nulls)
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
        assert not _is_one_to_one(other, (None, None))


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
    unit = common_unit_tokens(mine.page_tokens, theirs.page_tokens, mine.deal, theirs.deal)
    pair = Pairing(0, 0, mine, theirs, unit, mine.page_tokens // unit, theirs.page_tokens // unit)
    peer = held_places(theirs, peer_ids, peer_first)
    expected = {(*peer[token], *place) for token, place in held_places(mine, local_ids, first).items() if token in peer}
    expected = sorted(both for both in expected if both[1] % unit == 0)
    expected = [(page, inside // unit, at, within // unit) for at, within, page, inside in expected]
    assert pairs(pair, np.array(local_ids, dtype=np.int64), peer_ids, (first, peer_first)) == expected


@st.composite
def sliced_regions(draw):
    """Regions, and slices of their pages: (region, offset, step)."""
    units, length = draw(st.integers(1, 3)), 4
    regions, slices, address = [], [], 1 << 40
    for number in range(draw(st.integers(1, 4))):
        step = length * draw(st.integers(1, 2)) if units > 1 else 0
        stride = max(step * units, length) + draw(st.sampled_from([0, 0, 12]))
        count = draw(st.integers(1, 4))
        regions.append(Region(address, stride, stride, count, (), device=number))
        slices += [(number, 0, step)] * draw(st.integers(0, 2))
        address += 1 << 20
    return units, regions, slices or [(0, 0, length if units > 1 else 0)]


@settings(deadline=None)
@given(sliced_regions(), st.integers(0, 5))
def test_every_page_and_unit_has_its_descriptor(drawn, before):
    units, regions, slices = drawn
    region, offset, step = (np.array(column) for column in zip(*slices, strict=True))
    rows, rule, total = build_rows(regions, region, offset, step, np.full(len(slices), 4), units, before)
    wide = expand_rows(rows).tolist()
    assert total == before + len(wide)
    assert len(rows) <= len(slices) * units
    pages = np.repeat(np.arange(min(r.page_count for r in regions)), units)
    unit = np.tile(np.arange(units), len(pages) // units)
    found = _indices([(rule, pages, unit)]).reshape(len(slices), len(pages)) - before
    for (number, start, jump), indices in zip(slices, found.tolist(), strict=True):
        base, stride = regions[number].base_address, regions[number].page_stride_bytes
        expected = [[base + p * stride + start + u * jump, 4, number] for p, u in zip(pages, unit, strict=True)]
        assert [wide[index] for index in indices] == expected


def test_states_pair_from_the_end():
    model = ModelSpec(("mamba2",), state=StateSpec(heads=2, head_dim=2, state_dim=2, conv_rows=2))
    plan = plan_of(model)
    assert [side.tolist() for side in plan.indices((0, 0), [[5]], [[7, 8]])] == [[5], [8]]
    assert [side.tolist() for side in plan.indices((0, 0), [[5, 6]], [[7]])] == [[5], [7]]
    assert [side.tolist() for side in plan.indices((0, 0), [[5, 6]], [[8, 7]])] == [[6, 5], [7, 8]]
    assert [side.tolist() for side in plan.indices((0, 0), [[]], [[7]])] == [[], []]
    with pytest.raises(InvalidBlocks) as caught:
        plan.indices((0, 0), [[5, 6, 4]], [[7]])
    assert caught.value.code == "state-list-too-long"


def test_hybrid_groups_share_memory_but_no_block():
    state = StateSpec(heads=2, head_dim=2, state_dim=2, conv_rows=2)
    plan = plan_of(ModelSpec(("attention", "mamba2"), 2, 4, state=state), block_tokens=32, kernel_block_tokens=16)
    assert plan.expected_bytes([[3], [4]], [[3], [4]]) > 0
    ((views),) = find_aliases(plan.local)
    attention, memory = plan.local.groups[0], plan.local.regions[0]
    assert attention.pages_per_block == 2
    assert [view.stride for view in views] == [memory.page_stride_bytes * 2] * 2
    extents = {view.group: view.extent for view in views}
    assert extents == {0: memory.page_stride_bytes + memory.page_bytes, 1: plan.local.regions[1].page_bytes}
    with pytest.raises(InvalidBlocks) as caught:
        plan.indices((0, 0), [[3], [3]], [[3], [4]])
    assert caught.value.code == "local-block-twice"
    assert caught.value.context["groups"] == (0, 1)
    for lists in ([[3, 8], [8]], [[8, 3], [9, 5, 8]], [[5, 3, 4], [4]]):
        with pytest.raises(InvalidBlocks):
            plan.indices((0, 0), lists, [[1, 2, 3], [4, 5, 6]])
    separate = plan_of(ModelSpec(("attention", "sliding"), 2, 4, window_tokens=64))
    assert separate.expected_bytes([[3], [3]], [[3], [4]]) > 0
    assert find_aliases(separate.local) == ()
    high = plan_of(
        ModelSpec(("attention", "mamba2"), 2, 4, state=state), block_tokens=32, base_address=(1 << 64) - (1 << 20)
    )
    assert high.expected_bytes([[3], [4]], [[3], [4]]) > 0
    with pytest.raises(InvalidBlocks):
        high.indices((0, 0), [[4], [4]], [[3], [4]])
