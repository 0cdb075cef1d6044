"""`plan_transfer`: turn geometries, or their documents, into everything that a consumer rank reads from a producer engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast, final

import numpy as np

from kv_topology.checks import check_disjoint_groups, find_aliases
from kv_topology.document import from_document
from kv_topology.errors import InvalidBlocks, InvalidGeometry, TopologyError, UnsupportedTopology, demand, shown_ranks
from kv_topology.geometry import RankGeometry
from kv_topology.plan.blocks import MAX_TOKENS, list_rules, pair_blocks, pair_short, read_lists, short_list
from kv_topology.plan.readers import Readers, target_ranks
from kv_topology.plan.slices import build_rows, build_table, find_overlaps
from kv_topology.plan.staged import (
    Cast,
    CostModel,
    Estimate,
    StagedRegion,
    as_read,
    make_estimate,
    narrowed,
    stage,
    widened,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kv_topology.arithmetic import Indices, Ints, Rows
    from kv_topology.plan.blocks import AnyBlockList, ListRules
    from kv_topology.plan.slices import IndexRule, Pairing, SideColumns, SliceTable
    from kv_topology.plan.staged import Overlaps

__all__ = ["Planner", "Rank", "Route", "Staging", "TransferPlan", "plan_transfer"]

Rank = tuple[int, int]
Staging = Literal["never", "auto", "always"]
_NO_ROWS: Rows = np.empty((0, 5), dtype=np.uint64)


class Route(NamedTuple):
    """The reads of one request.

    Attributes:
        indices: (local, peer) int32 descriptor indices of equal length, by producer rank.
        staged: Local pages to permute after all reads are done, int64 (n,) per staged region; empty for a direct plan. Only
            pages that are written are listed: permuting any other page would destroy it.
    """

    indices: Mapping[Rank, tuple[Indices, Indices]]
    staged: tuple[tuple[StagedRegion, Ints], ...]


class _Link(NamedTuple):
    """Everything that one local rank reads from one producer rank: slices by pair of groups, and strided rows of both sides.

    Worked example of indices. Two slices (layers 0 and 1), one unit per page, regions of 100 pages: the rows are 2 x 100
    descriptors, slice 0 at indices 0..99 and slice 1 at 100..199. Pages 9 and 4 become the outer sum [0, 100] + [9, 4], row
    by row: [9, 4, 109, 104].
    """

    tables: tuple[SliceTable, ...]
    local_rows: Rows
    local_index: list[IndexRule]
    peer_rows: Rows
    peer_index: list[IndexRule]


def _link(local: RankGeometry, peer: RankGeometry, tables: Sequence[SliceTable]) -> _Link:
    here = _side(local, [(table.columns.local, table.pairing.local_units) for table in tables])
    there = _side(peer, [(table.columns.peer, table.pairing.peer_units) for table in tables])
    return _Link(tuple(tables), *here, *there)


def _side(geometry: RankGeometry, slices: Sequence[tuple[SideColumns, int]]) -> tuple[Rows, list[IndexRule]]:
    """Return uint64 (n, 5) rows of one side's slices, each table with the units of its pages, and their index rules."""
    rows, total = [_NO_ROWS], 0
    rules: list[IndexRule] = []
    for columns, units in slices:
        more, rule, total = build_rows(geometry.regions, columns, units, total)
        rows.append(more)
        rules.append(rule)
    return np.concatenate(rows), rules


