"""One producer rank's share of a plan: slices, rows, and block ids into descriptor indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from kv_topology._arrays import grid
from kv_topology._blocks import align, block_array, clip_window, pair_blocks, pair_states
from kv_topology._errors import InvalidBlocks
from kv_topology._rows import build_rows
from kv_topology._validate import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Indices, Ints
    from kv_topology._blocks import BlockPairs
    from kv_topology._model import RankGeometry
    from kv_topology._rows import IndexRule
    from kv_topology._slices import SliceTable

    BlockIds = Sequence[Sequence[int]]

__all__ = ["Alignment", "Link", "block_counts", "check_disjoint_groups", "find_aliases", "read_blocks"]


@final
class Alignment:
    """What the caller knows about where block lists begin; all optional.

    Attributes:
        tokens: Tokens of the sequence that the producer computed.
        local_first: Per local group, the place in the sequence of the list's first block.
        peer_first: The same per peer group.
    """

    __slots__ = ("local_first", "peer_first", "tokens")

    def __init__(
        self,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
        peer_first: Sequence[int] | None = None,
    ) -> None:
        self.tokens = tokens
        self.local_first = local_first
        self.peer_first = peer_first

    def firsts(self, table: SliceTable, local_ids: Ints, peer_ids: Ints, clipped: tuple[int, int]) -> tuple[int, int]:
        """Return where the two (window-clipped) lists begin; `clipped` counts the blocks cut off their heads."""
        pairing = table.pairing
        if self.local_first is None:
            return align(pairing, len(local_ids), len(peer_ids), self.tokens)
        local = _entry(self.local_first, pairing.local_group, "local_first") + clipped[0]
        if self.peer_first is not None:
            return local, _entry(self.peer_first, pairing.peer_group, "peer_first") + clipped[1]
        if self.tokens is not None:
            return local, max(0, -(-self.tokens // pairing.peer.span_tokens) - len(peer_ids))
        return local, clipped[1]


def _entry(values: Sequence[int], group: int, what: str) -> int:
    if group >= len(values) or values[group] < 0:
        raise InvalidBlocks(
            f"{what} must name a place of at least 0 for every group; group {group} has none.",
            code="block-id-malformed",
            context={"what": what, "group": group},
        )
    return values[group]


def block_counts(geometry: RankGeometry) -> list[int]:
    """Return how many scheduler blocks each group has memory for; no limit if its layers are on another stage."""
    counts = [LIMITS["page_count"]] * len(geometry.groups)
    for region in geometry.regions:
        for group in {member.group for member in region.members}:
            counts[group] = min(counts[group], region.page_count // geometry.groups[group].pages_per_block)
    return counts


def read_blocks(ids: BlockIds, counts: Sequence[int], side: str, null_block: int | None) -> list[Ints]:
    """Return the block lists of all groups as range-checked int64 arrays.

    Raises:
        InvalidBlocks: `group-count` when there is not one list per group, or as `block_array`.
    """
    if len(ids) not in {0, len(counts)}:
        raise InvalidBlocks(
            f"There are {len(ids)} {side} block lists for {len(counts)} groups.",
            code="group-count",
            context={"side": side, "lists": len(ids), "groups": len(counts)},
        )
    if len(ids) == 0:
        return [np.empty(0, dtype=np.int64) for _ in counts]
    return [block_array(group, counts[n], side, n, null_block) for n, group in enumerate(ids)]


class _View(NamedTuple):
    """Where a group's blocks lie in one run of memory."""

    base: int
    stop: int
    group: int
    stride: int
    extent: int


Alias = tuple[_View, _View]
"""Two views of different groups that overlap in memory."""


def find_aliases(geometry: RankGeometry) -> tuple[Alias, ...]:
    """Return the pairs of groups' views that share memory, as hybrid engines have them."""
    views: set[_View] = set()
    for region in geometry.regions:
        stop = region.base_address + region.page_stride_bytes * region.page_count
        for number in {member.group for member in region.members}:
            per_block = geometry.groups[number].pages_per_block
            stride = region.page_stride_bytes * per_block
            extent = region.page_stride_bytes * (per_block - 1) + region.page_bytes
            views.add(_View(region.base_address, stop, number, stride, extent))
    found: list[Alias] = []
    open_views: list[_View] = []
    for view in sorted(views):
        open_views = [other for other in open_views if other.stop > view.base]
        found += [(other, view) for other in open_views if other.group != view.group]
        open_views.append(view)
    # The views of one slot tell as much as those of the next: keep one pair of each shape.
    shapes = {(one.group, two.group, two.base - one.base, one[3:], two[3:]): (one, two) for one, two in found}
    return tuple(shapes.values())


