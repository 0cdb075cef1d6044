"""Boxes: the cells that two layouts of one layer have in common, as strided blocks on both sides.

Theory of operation. Two members of one layer are intersected field by field: interval by interval on every axis, and
one *unit* of tokens on the token axis. Layers that use the same two layouts have the same boxes, so these are built
once per pair of layouts and remembered with the places (regions and offsets) at which they apply.

Worked example. A page of 4 tokens; 4 heads in the model; a key of a head is 8 bytes. This rank (tp 1) holds heads 0..3,
heads outermost: a head steps 4 * 8 = 32 bytes, a token 8. The peer (rank 1 of tp 2) holds heads 2..3, tokens outermost:
a token steps 2 * 8 = 16 bytes, a head 8. The pages are equal, so the unit is 4 tokens. The common interval of heads is
[2, 4), which begins 2 * 32 = 64 bytes into our page and 0 bytes into the peer's. With axes (count, stride here, stride
there) the box is

    Box(axes=((4, 8, 16), (2, 32, 8), (8, 1, 1)), here=64, there=0, element_bytes=1)

whose cell (token 3, head 3) is at 64 + 3 * 8 + 1 * 32 = 120 here and at 3 * 16 + 1 * 8 = 56 there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, final

from kv_topology.arithmetic import common_unit_tokens
from kv_topology.errors import UnsupportedTopology
from kv_topology.geometry import check_fields_match, check_groups_match, check_names_match
from kv_topology.plan.readers import choose_pieces, field_class

if TYPE_CHECKING:
    from collections.abc import Collection

    from kv_topology.arithmetic import BoxAxis
    from kv_topology.geometry import RankGeometry
    from kv_topology.model import FieldLayout, Group, Layout

__all__ = ["Box", "Overlap", "Pairing", "Place", "find_overlaps", "pairing_of"]


class Place(NamedTuple):
    """Where two members meet: region numbers, and the members' byte offsets in their pages."""

    local_region: int
    local_offset: int
    peer_region: int
    peer_offset: int


@final
@dataclass(frozen=True, slots=True)
class Pairing:
    """A local and a peer group whose blocks hold the same layers, and the token unit between them.

    Attributes:
        local_group: Group number here.
        peer_group: Group number at the peer.
        local: The local group.
        peer: The peer's group.
        unit_tokens: Tokens of a unit; 0 for states, where the unit is a page.
        local_units: Units in a local page.
        peer_units: Units in a peer page.
    """

    local_group: int
    peer_group: int
    local: Group
    peer: Group
    unit_tokens: int
    local_units: int
    peer_units: int