@final
class TransferPlan:
    """Everything that one consumer rank reads from one producer engine. Immutable; build it with `plan_transfer`.

    Attributes:
        local: This rank's geometry.
        producer_ranks: (pp, tp) ranks to read from, ascending.
        notify_only_ranks: (pp, tp) ranks that this rank does not read but must notify, because no other rank will.
        is_staged: Whether received pages must be permuted before use, as `staged_regions` says.
        staged_regions: The permutations that complete a staged plan; empty for a direct one.
        estimate: Costs of the direct and the staged plan, and bytes moved per token.
        bytes_per_token: Bytes that this rank receives per token of the prompt, states left out.
    """

    def __init__(
        self,
        local: RankGeometry,
        peers: Mapping[Rank, RankGeometry],
        tables: Mapping[Rank, Sequence[SliceTable]],
        readers: Readers,
        estimate: Estimate,
        staged: tuple[StagedRegion, ...] = (),
    ) -> None:
        self.local: Final = local
        self.producer_ranks: Final = tuple(sorted(tables))
        self.notify_only_ranks: Final = readers.notify_only()
        self.is_staged: Final = bool(staged)
        self.staged_regions: Final = staged
        self.estimate: Final = estimate
        self.bytes_per_token: Final = estimate.bytes_per_token
        self._links = {rank: _link(local, peers[rank], tables[rank]) for rank in self.producer_ranks}
        self._readers = readers
        self._rules = list_rules(local, "local")
        self._aliases = find_aliases(local.regions, local.groups)
        # Ranks whose block lists keep the same rules and pair alike: `route` checks and pairs once for all of them.
        self._alike: dict[tuple[ListRules, tuple[Pairing, ...]], list[Rank]] = {}
        for rank, link in self._links.items():
            key = list_rules(peers[rank], "peer"), tuple(table.pairing for table in link.tables)
            self._alike.setdefault(key, []).append(rank)

    def __repr__(self) -> str:
        kind, me = "staged" if self.is_staged else "direct", (self.local.pp_rank, self.local.tp_rank)
        read = shown_ranks(self.producer_ranks)
        return f"<TransferPlan: rank {me} reads {read}, {kind}, {self.bytes_per_token:g} bytes a token>"

    def reader_count(self, producer_rank: Rank) -> int:
        """Return how many consumer ranks report a request to this producer rank, by reading or by notification."""
        return self._readers.count(producer_rank)

    def slices(self, producer_rank: Rank) -> tuple[SliceTable, ...]:
        """Return the slices read from one rank, one table per pair of groups."""
        return self._link(producer_rank).tables

    def local_rows(self, producer_rank: Rank) -> Rows:
        """Return uint64 (n, 5) rows (address, length_bytes, device, stride_bytes, count) of this rank's pages.

        A rank of `notify_only_ranks` has no rows: (0, 5).
        """
        return _NO_ROWS if producer_rank in self.notify_only_ranks else self._link(producer_rank).local_rows

    def peer_rows(self, producer_rank: Rank) -> Rows:
        """Return uint64 (m, 5) rows of the producer's pages; m is n unless the page sizes differ."""
        return _NO_ROWS if producer_rank in self.notify_only_ranks else self._link(producer_rank).peer_rows

    def route(self, local: Sequence[AnyBlockList], peer: Sequence[AnyBlockList], *, tokens: int) -> Route:
        """Return the descriptor indices of one request for every producer rank, and the pages to permute afterwards.

        Every ordered token that lies in a real local block is moved: those from the local list's first token up to
        `tokens`. A block that holds an ordered token is filled whole: its end comes from the peer's block, or repeats
        what the peer has. Blocks at or beyond `tokens` hold nothing ordered and are ignored.

        Worked example. Regions of 100 pages, one slice from each of two producer ranks, one unit per page. Local blocks
        (5, 2) from peer blocks (7, 9) pair pages 5 with 7 and 2 with 9, once for both ranks; a staged plan lists pages
        2 and 5 of its region.

        Args:
            local: Block list to fill per local group; the un-cached tail after a prefix hit.
            peer: The producer's block list per peer group, the same for all of its ranks.
            tokens: End of what is ordered: the tokens of the prompt that are in local KV after the read.

        Raises:
            InvalidBlocks: Malformed lists or `tokens` (`tokens-malformed`), ids out of range or written twice, or a peer that
                lacks ordered tokens.
        """
        return self._route(self.producer_ranks, local, peer, tokens)

    def _route(
        self, wanted: Collection[Rank], local: Sequence[AnyBlockList], peer: Sequence[AnyBlockList], tokens: int
    ) -> Route:
        if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
            shown = repr(tokens)[:60]
            raise InvalidBlocks("tokens-malformed", f"`tokens` must be an integer of 0..{MAX_TOKENS}, not {shown}.")
        short = None if self._aliases else short_list(local, self._rules)
        mine = [] if short is not None else read_lists(local, self._rules)
        if self._aliases:
            check_disjoint_groups(self._aliases, [blocks.ids[blocks.is_real] for blocks in mine])
        found: dict[Rank, tuple[Indices, Indices]] = {}
        written: dict[int, list[Ints]] = {}
        for (rules, pairings), alike in self._alike.items():
            ranks = [rank for rank in alike if rank in wanted]
            if not ranks:
                continue
            pairs = [] if short is None else pair_short(pairings, short, short_list(peer, rules), tokens)
            if not pairs:
                mine, theirs = mine or read_lists(local, self._rules), read_lists(peer, rules)
                pairs = [
                    pair_blocks(each, mine[each.local_group], theirs[each.peer_group], tokens) for each in pairings
                ]
            for rank in ranks:
                link = self._links[rank]
                here = [rule.indices(pair.local) for rule, pair in zip(link.local_index, pairs, strict=True)]
                there = [rule.indices(pair.peer) for rule, pair in zip(link.peer_index, pairs, strict=True)]
                # Joining a single array would copy it.
                found[rank] = (here[0], there[0]) if len(pairs) == 1 else (np.concatenate(here), np.concatenate(there))
            for pairing, pair in zip(pairings, pairs, strict=True) if self.is_staged else ():
                pages = np.floor_divide(pair.local, pairing.local_units, dtype=np.int64)
                written.setdefault(pairing.local_group, []).append(pages)
        pages_of = {group: np.unique(np.concatenate(parts)) for group, parts in written.items()}
        return Route(found, tuple((region, pages_of[region.group]) for region in self.staged_regions))

    def indices(
        self, producer_rank: Rank, local: Sequence[AnyBlockList], peer: Sequence[AnyBlockList], *, tokens: int
    ) -> tuple[Indices, Indices]:
        """Return the (local, peer) int32 descriptor indices of one producer rank of `producer_ranks`, as `route` does."""
        self._link(producer_rank)
        return self._route((producer_rank,), local, peer, tokens).indices[producer_rank]

    def _link(self, producer_rank: Rank) -> _Link:
        try:
            return self._links[producer_rank]
        except (KeyError, TypeError):
            raise UnsupportedTopology(
                "rank-not-read",
                f"This rank reads nothing from producer rank {producer_rank}; it reads {shown_ranks(self._links)}.",
                {"rank": producer_rank},
            ) from None


