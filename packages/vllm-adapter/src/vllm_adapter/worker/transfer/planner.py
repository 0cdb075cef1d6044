"""Plans for reading from a peer engine, from the geometry that its ranks announce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast, final

from vllm_adapter.cache.documents import PeerSizes
from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vllm_adapter.cache.documents import GeometryDocument, GroupDocument
    from vllm_adapter.cache.vllm_peer import PeerGeometry
    from vllm_adapter.ports import AgentMetadata, MemoryKind, PeerAddress, PeerPlan, Planner
    from vllm_adapter.steps import Rank

__all__ = ["PeerPlanner", "PeerRank"]

_MOST_VALUES = 1 << 22
"""Most values in the geometry documents of all ranks of a peer; 64 ranks with 300 KB each have a third of that."""


class PeerRank(NamedTuple):
    """A peer's rank (pp, tp), its geometry for the planner, and its cache groups."""

    rank: Rank
    geometry: object
    groups: Sequence[GroupDocument]


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

    def read(self, peer: PeerAddress, metadata: Mapping[Rank, AgentMetadata]) -> Iterator[PeerRank]:
        """Read the ranks' geometry one by one, since a document may take some 80 ms and a peer may have many ranks.

        Raises a coded error for metadata that does not fit.
        """
        geometry, sizes, values = self.peer_geometry, _sizes(peer), 0
        for rank, entry in metadata.items():
            values += geometry.value_count(entry)
            if values > _MOST_VALUES:
                raise AdapterError(
                    f"the geometry documents of {len(metadata)} ranks have more than {_MOST_VALUES} values",
                    code="bad-geometry-document",
                    fault="peer",
                    context={"ranks": len(metadata)},
                )
            document = geometry.document(self.document, entry, rank, sizes)
            groups = cast("Sequence[GroupDocument]", document.get("groups", ()))
            found = PeerRank(rank, self.planner.geometry(document, rank), groups)
            geometry.check_context(groups, sizes)
            yield found

    def plan(self, peer: PeerAddress, ranks: Iterable[PeerRank]) -> PeerPlan:
        """Plan the reads of this rank; raises a coded error for geometry that does not fit."""
        geometries = {rank: geometry for rank, geometry, _ in ranks}
        return self.planner.plan(self.document, geometries, peer_tp=peer.tp)

    def has_our_blocks(self, ranks: Iterable[PeerRank], plan: PeerPlan) -> bool:
        """Return whether the groups of every rank that is read from have blocks of as many tokens as ours, and our windows."""
        ours = _spans(self.document["groups"])
        return all(_spans(groups) == ours for rank, _, groups in ranks if rank in plan.producer_ranks)


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