def pairing_of(local: RankGeometry, peer: RankGeometry, local_group: int, peer_group: int) -> Pairing:
    """Return how blocks of a local group relate to blocks of a peer group."""
    mine, theirs = local.groups[local_group], peer.groups[peer_group]
    if mine.is_state:
        return Pairing(local_group, peer_group, mine, theirs, 0, 1, 1)
    unit = common_unit_tokens(mine.page_tokens, theirs.page_tokens, mine.deal, theirs.deal)
    return Pairing(local_group, peer_group, mine, theirs, unit, mine.page_tokens // unit, theirs.page_tokens // unit)


@final
@dataclass(frozen=True, slots=True)
class Box:
    """Cells that two members share: the same cells on both sides, at different strides.

    Attributes:
        axes: (count, local stride, peer stride) in bytes per axis, in the field's canonical order.
        here: Offset of the first cell relative to the local member.
        there: Offset relative to the peer's member.
        element_bytes: Bytes of a cell.
        local_step: Bytes from one unit to the next in a local page, 0 if it has but one.
        peer_step: The same at the peer.
    """

    axes: tuple[BoxAxis, ...]
    here: int
    there: int
    element_bytes: int
    local_step: int
    peer_step: int


@final
@dataclass(frozen=True, slots=True)
class Overlap:
    """The boxes of one pair of layouts, and every place at which two members with these layouts meet."""

    boxes: tuple[Box, ...]
    places: list[Place]


def _box(local: FieldLayout, peer: FieldLayout, pairing: Pairing, interval: tuple[int, int]) -> Box | None:
    """Return the intersection of two parts of a field with a piece of its split axis, or None when it is empty."""
    here, there = local.offset_bytes, peer.offset_bytes
    axes: list[BoxAxis] = []
    token = local.token_axis
    local_step = peer_step = 0
    for mine in local.axes:
        theirs = peer.axis(mine.name)
        if theirs is None:  # pragma: no cover - check_fields_match has seen to it
            return None
        if mine is token:
            axes.append((pairing.unit_tokens, mine.stride_bytes, theirs.stride_bytes))
            local_step = pairing.unit_tokens * mine.stride_bytes if pairing.local_units > 1 else 0
            peer_step = pairing.unit_tokens * theirs.stride_bytes if pairing.peer_units > 1 else 0
            continue
        low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if mine.split == "tp":
            low, high = max(low, interval[0]), min(high, interval[1])
        if low >= high:
            return None
        here += (low - mine.start) * mine.stride_bytes
        there += (low - theirs.start) * theirs.stride_bytes
        axes.append((high - low, mine.stride_bytes, theirs.stride_bytes))
    return Box(tuple(axes), here, there, local.element_bytes, local_step, peer_step)


def _check_unit(local: FieldLayout, pairing: Pairing, layer: str) -> None:
    if pairing.unit_tokens and local.token_axis is None and max(pairing.local_units, pairing.peer_units) > 1:
        mine, theirs = pairing.local.page_tokens, pairing.peer.page_tokens
        raise UnsupportedTopology(
            "packed-block-needs-equal-pages",
            f"Field {local.name!r} of layer {layer!r} keeps a block in the order {local.packing!r} of a kernel, so "
            f"pages cannot be cut: {mine} tokens here, {theirs} at the peer. Use the same block size on both sides.",
            {"local": mine, "peer": theirs, "packing": local.packing},
        )


def _layout_boxes(
    mine: Layout, theirs: Layout, pairing: Pairing, local: RankGeometry, peer: RankGeometry, layer: str
) -> tuple[Box, ...]:
    """Return the boxes of all fields that two layouts share and that are read from this producer rank."""
    found: list[Box] = []
    for one in mine.fields:
        for two in theirs.fields:
            if one.name == two.name:
                check_fields_match(one, two, layer)
                _check_unit(one, pairing, layer)
                kind = field_class(one, pairing.local, pairing.peer)
                for piece in choose_pieces(kind, local.tp_size, local.tp_rank, peer.tp_size):
                    if piece.producer == peer.tp_rank:
                        box = _box(one, two, pairing, (piece.start, piece.stop))
                        found += [box] if box is not None else []
    return tuple(found)


def find_overlaps(
    local: RankGeometry, peer: RankGeometry, layers: Collection[str]
) -> list[tuple[Pairing, list[Overlap]]]:
    """Return what a local rank reads from one producer rank, by pair of groups and by pair of layouts.

    Args:
        local: This rank.
        peer: The producer rank.
        layers: Layers to read from its stage.

    Raises:
        GeometryMismatch: The two sides disagree about a field or a group, with both values.
        UnsupportedTopology: `packed-block-needs-equal-pages`.
    """
    found: dict[tuple[int, int], tuple[Pairing, dict[tuple[Layout, Layout], Overlap]]] = {}
    # Most layers look alike, so the names of their fields are compared once.
    checked: set[tuple[tuple[Layout, ...], tuple[Layout, ...]]] = set()
    for layer, mine in local.placements.items():
        theirs = peer.placements.get(layer) if layer in layers else None
        if theirs is None:
            continue
        groups = (mine[0][1].group, theirs[0][1].group)
        if groups not in found:
            check_groups_match(local.groups[groups[0]], peer.groups[groups[1]], layer)
            found[groups] = (pairing_of(local, peer, *groups), {})
        pairing, overlaps = found[groups]
        layouts = (tuple(member.layout for _, member in mine), tuple(member.layout for _, member in theirs))
        if layouts not in checked:
            check_names_match(mine, theirs, layer)
            checked.add(layouts)
        for (local_region, one), (peer_region, two) in product(mine, theirs):
            pair = (one.layout, two.layout)
            if pair not in overlaps:
                overlaps[pair] = Overlap(_layout_boxes(*pair, pairing, local, peer, layer), [])
            overlaps[pair].places.append(Place(local_region, one.offset_bytes, peer_region, two.offset_bytes))
    return [
        (pairing, [overlap for overlap in overlaps.values() if overlap.boxes]) for pairing, overlaps in found.values()
    ]