def check_disjoint_groups(aliases: Sequence[Alias], local: Sequence[Ints]) -> None:
    """Raise `InvalidBlocks` (`local-block-twice`) if two groups that share memory are to be written in one place.

    Args:
        aliases: From `find_aliases`.
        local: Local block ids per group.
    """
    for one, two in aliases:
        if not len(local[one.group]) or not len(local[two.group]):
            continue
        starts = np.concatenate([local[view.group] * view.stride + (view.base - one.base) for view in (one, two)])
        stops = starts + np.repeat([one.extent, two.extent], [len(local[one.group]), len(local[two.group])])
        order = np.argsort(starts, kind="stable")
        if (starts[order][1:] < stops[order][:-1]).any():
            raise InvalidBlocks(
                f"Groups {one.group} and {two.group} share memory, and their local block lists share blocks.",
                code="local-block-twice",
                context={"groups": (one.group, two.group)},
            )


@final
class Link:
    """What one local rank reads from one producer rank.

    Attributes:
        tables: Slices by pair of groups.
        local_rows: uint64 (n, 5) strided rows here.
        peer_rows: uint64 (m, 5) strided rows at the producer.
    """

    def __init__(self, local: RankGeometry, peer: RankGeometry, tables: Sequence[SliceTable]) -> None:
        self.tables = tuple(tables)
        self.peer = peer
        local_parts = [np.empty((0, 5), dtype=np.uint64)]
        peer_parts = [np.empty((0, 5), dtype=np.uint64)]
        self.local_rules: list[IndexRule] = []
        self.peer_rules: list[IndexRule] = []
        local_total = peer_total = 0
        for t in tables:
            units = (t.pairing.local_units, t.pairing.peer_units)
            rows, rule, local_total = build_rows(
                local.regions, t.local_region, t.local_offset, t.local_step, t.length, units[0], local_total
            )
            local_parts.append(rows)
            self.local_rules.append(rule)
            rows, rule, peer_total = build_rows(
                peer.regions, t.peer_region, t.peer_offset, t.peer_step, t.length, units[1], peer_total
            )
            peer_parts.append(rows)
            self.peer_rules.append(rule)
        self.local_rows = np.concatenate(local_parts)
        self.peer_rows = np.concatenate(peer_parts)
        self._peer_blocks = block_counts(peer)
        self._local_null = local.null_block

    def block_pairs(self, local: Sequence[Ints], peer_blocks: BlockIds, known: Alignment) -> list[BlockPairs]:
        """Return the (page, unit) pairs to move, one table per pair of groups."""
        peer = read_blocks(peer_blocks, self._peer_blocks, "peer", self.peer.null_block)
        pairs: list[BlockPairs] = []
        for table in self.tables:
            pairing = table.pairing
            mine, theirs = local[pairing.local_group], peer[pairing.peer_group]
            if pairing.local.is_state or not len(mine):
                pairs.append(pair_states(pairing, mine, theirs))
                continue
            near, far = clip_window(mine, pairing.local), clip_window(theirs, pairing.peer)
            firsts = known.firsts(table, near, far, (len(mine) - len(near), len(theirs) - len(far)))
            pairs.append(pair_blocks(pairing, near, far, firsts, (self._local_null, self.peer.null_block)))
        return pairs

    def indices(self, pairs: Sequence[BlockPairs]) -> tuple[Indices, Indices]:
        """Return int32 descriptor indices, slice by slice, ascending at the peer inside a slice."""
        local = [(rule, pair.local_page, pair.local_unit) for rule, pair in zip(self.local_rules, pairs, strict=True)]
        peer = [(rule, pair.peer_page, pair.peer_unit) for rule, pair in zip(self.peer_rules, pairs, strict=True)]
        return _indices(local), _indices(peer)


def _indices(parts: Sequence[tuple[IndexRule, Ints, Ints]]) -> Indices:
    total = sum(len(rule.first) * len(page) for rule, page, _ in parts)
    out = np.empty(total, dtype=np.int32)
    start = 0
    for rule, page, unit in parts:
        stop = start + len(rule.first) * len(page)
        _fill(grid(out[start:stop], len(rule.first), len(page)), rule, page, unit)
        start = stop
    return out


def _fill(out: Indices, rule: IndexRule, page: Ints, unit: Ints) -> None:
    """Write first + page * page_step + unit * unit_step; one outer sum where all slices share the two steps."""
    first = rule.first.astype(np.int32)
    steps = np.stack([rule.page_step, rule.unit_step], axis=1)
    if bool((steps == steps[0]).all()):
        np.add(first[:, None], _place(steps[0], page, unit), out=out)
        return
    for step in np.unique(steps, axis=0):
        chosen = np.flatnonzero((steps == step).all(axis=1))
        out[chosen] = first[chosen][:, None] + _place(step, page, unit)


def _place(step: Ints, page: Ints, unit: Ints) -> Indices:
    place: Ints = page * step[0]
    if unit.any():
        place += unit * step[1]
    return place.astype(np.int32)
