"""`plan_transfer`: from two geometries to everything that a consumer rank needs to read from a producer engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_topology._boxes import find_overlaps
from kv_topology._errors import InvalidGeometry, UnsupportedTopology
from kv_topology._link import Alignment, Link, block_counts, check_disjoint_groups, find_aliases, read_blocks
from kv_topology._readers import Readers, required_ranks
from kv_topology._slices import build_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._arrays import Indices, Ints, Rows
    from kv_topology._model import RankGeometry
    from kv_topology._slices import SliceTable

    BlockIds = Sequence[Sequence[int]]
    Rank = tuple[int, int]

__all__ = ["TransferPlan", "plan_transfer"]


@final
class TransferPlan:
    """What one consumer rank reads from one producer engine. Immutable; build it with `plan_transfer`."""

    def __init__(
        self,
        local: RankGeometry,
        peers: Mapping[Rank, RankGeometry],
        tables: Mapping[Rank, Sequence[SliceTable]],
        readers: Readers,
    ) -> None:
        self._local = local
        self._links = {rank: Link(local, peers[rank], tables[rank]) for rank in sorted(tables)}
        self._readers = readers
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
        """Whether received pages must be permuted before use."""
        return False

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
        total = 0.0
        for link in self._links.values():
            for table in link.tables:
                if not table.pairing.local.is_state:
                    share = self._readers.token_share(table.pairing)
                    total += float(table.length.sum()) / table.pairing.unit_tokens * share
        return total

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
    local: RankGeometry, peers: Mapping[Rank, RankGeometry], *, peer_tp: int | None = None
) -> TransferPlan:
    """Return the plan by which a consumer rank reads from a producer engine.

    Args:
        local: This rank.
        peers: Geometry of the producer's ranks by (pp, tp); at least those that `target_ranks` names.
        peer_tp: Tensor-parallel size of the producer, checked against the peers' own word if given.

    Raises:
        InvalidGeometry: `peers-empty`, `peer-rank-differs`.
        GeometryMismatch: The two sides are not the same model, with both values.
        UnsupportedTopology: No plan exists: `layer-not-held`, `peer-missing`, `no-producer-holds`, ...
    """
    _check_peers(peers, peer_tp)
    readers = Readers(local, peers)
    needed = required_ranks(readers, local, peers)
    tables = {
        rank: [build_table(pairing, overlaps) for pairing, overlaps in find_overlaps(local, peers[rank]) if overlaps]
        for rank in needed
    }
    return TransferPlan(local, peers, {rank: found for rank, found in tables.items() if found}, readers)


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
