"""`plan_transfer`: turn geometries into everything that a consumer rank needs to read from a producer engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

import numpy as np

from kv_topology._aliases import check_disjoint_groups, find_aliases
from kv_topology._boxes import find_overlaps
from kv_topology._canonical import DescriptorMeaning, explain
from kv_topology._errors import InvalidGeometry, UnsupportedTopology
from kv_topology._estimate import CostModel, Estimate, make_estimate
from kv_topology._link import Link, list_rules
from kv_topology._lists import check_tokens, read_lists
from kv_topology._readers import Readers
from kv_topology._shown import shown_ranks
from kv_topology._slices import build_table
from kv_topology._staged import StagedRegion, stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kv_topology._arrays import Indices, Ints, Rows
    from kv_topology._blocks import BlockPairs
    from kv_topology._boxes import Overlap, Pairing
    from kv_topology._lists import BlockListLike, Blocks
    from kv_topology._model import RankGeometry
    from kv_topology._slices import SliceTable
    from kv_topology._staged import Overlaps

    Rank = tuple[int, int]

__all__ = ["Staging", "TransferPlan", "plan_transfer"]

Staging = Literal["never", "auto", "always"]


@final
class TransferPlan:
    """Everything that one consumer rank reads from one producer engine. Immutable; build it with `plan_transfer`."""

    def __init__(
        self,
        local: RankGeometry,
        peers: Mapping[Rank, RankGeometry],
        tables: Mapping[Rank, Sequence[SliceTable]],
        readers: Readers,
        estimate: Estimate,
        staged: tuple[StagedRegion, ...] = (),
    ) -> None:
        self._local = local
        self._links = {rank: Link(local, peers[rank], tables[rank]) for rank in sorted(tables)}
        self._readers = readers
        self._estimate = estimate
        self._staged = staged
        self._rules = list_rules(local, "local")
        self._aliases = find_aliases(local)

    @property
    def local(self) -> RankGeometry:
        """This rank's geometry."""
        return self._local

    @property
    def producer_ranks(self) -> tuple[Rank, ...]:
        """(pp, tp) ranks to read from, ascending."""
        return tuple(self._links)

    @property
    def notify_only_ranks(self) -> tuple[Rank, ...]:
        """(pp, tp) ranks that this rank does not read but must notify, because no other rank will."""
        return self._readers.notify_only

    @property
    def is_staged(self) -> bool:
        """Whether received pages must be permuted before use, as `staged_regions` says."""
        return bool(self._staged)

    @property
    def staged_regions(self) -> tuple[StagedRegion, ...]:
        """The permutations that complete a staged plan; empty for a direct one."""
        return self._staged

    @property
    def estimate(self) -> Estimate:
        """Costs of the direct and the staged plan, and bytes moved per token."""
        return self._estimate

    def staged_pages(
        self, local: Sequence[BlockListLike], peer: Sequence[BlockListLike], *, tokens: int
    ) -> tuple[tuple[StagedRegion, Ints], ...]:
        """Return the local pages that must be permuted after a request, per staged region; arguments as `indices`.

        Only pages that were written are returned: permuting any other page would destroy it.
        """
        by_group: dict[int, list[Ints]] = {}
        for link, pairs in self._pairs(local, peer, tokens):
            for table, pair in zip(link.tables, pairs, strict=True):
                pages = np.floor_divide(pair.local, table.pairing.local_units, dtype=np.int64)
                by_group.setdefault(table.pairing.local_group, []).append(pages)
        written = {group: np.unique(np.concatenate(parts)) for group, parts in by_group.items()}
        return tuple((region, written[region.group]) for region in self._staged)

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
        return self._rows(producer_rank)[0]

    def peer_rows(self, producer_rank: Rank) -> Rows:
        """Return uint64 (m, 5) rows of the producer's pages; m is n unless the page sizes differ."""
        return self._rows(producer_rank)[1]

    def _rows(self, producer_rank: Rank) -> tuple[Rows, Rows]:
        if producer_rank in self._readers.notify_only:
            return np.empty((0, 5), dtype=np.uint64), np.empty((0, 5), dtype=np.uint64)
        link = self._link(producer_rank)
        return link.local_rows, link.peer_rows

    def indices(
        self, producer_rank: Rank, local: Sequence[BlockListLike], peer: Sequence[BlockListLike], *, tokens: int
    ) -> tuple[Indices, Indices]:
        """Return (local, peer) int32 descriptor indices of equal length for one request.

        Every ordered token that lies in a real local block is moved: those from the local list's first token up to
        `tokens`. A block that holds an ordered token is filled whole: its end comes from the peer's block, or repeats
        what the peer has. Blocks at or beyond `tokens` hold nothing ordered and are ignored.

        Args:
            producer_rank: (pp, tp) of one of `producer_ranks`.
            local: Block list to fill per local group; the un-cached tail after a prefix hit.
            peer: The producer's block list per peer group.
            tokens: End of what is ordered: the tokens of the prompt that are in local KV after the read.

        Raises:
            InvalidBlocks: Malformed lists, ids out of range or written twice, or a peer that lacks ordered tokens.
        """
        link = self._link(producer_rank)
        return link.indices(link.block_pairs(self._read_local(local), peer, check_tokens(tokens)))

    def expected_bytes(self, local: Sequence[BlockListLike], peer: Sequence[BlockListLike], *, tokens: int) -> int:
        """Return the bytes that a request moves into this rank from all producer ranks; arguments as `indices`."""
        return sum(
            int(table.columns.length.sum()) * len(pair)
            for link, pairs in self._pairs(local, peer, tokens)
            for table, pair in zip(link.tables, pairs, strict=True)
        )

    def _pairs(
        self, local: Sequence[BlockListLike], peer: Sequence[BlockListLike], tokens: int
    ) -> Iterator[tuple[Link, list[BlockPairs]]]:
        """Return the pairs of every producer rank."""
        blocks, end = self._read_local(local), check_tokens(tokens)
        for link in self._links.values():
            yield link, link.block_pairs(blocks, peer, end)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that this rank receives per token of the prompt, states left out."""
        return self._estimate.bytes_per_token

    def explain(self, producer_rank: Rank, index: int, *, is_local: bool) -> DescriptorMeaning:
        """Return which layers, fields, block and page a descriptor index of one side stands for.

        Args:
            producer_rank: (pp, tp) of one of `producer_ranks`.
            index: An index as `indices` returns them.
            is_local: Whether it is a local or the producer's index.
        """
        link = self._link(producer_rank)
        return explain(link, self._local if is_local else link.peer, index, is_local=is_local)

    def _link(self, producer_rank: Rank) -> Link:
        link = self._links.get(producer_rank)
        if link is None:
            raise UnsupportedTopology(
                f"This rank reads nothing from producer rank {producer_rank}; it reads {shown_ranks(self._links)}.",
                code="rank-not-read",
                context={"rank": producer_rank},
            )
        return link

    def _read_local(self, lists: Sequence[BlockListLike]) -> list[Blocks]:
        local = read_lists(lists, self._rules)
        check_disjoint_groups(self._aliases, local)
        return local


def plan_transfer(
    local: RankGeometry,
    peers: Mapping[Rank, RankGeometry],
    *,
    peer_tp: int | None = None,
    staging: Staging = "never",
    cost: CostModel | None = None,
) -> TransferPlan:
    """Return the plan by which a consumer rank reads from a producer engine.

    Args:
        local: This rank.
        peers: Geometry of the producer's ranks by (pp, tp); at least those that `target_ranks` names.
        peer_tp: Tensor-parallel size of the producer, checked against the peers' own word if given.
        staging: "never" for direct plans only; "auto" for the cheaper kind, where the caller can permute pages;
            "always" to insist.
        cost: Prices by which "auto" decides.

    Raises:
        InvalidGeometry: `peers-empty`, `peer-rank-differs`.
        GeometryMismatch: The two sides are not the same model, with both values.
        UnsupportedTopology: No plan exists: `layer-not-held`, `peer-missing`, `no-producer-holds`,
            `not-stageable`, ...
    """
    _check_peers(peers, peer_tp)
    readers = Readers(local, peers)
    overlaps = _overlaps(local, peers, readers)
    tables = _tables(overlaps)
    staged = stage(tables, overlaps) if staging != "never" else None
    estimate = make_estimate(tables, staged, cost or CostModel())
    if staging == "always" and staged is None:
        raise UnsupportedTopology(
            "The plan cannot be staged: pages have gaps, tokens are dealt out, or a producer holds more than is read. "
            'Use staging="auto", which then plans a direct read.',
            code="not-stageable",
        )
    if staged is not None and (staging == "always" or estimate.is_staged_cheaper):
        return TransferPlan(local, peers, staged[0], readers, estimate, staged[1])
    return TransferPlan(local, peers, tables, readers, estimate)


def _overlaps(
    local: RankGeometry, peers: Mapping[Rank, RankGeometry], readers: Readers
) -> dict[Rank, list[tuple[Pairing, list[Overlap]]]]:
    """Return the overlaps to read from every producer rank, by pair of groups; pairs that share nothing are left out."""
    return {
        rank: [pair for pair in find_overlaps(local, peers[rank], readers.layers_of(rank[0])) if pair[1]]
        for rank in readers.required()
    }


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
    if not peers:
        raise InvalidGeometry("There is no peer to read from: `peers` is empty.", code="peers-empty")
    sizes = {(peer.tp_size, peer.pp_size) for peer in peers.values()}
    for rank, peer in peers.items():
        if rank != (peer.pp_rank, peer.tp_rank) or len(sizes) != 1 or peer_tp not in {None, peer.tp_size}:
            raise InvalidGeometry(
                f"The peer known as rank {rank} of tp {peer_tp or 'any'} says that it is "
                f"{(peer.pp_rank, peer.tp_rank)} of tp {peer.tp_size}, pp {peer.pp_size}.",
                code="peer-rank-differs",
                fault="peer",
                context={"rank": rank, "says": (peer.pp_rank, peer.tp_rank), "tp": peer.tp_size, "pp": peer.pp_size},
            )
