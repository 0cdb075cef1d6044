"""Byte slices between a local page and a producer's page, for every layer that the two ranks share.

Theory of operation. Two members of one layer are intersected field by field: interval by interval on every axis, and
one *unit* of tokens on the token axis. That gives boxes, and `_runs` turns boxes into contiguous runs. Layers that use
the same two layouts have the same runs, so these are built once per pair of layouts and then placed for all layers at
once. Runs that touch on both sides are joined even across fields and layers: a page that agrees is one slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import grid
from kv_topology._compare import check_fields_match, check_groups_match
from kv_topology._errors import GeometryMismatch, UnsupportedTopology
from kv_topology._runs import Runs, box_runs, join_runs, run_count
from kv_topology._select import FieldClass, choose_pieces
from kv_topology._shards import common_unit_tokens

if TYPE_CHECKING:
    from kv_topology._arrays import Ints
    from kv_topology._model import FieldLayout, Group, Layout, Member, RankGeometry
    from kv_topology._runs import BoxAxis

__all__ = ["MAX_SLICES", "Pairing", "SliceTable", "build_slices", "field_class", "pairing_of"]

MAX_SLICES = 1 << 22
"""Slices of one producer rank beyond which a direct plan is refused."""


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


def field_class(field: FieldLayout, consumer: Group, producer: Group) -> FieldClass:
    """Return the class that decides from which producer ranks a field is read."""
    axis = field.split_axis
    return FieldClass(
        axis.size if axis is not None else 0,
        consumer.deal.size,
        consumer.deal.interleave_tokens,
        producer.deal.size,
        producer.deal.interleave_tokens,
    )


@final
@dataclass(frozen=True, slots=True)
class SliceTable:
    """Slices of one pairing with one producer rank, one per row; all columns int64 (n,).

    Attributes:
        pairing: The groups and their unit.
        local_region: Region number here.
        local_offset: Byte offset in a local page, of the page's first unit.
        local_step: Bytes from one unit to the next inside a local page.
        peer_region: Region number at the peer.
        peer_offset: Byte offset in a peer page.
        peer_step: Bytes from one unit to the next inside a peer page.
        length: Bytes of the slice.
    """

    pairing: Pairing
    local_region: Ints
    local_offset: Ints
    local_step: Ints
    peer_region: Ints
    peer_offset: Ints
    peer_step: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)


def _box(
    local: FieldLayout, peer: FieldLayout, pairing: Pairing, interval: tuple[int, int]
) -> tuple[list[BoxAxis], int, int] | None:
    """Return the axes of the intersection and its two offsets, or None when it is empty."""
    here, there = local.offset_bytes, peer.offset_bytes
    axes: list[BoxAxis] = []
    token = local.token_axis
    for mine in local.axes:
        theirs = peer.axis(mine.name)
        if theirs is None:  # pragma: no cover - check_fields_match has seen to it
            return None
        if mine is token:
            axes.append((pairing.unit_tokens, mine.stride_bytes, theirs.stride_bytes))
            continue
        low, high = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
        if mine.split == "tp":
            low, high = max(low, interval[0]), min(high, interval[1])
        if low >= high:
            return None
        here += (low - mine.start) * mine.stride_bytes
        there += (low - theirs.start) * theirs.stride_bytes
        axes.append((high - low, mine.stride_bytes, theirs.stride_bytes))
    return axes, here, there


def _check_unit(local: FieldLayout, pairing: Pairing, layer: str) -> None:
    if pairing.unit_tokens and local.token_axis is None and max(pairing.local_units, pairing.peer_units) > 1:
        mine, theirs = pairing.local.page_tokens, pairing.peer.page_tokens
        raise UnsupportedTopology(
            f"Field {local.name!r} of layer {layer!r} keeps a block in the order {local.packing!r} of a kernel, so "
            f"pages cannot be cut: {mine} tokens here, {theirs} at the peer. Use the same block size on both sides.",
            code="packed-block-needs-equal-pages",
            context={"local": mine, "peer": theirs, "packing": local.packing},
        )


@final
class _LayoutPairs:
    """Builds and remembers the runs of each pair of layouts with one producer rank."""

    def __init__(self, local: RankGeometry, peer: RankGeometry) -> None:
        self._local = local
        self._peer = peer
        self._known: dict[tuple[int, int, int, int], list[tuple[int, int, Runs]]] = {}

    def runs(self, mine: Member, theirs: Member, pairing: Pairing, layer: str) -> list[tuple[int, int, Runs]]:
        """Return (local step, peer step, runs) of two members; offsets are relative to them."""
        key = (id(mine.layout), id(theirs.layout), pairing.local_group, pairing.peer_group)
        if key not in self._known:
            self._known[key] = self._build(mine.layout, theirs.layout, pairing, layer)
        return self._known[key]

    def _build(self, mine: Layout, theirs: Layout, pairing: Pairing, layer: str) -> list[tuple[int, int, Runs]]:
        by_step: dict[tuple[int, int], list[Runs]] = {}
        for local in mine.fields:
            for peer in theirs.fields:
                if local.name == peer.name:
                    check_fields_match(local, peer, layer)
                    _check_unit(local, pairing, layer)
                    self._add_field(local, peer, pairing, by_step)
        return [(*steps, join_runs(parts)) for steps, parts in by_step.items()]

    def _add_field(
        self, local: FieldLayout, peer: FieldLayout, pairing: Pairing, by_step: dict[tuple[int, int], list[Runs]]
    ) -> None:
        kind = field_class(local, pairing.local, pairing.peer)
        mine, theirs = local.token_axis, peer.token_axis
        steps = (0, 0)
        if mine is not None and theirs is not None:
            steps = (pairing.unit_tokens * mine.stride_bytes, pairing.unit_tokens * theirs.stride_bytes)
        for piece in choose_pieces(kind, self._local.tp_size, self._local.tp_rank, self._peer.tp_size):
            if piece.producer != self._peer.tp_rank:
                continue
            box = _box(local, peer, pairing, (piece.start, piece.stop))
            if box is None:
                continue
            _check_fineness(run_count(box[0], local.element_bytes))
            by_step.setdefault(steps, []).append(box_runs(box[0], local.element_bytes, box[1], box[2]))


def _check_fineness(count: int) -> None:
    if count > MAX_SLICES:
        raise UnsupportedTopology(
            f"The layouts of the two sides cut every page into {count} runs (limit {MAX_SLICES}); "
            "use the same layout on both sides or a staged plan.",
            code="plan-too-fine",
            context={"slices": count, "limit": MAX_SLICES},
        )


def build_slices(local: RankGeometry, peer: RankGeometry) -> list[SliceTable]:
    """Return the slices that a local rank reads from one producer rank, one table per pair of groups.

    Raises:
        GeometryMismatch: The two sides disagree about a field or a group, with both values.
        UnsupportedTopology: `packed-block-needs-equal-pages`, `plan-too-fine`.
    """
    pairs = _LayoutPairs(local, peer)
    pairings: dict[tuple[int, int], Pairing] = {}
    placed: dict[tuple[int, int], dict[int, list[tuple[int, int, int, int]]]] = {}
    blueprints: dict[int, list[tuple[int, int, Runs]]] = {}
    for layer, mine in local.placements.items():
        theirs = peer.placements.get(layer)
        if theirs is None:
            continue
        key = (mine[0][1].group, theirs[0][1].group)
        if key not in pairings:
            check_groups_match(local.groups[key[0]], peer.groups[key[1]], layer)
            pairings[key] = pairing_of(local, peer, *key)
        _check_names(mine, theirs, layer)
        for local_region, one in mine:
            for peer_region, two in theirs:
                blueprint = pairs.runs(one, two, pairings[key], layer)
                if blueprint:
                    blueprints[id(blueprint)] = blueprint
                    place = (local_region, one.offset_bytes, peer_region, two.offset_bytes)
                    placed.setdefault(key, {}).setdefault(id(blueprint), []).append(place)
    tables = [_place(pairings[key], blueprints, places) for key, places in placed.items()]
    _check_fineness(sum(len(table) for table in tables))
    return tables


def _check_names(mine: tuple[tuple[int, Member], ...], theirs: tuple[tuple[int, Member], ...], layer: str) -> None:
    if len(mine) == 1 and len(theirs) == 1 and mine[0][1].layout is theirs[0][1].layout:
        return
    wanted = {field.name for _, member in mine for field in member.layout.fields}
    offered = {field.name for _, member in theirs for field in member.layout.fields}
    if not wanted <= offered:
        raise GeometryMismatch(
            f"Layer {layer!r} needs the fields {sorted(wanted)}, the peer has {sorted(offered)}.",
            code="field-missing",
            fault="peer",
            context={"layer": layer, "local": sorted(wanted), "peer": sorted(offered)},
        )


def _place(
    pairing: Pairing,
    blueprints: dict[int, list[tuple[int, int, Runs]]],
    places: dict[int, list[tuple[int, int, int, int]]],
) -> SliceTable:
    """Put the runs of every pair of layouts at all layers' places and join what touches on both sides."""
    columns: list[Ints] = []
    for blueprint, rows in places.items():
        at = np.array(rows, dtype=np.int64)
        for local_step, peer_step, runs in blueprints[blueprint]:
            count = len(at)
            part = np.empty((7, count, len(runs)), dtype=np.int64)
            part[0] = at[:, :1]
            part[1] = at[:, 1:2] + runs.here
            part[2] = local_step
            part[3] = at[:, 2:3]
            part[4] = at[:, 3:4] + runs.there
            part[5] = peer_step
            part[6] = runs.length
            columns.append(grid(part, 7, -1))
    table = np.concatenate(columns, axis=1)
    return SliceTable(pairing, *_join_places(table))


def _join_places(table: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Join rows that lie in the same two regions with the same steps and touch on both sides."""
    order = np.lexsort((table[1], table[3], table[0]))
    table = table[:, order]
    region, offset, step, peer_region, peer_offset, peer_step, length = table
    starts = np.ones(table.shape[1], dtype=np.bool_)
    starts[1:] = (
        (np.diff(region) != 0)
        | (np.diff(peer_region) != 0)
        | (np.diff(step) != 0)
        | (np.diff(peer_step) != 0)
        | (offset[1:] != offset[:-1] + length[:-1])
        | (peer_offset[1:] != peer_offset[:-1] + length[:-1])
    )
    first = np.flatnonzero(starts)
    joined = table[:, first]
    joined[6] = np.add.reduceat(length, first)
    return joined[0], joined[1], joined[2], joined[3], joined[4], joined[5], joined[6]
