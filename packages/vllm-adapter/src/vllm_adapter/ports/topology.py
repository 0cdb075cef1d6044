"""What the adapter needs from kv-topology: which bytes of which peer rank land where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_adapter.ports.values import BlockIds, Indices, PageNumbers, Rows

__all__ = ["DeriveDocument", "PageMove", "PeerPlan", "PeerSizes", "Planner", "StagedRegion"]


class PageMove(Protocol):
    """One strided copy from a received page to the final one, in bytes; both have the cells of `shape`."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def source_offset(self) -> int: ...
    @property
    def source_strides(self) -> Sequence[int]: ...
    @property
    def target_offset(self) -> int: ...
    @property
    def target_strides(self) -> Sequence[int]: ...


class StagedRegion(Protocol):
    """How received pages of one local region and group are put in order."""

    @property
    def region(self) -> int:
        """Number of the region in the local document."""
        ...

    @property
    def group(self) -> int: ...
    @property
    def start(self) -> int:
        """First byte of a page that is permuted; the moves fill [start, stop)."""
        ...

    @property
    def stop(self) -> int: ...
    @property
    def moves(self) -> Sequence[PageMove]: ...


class PeerPlan(Protocol):
    """What one local consumer rank reads from one producer engine."""

    @property
    def producer_ranks(self) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks to read from, in order."""
        ...

    @property
    def notify_only_ranks(self) -> Sequence[tuple[int, int]]:
        """Ranks that hold replicas, are not read, and still wait for a notification."""
        ...

    @property
    def is_staged(self) -> bool:
        """Whether the pages that a read brings are still in the producer's order: see `staged_pages`."""
        ...

    def staged_pages(
        self,
        local_blocks: BlockIds,
        peer_blocks: BlockIds,
        *,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
    ) -> Sequence[tuple[StagedRegion, PageNumbers]]:
        """What a read leaves to be permuted, and in which local pages; arguments as `indices`."""
        ...

    @property
    def bytes_per_token(self) -> float: ...
    def reader_count(self, producer_rank: tuple[int, int]) -> int:
        """Consumer ranks that report to this producer rank."""
        ...

    def local_rows(self, producer_rank: tuple[int, int]) -> Rows:
        """uint64 (n, 5): address, length_bytes, device, stride_bytes, count; same n as `peer_rows`."""
        ...

    def peer_rows(self, producer_rank: tuple[int, int]) -> Rows: ...
    def indices(
        self,
        producer_rank: tuple[int, int],
        local_blocks: BlockIds,
        peer_blocks: BlockIds,
        *,
        tokens: int | None = None,
        local_first: Sequence[int] | None = None,
    ) -> tuple[Indices, Indices]:
        """(local, peer) int32 descriptor indices of equal length, ordered for merging; raises coded on bad ids.

        `tokens` (of the prompt so far) and `local_first` (per group, blocks in front of the local list) say where lists
        begin; without them a shorter local list is the tail of the peer's.
        """
        ...


class PeerSizes(Protocol):
    """Parallel sizes of a peer engine, as its ticket says."""

    @property
    def peer_tp(self) -> int: ...
    @property
    def peer_pp(self) -> int: ...
    @property
    def peer_dcp(self) -> int: ...


class DeriveDocument(Protocol):
    """Makes the geometry document of a peer rank that sends none, from ours and its plain numbers."""

    def __call__(
        self,
        local_document: Mapping[str, object],
        peer_facts: Mapping[str, object],
        /,
        *,
        peer_tp: int,
        peer_tp_rank: int,
        peer_pp: int,
        peer_pp_rank: int,
        peer_dcp: int,
    ) -> Mapping[str, object]: ...


class Planner(Protocol):
    """Plans from geometry documents, the plain form in which geometry travels."""

    def target_ranks(
        self, local: Mapping[str, object], *, peer_tp: int, peer_pp: int, peer_dcp: int
    ) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks whose metadata this rank needs before it can plan."""
        ...

    def plan(
        self, local: Mapping[str, object], peers: Mapping[tuple[int, int], Mapping[str, object]], *, peer_tp: int
    ) -> PeerPlan: ...
