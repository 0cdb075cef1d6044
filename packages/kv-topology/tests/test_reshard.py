"""The layout of another rank, derived from ours: it is what that rank would have built itself, or a refusal."""

import random
from itertools import pairwise, product

import pytest
from helpers import AttentionShape, refused, sampled

from kv_topology import (
    Axis,
    FieldLayout,
    Group,
    Layout,
    Member,
    RankGeometry,
    Region,
    from_document,
    reshard,
    to_document,
)
from kv_topology.resharding import reshard_layout
from kv_topology.tools.engine import StateSpec, attention_layouts, state_layout


@pytest.mark.parametrize(("family", "number"), [("packed", 0), ("halves", 0), ("split", 0), ("split", 1)])
@pytest.mark.parametrize(("order", "peer_order"), list(product(("HND", "NHD"), repeat=2)))
@pytest.mark.parametrize("head_dim", [1, 3])
def test_attention_pages_of_every_shard(family, number, order, peer_order, head_dim):
    swap = None if order == peer_order else peer_order[:2]
    for tp, peer_tp, tokens, peer_tokens in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8), (2, 4), (1, 6)):
        mine = attention_layouts(f"{family}-{order}", 4, head_dim, tokens, 2, tp, tp - 1)[number]
        for rank in range(peer_tp):
            theirs = attention_layouts(f"{family}-{peer_order}", 4, head_dim, peer_tokens, 2, peer_tp, rank)[number]
            found = reshard_layout(mine, tp=(peer_tp, rank), page_tokens=peer_tokens, order=swap)
            assert same_cells(found, theirs)


def same_cells(found, expected):
    """Whether two layouts put the same cells at the same bytes; the stride of an axis with one part is no one's."""
    for one, two in zip(found.fields, expected.fields, strict=True):
        if (one.name, one.offset_bytes, one.element_bytes) != (two.name, two.offset_bytes, two.element_bytes):
            return False
        for left, right in zip(one.axes, two.axes, strict=True):
            if (left.name, left.start, left.stop, left.size) != (right.name, right.start, right.stop, right.size):
                return False
            if left.count > 1 and left.stride_bytes != right.stride_bytes:
                return False
    return True


@pytest.mark.parametrize("kind", ["mamba2", "mamba1", "gated-delta"])
def test_states_of_every_shard(kind):
    def make(tp, rank):
        return state_layout(kind, StateSpec(heads=8, head_dim=4, state_dim=2, groups=4), tp, rank)

    for tp, peer_tp in product((1, 2, 4), repeat=2):
        for rank in range(peer_tp):
            found = reshard_layout(make(tp, 0), tp=(peer_tp, rank), page_tokens=0)
            assert same_cells(found, make(peer_tp, rank))


def field(name, offset, *axes):
    """A field of two-byte elements; axes are (name, count, stride)."""
    return FieldLayout(
        name, 2, offset, tuple(Axis(n, c, 0, c, stride, "tp" if n == "head" else "whole") for n, c, stride in axes)
    )


def moved(*fields):
    found = reshard_layout(Layout(fields), tp=(2, 0), page_tokens=4)
    return [(part.offset_bytes, *((axis.count, axis.stride_bytes) for axis in part.axes)) for part in found.fields]


def test_padding_inside_a_cell_stays():
    one = field("a", 0, ("head", 4, 32), ("channel", 4, 2))
    two = field("b", 16, ("head", 4, 32), ("channel", 3, 2))
    assert moved(one, two) == [(0, (2, 32), (4, 2)), (16, (2, 32), (3, 2))]


def test_padding_between_fields_stays():
    one, two = field("a", 8, ("head", 4, 6), ("channel", 3, 2)), field("b", 40, ("head", 4, 2))
    assert moved(one, two) == [(8, (2, 6), (3, 2)), (28, (2, 2))]
    assert moved(two, one) == [(28, (2, 2)), (8, (2, 6), (3, 2))]


def test_rows_of_two_fields_that_take_turns_are_cells():
    one, two = (field(name, offset, ("row", 3, 8), ("head", 2, 2)) for name, offset in (("a", 0), ("b", 4)))
    assert moved(one, two) == [(0, (3, 4), (1, 2)), (2, (3, 4), (1, 2))]


@pytest.mark.parametrize(
    "fields",
    [
        # Rows of two fields take turns, below the heads of only one of them.
        (field("a", 0, ("head", 2, 100), ("x", 2, 10)), field("b", 20, ("head", 2, 100), ("row", 2, 30))),
        (field("a", 0, ("head", 2, 100), ("row", 2, 30)), field("b", 20, ("head", 2, 100), ("x", 2, 10))),
        # An element of one lies in a gap of the other.
        (field("a", 0, ("head", 2, 100), ("x", 3, 4)), field("b", 6, ("head", 2, 100))),
        (field("a", 0, ("head", 2, 4)), field("b", 2, ("head", 2, 4), ("x", 1, 50))),
    ],
)
def test_woven_fields_are_refused(fields):
    with refused("layout-not-dense", field="b"):
        moved(*fields)


def test_gaps_between_heads_are_not_dense():
    with refused("layout-not-dense", axis="row"):
        moved(field("a", 0, ("row", 2, 21), ("head", 4, 2)))


@pytest.mark.parametrize(("heads", "tokens", "is_refused"), [(2, 2, True), (3, 2, True), (1, 4, False), (4, 1, False)])
def test_heads_and_tokens_with_something_between_cannot_be_swapped(heads, tokens, is_refused):
    between = field("a", 0, ("token", tokens, heads * 8), ("row", 4, heads * 2), ("head", heads, 2))

    def swap(order):
        return reshard_layout(Layout((between,)), tp=(1, 0), page_tokens=tokens, order=order)

    assert swap("NH").fields == (between,)
    if is_refused:
        with refused("layout-not-dense"):
            swap("HN")
    else:
        assert swap("HN").fields[0].axis("row").stride_bytes == heads * 2


@pytest.mark.parametrize("seed", sampled(range(40), 8))
def test_regions_of_another_rank_share_memory_exactly_where_ours_do(seed):
    rng = random.Random(seed)
    layouts = {tokens: AttentionShape(4, rng.choice((2, 3)), tokens).layout("packed-HND") for tokens in (2, 4)}
    regions: list[Region] = []
    next_address = 1 << 20
    for number in range(rng.randint(2, 6)):
        group = rng.randrange(2)
        layout = layouts[(2, 4)[group]]
        pages = rng.randint(1, 5)
        taken = {region.base_address for region in regions if region.members[0].group == group}
        open_bases = [region.base_address for region in regions if region.base_address not in taken]
        base = rng.choice(open_bases) if open_bases and rng.random() < 0.7 else next_address
        next_address += 1 << 20
        member = Member(f"layer {number}", layout, group, 0)
        regions.append(Region(base, layout.extent_bytes, layout.extent_bytes, pages, (member,)))
    ours = RankGeometry(
        tp_size=1, tp_rank=0, groups=(Group("attention", 2), Group("attention", 4)), regions=tuple(regions)
    )
    document = reshard(to_document(ours), tp_size=rng.choice((1, 2, 4)), tp_rank=0, page_tokens=6)
    theirs = from_document(document).regions

    for (mine, its), (other, beside) in product(zip(regions, theirs, strict=True), repeat=2):
        assert (mine.base_address == other.base_address) == (its.base_address == beside.base_address)
    ends: dict[int, int] = {}
    for its in theirs:
        end = its.base_address + its.page_stride_bytes * its.page_count
        ends[its.base_address] = max(ends.get(its.base_address, 0), end)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(ends.items()))), "memory of two bases overlaps"