def plan_transfer(
    local: RankGeometry,
    peers: Mapping[Rank, RankGeometry],
    *,
    peer_tp: int | None = None,
    staging: Staging = "never",
    cost: CostModel | None = None,
    casts: Mapping[int, tuple[str, int, str, int]] | None = None,
) -> TransferPlan:
    """Return the plan by which a consumer rank reads from a producer engine.

    Args:
        local: This rank.
        peers: Geometry of the producer's ranks by (pp, tp); at least those that `target_ranks` names.
        peer_tp: Tensor-parallel size of the producer, checked against the peers' own word if given.
        staging: "never" for direct plans only; "auto" for the cheaper kind, where the caller can permute pages;
            "always" to insist.
        cost: Prices by which "auto" decides.
        casts: Local groups whose elements have another type at the producer, as the fields of `Cast`; the plan is then staged.

    Raises:
        InvalidGeometry: `peers-empty`, `peer-rank-differs`.
        GeometryMismatch: The two sides are not the same model, with both values.
        UnsupportedTopology: No plan exists: `layer-not-held`, `peer-missing`, `no-producer-holds`,
            `not-stageable`, ...
    """
    demand("local", local, RankGeometry)
    demand("peer_tp", peer_tp, int, NoneType)
    demand("cost", cost, CostModel, NoneType)
    _check_peers(peers, peer_tp)
    demand("staging", staging, "never", "auto", "always")
    kinds = {group: Cast(*cast) for group, cast in (casts or {}).items()}
    narrow = narrowed(local, kinds) if kinds else local
    readers = Readers(narrow, peers)
    overlaps = {
        rank: [pair for pair in find_overlaps(narrow, peers[rank], readers.layers_of(rank[0])) if pair[1]]
        for rank in readers.required()
    }
    tables = _tables(overlaps)
    staged = stage(tables, overlaps) if staging != "never" else None
    estimate = make_estimate(tables, staged, cost or CostModel())
    if staging == "always" and staged is None:
        raise UnsupportedTopology(
            "not-stageable",
            "The plan cannot be staged: pages have gaps, tokens are dealt out, or a producer holds more than is read. "
            'Use staging="auto", which then plans a direct read.',
        )
    is_staged = staged is not None and (staging == "always" or estimate.is_staged_cheaper)
    made, regions = staged if staged is not None and is_staged else (tables, as_read(tables, narrow, kinds))
    return TransferPlan(local, peers, made, readers, estimate, widened(regions, kinds))


