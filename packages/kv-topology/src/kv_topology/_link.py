"""A producer rank's share of a plan: slices, rows, and the conversion of block pairs to descriptor indices.

Worked example. Two slices (layers 0 and 1), one unit per page, regions of 100 pages: the rows are 2 x 100 descriptors,
slice 0 at indices 0..99 and slice 1 at 100..199. Pages 9 and 4 become the outer sum [0, 100] + [9, 4], row by row:
[9, 4, 109, 104].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from kv_topology._arrays import grid
from kv_topology._blocks import pair_blocks
from kv_topology._lists import ListRules, read_lists
from kv_topology._rows import build_rows
from kv_topology._validate_layouts import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_topology._arrays import Indices, Rows
    from kv_topology._blocks import BlockPairs
    from kv_topology._errors import Fault
    from kv_topology._lists import BlockListLike, Blocks
    from kv_topology._model import RankGeometry
    from kv_topology._rows import IndexRule
    from kv_topology._slices import SliceTable

__all__ = ["Link", "list_rules"]


def list_rules(geometry: RankGeometry, side: Fault) -> ListRules:
    """Return the rules that a rank's block lists must keep; a group without layers here has no block count to keep to."""
    counts = [LIMITS["page_count"]] * len(geometry.groups)
    pages = {(member.group, region.page_count) for region in geometry.regions for member in region.members}
    for group, count in pages:
        counts[group] = min(counts[group], count // geometry.groups[group].pages_per_block)
    return ListRules(side, geometry.groups, tuple(counts), geometry.null_block)


@final
class Link:
    """Everything that one local rank reads from one producer rank.

    Attributes:
        tables: Slices by pair of groups.
        local_rows: uint64 (n, 5) strided rows here.
        peer_rows: uint64 (m, 5) strided rows at the producer.
    """

    def __init__(self, local: RankGeometry, peer: RankGeometry, tables: Sequence[SliceTable]) -> None:
        self.tables = tuple(tables)
        self.peer = peer
        self.local_rules: list[IndexRule] = []
        self.peer_rules: list[IndexRule] = []
        local_parts, peer_parts = [np.empty((0, 5), dtype=np.uint64)], [np.empty((0, 5), dtype=np.uint64)]
        local_total = peer_total = 0
        for table in tables:
            slices, pairing = table.columns, table.pairing
            rows, rule, local_total = build_rows(local.regions, slices.local, pairing.local_units, local_total)
            local_parts.append(rows)
            self.local_rules.append(rule)
            rows, rule, peer_total = build_rows(peer.regions, slices.peer, pairing.peer_units, peer_total)
            peer_parts.append(rows)
            self.peer_rules.append(rule)
        self.local_rows: Rows = np.concatenate(local_parts)
        self.peer_rows: Rows = np.concatenate(peer_parts)
        self._rules = list_rules(peer, "peer")

    def block_pairs(self, local: Sequence[Blocks], peer: Sequence[BlockListLike], tokens: int) -> list[BlockPairs]:
        """Return the (page, unit) pairs to move, one table per pair of groups."""
        theirs = read_lists(peer, self._rules)
        return [
            pair_blocks(t.pairing, local[t.pairing.local_group], theirs[t.pairing.peer_group], tokens)
            for t in self.tables
        ]

    def indices(self, pairs: Sequence[BlockPairs]) -> tuple[Indices, Indices]:
        """Return int32 descriptor indices, slice by slice, ascending at the peer inside a slice."""
        return (
            _indices([(rule, pair.local) for rule, pair in zip(self.local_rules, pairs, strict=True)]),
            _indices([(rule, pair.peer) for rule, pair in zip(self.peer_rules, pairs, strict=True)]),
        )


def _indices(parts: Sequence[tuple[IndexRule, Indices]]) -> Indices:
    if len(parts) == 1:
        return parts[0][0].indices(parts[0][1])
    out = np.empty(sum(len(rule.first) * len(units) for rule, units in parts), dtype=np.int32)
    start = 0
    for rule, units in parts:
        stop = start + len(rule.first) * len(units)
        rule.fill(grid(out[start:stop], len(rule.first), len(units)), units)
        start = stop
    return out
