"""`plan_transfer`: from two geometries to everything that a consumer rank needs to read from a producer engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, final

import numpy as np

from kv_topology._boxes import find_overlaps
from kv_topology._canonical import DescriptorMeaning, explain
from kv_topology._errors import InvalidGeometry, UnsupportedTopology
from kv_topology._estimate import Estimate, make_estimate
from kv_topology._link import Alignment, Link, block_counts, check_disjoint_groups, find_aliases, read_blocks
from kv_topology._readers import Readers, required_ranks
from kv_topology._slices import build_table
from kv_topology._staged import CostModel, StagedRegion, stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._arrays import Indices, Ints, Rows
    from kv_topology._model import RankGeometry
    from kv_topology._slices import SliceTable

    BlockIds = Sequence[Sequence[int]]
    Rank = tuple[int, int]

__all__ = ["Staging", "TransferPlan", "plan_transfer"]

Staging = Literal["never", "auto", "always"]


@final
class TransferPlan:
    """What one consumer rank reads from one producer engine. Immutable; build it with `plan_transfer`."""

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
        self._local_blocks = block_counts(local)
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
        """(pp, tp) ranks that this rank does not read but must notify, because nobody else will."""
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
        """What the direct and the staged plan would cost, and what moves per token."""
        return self._estimate

    def staged_pages(
        self,
        local_blocks: BlockIds,
        peer_blocks: BlockIds,
        *,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
        peer_first: Sequence[int] | None = None,
    ) -> tuple[tuple[StagedRegion, Ints], ...]:
        """Return which local pages a request leaves to be permuted, per staged region; arguments as `indices`.

        Only pages that were written are named: permuting any other page would destroy it.
        """
        local = self._read_local(local_blocks)
        known = Alignment(tokens, local_first, peer_first)
        by_group: dict[int, list[Ints]] = {}
        for link in self._links.values():
            for table, pair in zip(link.tables, link.block_pairs(local, peer_blocks, known), strict=True):
                by_group.setdefault(table.pairing.local_group, []).append(pair.local_page)
        pages = {group: np.unique(np.concatenate(parts)) for group, parts in by_group.items()}
        return tuple((region, pages[region.group]) for region in self._staged)

    def reader_count(self, producer_rank: Rank) -> int:
        """Return how many consumer ranks report a request to this producer rank, by reading or by notification."""
        return self._readers.count(producer_rank)

    def slices(self, producer_rank: Rank) -> tuple[SliceTable, ...]:
        """Return the slices read from one rank, one table per pair of groups."""
        return self._link(producer_rank).tables

    def local_rows(self, producer_rank: Rank) -> Rows:
        """Return uint64 (n, 5) rows (address, length_bytes, device, stride_bytes, count) of this rank's pages."""
        return self._link(producer_rank).local_rows

    def peer_rows(self, producer_rank: Rank) -> Rows:
        """Return uint64 (m, 5) rows of the producer's pages; m is n unless the page sizes differ."""
        return self._link(producer_rank).peer_rows

    def indices(
        self,
        producer_rank: Rank,
        local_blocks: BlockIds,
        peer_blocks: BlockIds,
        *,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
        peer_first: Sequence[int] | None = None,
    ) -> tuple[Indices, Indices]:
        """Return (local, peer) int32 descriptor indices of equal length for one request.

        Args:
            producer_rank: (pp, tp) of one of `producer_ranks`.
            local_blocks: Scheduler block ids to fill per local group; the un-cached tail after a prefix hit.
            peer_blocks: The producer's scheduler block ids per peer group.
            tokens: Tokens that the producer computed, where block sizes differ and counts cannot tell.
            local_first: Per local group, the place of the list's first block in the sequence (its cached blocks).
            peer_first: The same per peer group; 0 if only `local_first` is given.

        Raises:
            InvalidBlocks: On ids out of range, written twice, or lists that do not cover the tokens.
        """
        link = self._link(producer_rank)
        pairs = link.block_pairs(
            self._read_local(local_blocks), peer_blocks, Alignment(tokens, local_first, peer_first)
        )
        return link.indices(pairs)

    def expected_bytes(
        self,
        local_blocks: BlockIds,
        peer_blocks: BlockIds,
        *,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
        peer_first: Sequence[int] | None = None,
    ) -> int:
        """Return the bytes that a request moves into this rank from all producer ranks; arguments as `indices`."""
        local = self._read_local(local_blocks)
        known = Alignment(tokens, local_first, peer_first)
        total = 0
        for link in self._links.values():
            pairs = link.block_pairs(local, peer_blocks, known)
            total += sum(int(t.length.sum()) * len(pair) for t, pair in zip(link.tables, pairs, strict=True))
        return total

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
        link = self._links.get((producer_rank[0], producer_rank[1]))
        if link is None:
            raise UnsupportedTopology(
                f"This rank reads nothing from producer rank {producer_rank}; it reads {list(self._links)}.",
                code="rank-not-read",
                context={"rank": producer_rank},
            )
        return link

    def _read_local(self, blocks: BlockIds) -> list[Ints]:
        local = read_blocks(blocks, self._local_blocks, "local", self._local.null_block)
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
    needed = required_ranks(readers, local, peers)
    overlaps = {rank: [pair for pair in find_overlaps(local, peers[rank]) if pair[1]] for rank in needed}
    tables = {
        rank: [build_table(pairing, found) for pairing, found in pairs] for rank, pairs in overlaps.items() if pairs
    }
    staged = stage(tables, overlaps) if staging != "never" else None
    estimate = make_estimate(tables, staged, cost or CostModel())
    if staging == "always" and staged is None:
        raise UnsupportedTopology(
            "The plan cannot be staged: pages have gaps, tokens are dealt out, or a producer holds more than is read.",
            code="not-stageable",
        )
    if staged is not None and (staging == "always" or estimate.is_staged_cheaper):
        return TransferPlan(local, peers, staged[0], readers, estimate, staged[1])
    return TransferPlan(local, peers, tables, readers, estimate)


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