def _tables(overlaps: Mapping[Rank, Overlaps]) -> dict[Rank, list[SliceTable]]:
    """Return the slices of every producer rank, all together within the limit of a plan."""
    tables: dict[Rank, list[SliceTable]] = {}
    count = 0
    for rank, pairs in overlaps.items():
        for pairing, found in pairs:
            table = build_table(pairing, found, before=count)
            count += len(table)
            tables.setdefault(rank, []).append(table)
    return tables


def _check_peers(peers: Mapping[Rank, RankGeometry], peer_tp: int | None) -> None:
    demand("peers", peers, Mapping)
    for peer in peers.values():
        demand("each of peers", peer, RankGeometry)
    if not peers:
        raise InvalidGeometry("peers-empty", "There is no peer to read from: `peers` is empty.")
    sizes = {(peer.tp_size, peer.pp_size) for peer in peers.values()}
    for rank, peer in peers.items():
        if rank != (peer.pp_rank, peer.tp_rank) or len(sizes) != 1 or peer_tp not in {None, peer.tp_size}:
            raise InvalidGeometry(
                "peer-rank-differs",
                f"The peer known as rank {rank} of tp {peer_tp or 'any'} says that it is "
                f"{(peer.pp_rank, peer.tp_rank)} of tp {peer.tp_size}, pp {peer.pp_size}.",
                {"rank": rank, "says": (peer.pp_rank, peer.tp_rank), "tp": peer.tp_size, "pp": peer.pp_size},
                fault="peer",
            )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Makes plans from documents; errors of a peer's document carry `fault="peer"` and the rank.

    Attributes:
        staging: As for `plan_transfer`; "never" unless the caller executes `staged_regions`.
        cost: Prices by which "auto" decides.
    """

    staging: Staging = "never"
    cost: CostModel | None = None

    def target_ranks(
        self, local: Mapping[str, object], *, peer_tp: int, peer_pp: int = 1, peer_dcp: int = 1
    ) -> Sequence[tuple[int, int]]:
        """Return the (pp, tp) ranks whose metadata this rank needs before it can plan."""
        return target_ranks(from_document(local), peer_tp=peer_tp, peer_pp=peer_pp, peer_dcp=peer_dcp)

    def geometry(self, document: Mapping[str, object], rank: tuple[int, int]) -> RankGeometry:
        """Return a peer rank's geometry for `plan`, which then need not read all documents at once; raises as `from_document`."""
        try:
            return from_document(document)
        except TopologyError as error:
            raise error.blamed_on("peer", rank=rank) from None

    def plan(
        self,
        local: Mapping[str, object],
        peers: Mapping[tuple[int, int], object],
        *,
        peer_tp: int,
        casts: Mapping[int, tuple[str, int, str, int]] | None = None,
    ) -> TransferPlan:
        """Return the plan by which this rank reads from the producer engine; raises as `plan_transfer` does.

        Args:
            local: This rank's document.
            peers: Documents by (pp, tp), or what `geometry` returned for them.
            peer_tp: Tensor-parallel size of the producer.
            casts: As for `plan_transfer`.
        """
        demand("peers", peers, Mapping)
        geometries = {
            rank: peer if isinstance(peer, RankGeometry) else self.geometry(cast("Mapping[str, object]", peer), rank)
            for rank, peer in peers.items()
        }
        return plan_transfer(
            from_document(local), geometries, peer_tp=peer_tp, staging=self.staging, cost=self.cost, casts=casts
        )
