"""Plans for reading from a peer engine, from the geometry that its ranks announce."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument
    from vllm_adapter.cache.vllm_peer import PeerGeometry
    from vllm_adapter.ports import AgentMetadata, MemoryKind, PeerAddress, PeerPlan, Planner
    from vllm_adapter.steps import Rank

__all__ = ["PeerPlanner", "PeerRanks"]

_MOST_VALUES = 1 << 22
"""Most values in the geometry documents of all ranks of a peer; 64 ranks with 300 KB each have a third of that."""


@final
@dataclass(frozen=True, slots=True)
class PeerPlanner:
    """Plans from this rank's geometry document and those of a peer engine's ranks.

    Attributes:
        document: This rank's geometry document.
        peer_geometry: Derives a peer rank's geometry document.
        planner: Plans from geometry documents.
        local_kind: Memory kind of this rank's pages.
    """

    document: GeometryDocument
    peer_geometry: PeerGeometry
    planner: Planner
    local_kind: MemoryKind

    def target_ranks(self, peer: PeerAddress) -> Sequence[Rank]:
        """Return the ranks whose metadata `plan` needs; raises a coded error for impossible sizes."""
        return self.planner.target_ranks(self.document, peer_tp=peer.tp, peer_pp=peer.pp, peer_dcp=peer.dcp)

    def check_sizes(self, peer: PeerAddress, first: AgentMetadata) -> None:
        """Raise a coded error if rank (0, 0)'s metadata shows that an engine of vLLM's own connector has other sizes.

        Our own listeners need no such check: they refuse a query for a missing rank and stay alive.
        """
        if first.geometry is not None or first.capabilities:
            return
        if peer.pp > 1 and {*_layers(self.document)} <= {*(first.region_names or ())}:
            raise AdapterError(
                f"a ticket says that the peer has {peer.pp} pipeline ranks, but the first holds all layers of this one",
                code="pipeline-size-differs",
                fault="peer",
                context={"pp": peer.pp},
            )
        try:
            self.peer_geometry.document(self.document, first, (0, 0), _sizes(peer))
        except AdapterError as error:
            # The first rank of a pipeline may hold only some of our layers; those are compared when the reads are planned.
            if peer.pp == 1 or error.code not in {"layer-not-held", "region-count-differs"}:
                raise

    def plan(self, ranks: PeerRanks) -> PeerPlan:
        """Plan the reads of this rank; raises a coded error for metadata that does not fit."""
        while not ranks.is_read:
            ranks.read_next()
        return self.planner.plan(self.document, ranks.geometries, peer_tp=ranks.peer.tp)

    def has_our_blocks(self, ranks: PeerRanks, plan: PeerPlan) -> bool:
        """Return whether the groups of every rank that is read from have blocks of as many tokens as ours, and our windows."""
        ours = _spans(self.document["groups"])
        return all(_spans(ranks.groups[rank]) == ours for rank in plan.producer_ranks)


@final
class PeerRanks:
    """Geometry of a peer's ranks, read rank by rank: a document may take some 80 ms, and a peer may have many ranks.

    Attributes:
        peer: The engine as its tickets name it.
        metadata: Metadata of the ranks, by (pp, tp).
        geometries: Geometries of the ranks read so far, for the planner.
        groups: Cache groups of the ranks read so far, as in their documents.
    """

    def __init__(self, planner: PeerPlanner, peer: PeerAddress, metadata: Mapping[Rank, AgentMetadata]) -> None:
        self.peer = peer
        self.metadata = metadata
        self.geometries: dict[Rank, object] = {}
        self.groups: dict[Rank, Sequence[GroupDocument]] = {}
        self._planner = planner
        self._left = deque(metadata)
        self._values = 0

    @property
    def is_read(self) -> bool:
        """Whether all ranks have been read."""
        return not self._left

    def read_next(self) -> None:
        """Read the next rank's geometry; raises a coded error for metadata that does not fit."""
        rank = self._left.popleft()
        entry, geometry, sizes = self.metadata[rank], self._planner.peer_geometry, _sizes(self.peer)
        self._values += geometry.value_count(entry)
        if self._values > _MOST_VALUES:
            raise AdapterError(
                f"the geometry documents of {len(self.metadata)} ranks have more than {_MOST_VALUES} values",
                code="bad-geometry-document",
                fault="peer",
                context={"ranks": len(self.metadata)},
            )
        document = geometry.document(self._planner.document, entry, rank, sizes)
        self.geometries[rank] = self._planner.planner.geometry(document, rank)
        self.groups[rank] = cast("Sequence[GroupDocument]", document.get("groups", ()))
        geometry.check_context(self.groups[rank], sizes)


def _sizes(peer: PeerAddress) -> PeerSizes:
    return PeerSizes(peer.tp, peer.pp, peer.dcp)


def _spans(groups: Iterable[GroupDocument]) -> list[tuple[bool, int, int]]:
    """Return (whether it holds states, tokens per block over all context ranks, window) of each group."""
    return [
        (group["kind"] == "state", group["block_tokens"] * group["context"][0], group["window_tokens"])
        for group in groups
    ]


def _layers(document: GeometryDocument) -> Iterator[str]:
    return (layer for region in document["regions"] for layer, *_ in region["members"])
