"""Members of kv-topology that the adapter calls: geometry documents, block lists and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_scheduler_state import BlockList
    from vllm_adapter.ports.values import Indices, MemoryKind, PageNumbers, Rows

__all__ = [
    "AxisEntry",
    "FieldDocument",
    "GeometryDocument",
    "GroupDocument",
    "HeadOrder",
    "MemberEntry",
    "PageMove",
    "PeerPlan",
    "PeerSizes",
    "Planner",
    "RankShape",
    "RegionDocument",
    "Reshard",
    "StagedRegion",
]


# ---------------------------------------------------------------------------------------------- geometry documents


class AxisEntry(NamedTuple):
    """An axis of a field; a list of six in the document."""

    name: str
    size: int
    start: int
    stop: int
    stride_bytes: int
    split: Literal["whole", "tp"] = "whole"


class FieldDocument(TypedDict):
    """A logical tensor in a page."""

    name: str
    element_bytes: int
    offset_bytes: int
    packing: str
    axes: list[AxisEntry]


class MemberEntry(NamedTuple):
    """Position of a layer in the pages of a region; a list of four in the document."""

    layer: str
    layout: int
    group: int
    offset_bytes: int


class RegionDocument(TypedDict):
    """Registered memory, divided into pages."""

    base_address: int
    page_bytes: int
    page_stride_bytes: int
    page_count: int
    memory_kind: MemoryKind
    device: int
    members: list[MemberEntry]


class GroupDocument(TypedDict):
    """A KV-cache group; `context` is (size, rank, tokens per turn)."""

    kind: str
    block_tokens: int
    pages_per_block: int
    window_tokens: int
    context: tuple[int, int, int]


class GeometryDocument(TypedDict):
    """A rank's geometry in wire form; `tp` and `pp` are (size, rank)."""

    schema: str
    version: int
    tp: tuple[int, int]
    pp: tuple[int, int]
    null_block: int | None
    stage_layers: list[list[str]]
    groups: list[GroupDocument]
    layouts: list[list[FieldDocument]]
    regions: list[RegionDocument]


# --------------------------------------------------------------------------------------------------------- plans


class PageMove(Protocol):
    """A strided copy from a received page to the final one, in bytes; both have the cells of `shape`."""

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
    """Permutation of the received pages of one local region and group."""

    @property
    def region(self) -> int:
        """Number of the region in the local document."""
        ...

    @property
    def group(self) -> int: ...
    @property
    def start(self) -> int:
        """First byte of a page that is permuted; the moves write [start, stop)."""
        ...

    @property
    def stop(self) -> int: ...
    @property
    def moves(self) -> Sequence[PageMove]: ...


class PeerPlan(Protocol):
    """All reads of one local consumer rank from one producer engine."""

    @property
    def producer_ranks(self) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks to read from, in order."""
        ...

    @property
    def notify_only_ranks(self) -> Sequence[tuple[int, int]]:
        """Ranks that are not read but expect a notification from this rank."""
        ...

    @property
    def is_staged(self) -> bool:
        """Whether received pages are still in the producer's order: see `staged_pages`."""
        ...

    def staged_pages(
        self, local: Sequence[BlockList], peer: Sequence[BlockList], *, tokens: int
    ) -> Sequence[tuple[StagedRegion, PageNumbers]]:
        """Permutations to apply after a read, with the local pages to apply them to; arguments as for `indices`."""
        ...

    @property
    def bytes_per_token(self) -> float: ...
    def expected_bytes(self, local: Sequence[BlockList], peer: Sequence[BlockList], *, tokens: int) -> int:
        """Bytes that a request moves into this rank from all producer ranks; arguments as for `indices`."""
        ...

    def reader_count(self, producer_rank: tuple[int, int]) -> int:
        """Number of consumer ranks that report to this producer rank."""
        ...

    def local_rows(self, producer_rank: tuple[int, int]) -> Rows:
        """uint64 (n, 5): address, length_bytes, device, stride_bytes, count; (0, 5) for a rank that only gets notifications."""
        ...

    def peer_rows(self, producer_rank: tuple[int, int]) -> Rows: ...
    def indices(
        self, producer_rank: tuple[int, int], local: Sequence[BlockList], peer: Sequence[BlockList], *, tokens: int
    ) -> tuple[Indices, Indices]:
        """(local, peer) int32 descriptor indices of equal length, ordered for merging; raises a coded error on bad lists.

        One list per group and side. Every token from a local list's first one up to `tokens` is moved if it lies in a real local
        block, and that block is filled whole, because the host does not zero it. A peer that lacks one of these tokens is
        refused, unless the window of token number `tokens` does not reach it.
        """
        ...


class PeerSizes(Protocol):
    """Parallel sizes of a peer engine, as its ticket states them."""

    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dcp(self) -> int: ...


HeadOrder = Literal["HN", "NH"]
"""Order of the axes in memory: heads outside tokens (HN) or inside (NH)."""


class RankShape(Protocol):
    """A rank of the same model as ours: its place in its engine, and its block sizes."""

    @property
    def tp_size(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def page_tokens(self) -> int: ...
    @property
    def pages_per_block(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def context_sizes(self) -> Sequence[int]:
        """Context-parallel size of each group; turns are whole blocks."""
        ...

    @property
    def order(self) -> HeadOrder | None: ...


class Reshard(Protocol):
    """Makes the document of another rank of the same model, with dense regions at addresses that count up from 0."""

    def __call__(self, local: Mapping[str, object], shape: RankShape, /) -> Mapping[str, object]: ...


class Planner(Protocol):
    """Plans from geometry documents, the plain form in which geometry travels."""

    def target_ranks(
        self, local: Mapping[str, object], *, peer_tp: int, peer_pp: int, peer_dcp: int
    ) -> Sequence[tuple[int, int]]:
        """(pp, tp) ranks whose metadata this rank needs before it can plan."""
        ...

    def geometry(self, document: Mapping[str, object], rank: tuple[int, int]) -> object:
        """Facts of a peer's document, opaque here, that `plan` needs; raises coded errors."""
        ...

    def plan(self, local: Mapping[str, object], peers: Mapping[tuple[int, int], object], *, peer_tp: int) -> PeerPlan:
        """Return the plan for this rank's reads from peers, given as documents or as returned by `geometry`."""
        ...

    def reshard(self, local: Mapping[str, object], shape: RankShape) -> Mapping[str, object]: ...
