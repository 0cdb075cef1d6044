"""The parts that the coordinators of one registration share, and the planner of peers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, final

from vllm_adapter.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_adapter.cache.peer_geometry import PeerGeometry
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import (
        GeometryDocument,
        GroupDocument,
        HandshakeClient,
        MemoryKind,
        PeerAddress,
        PeerMetadata,
        PeerPlan,
        Planner,
        TransferThread,
        WireCodec,
    )
    from vllm_adapter.steps import Rank

__all__ = ["PeerPlanner", "PeerRanks", "TransferParts"]

_MOST_VALUES = 1 << 22
"""Values in the geometry documents of all ranks of a peer; those of 64 ranks with 300 KB each have a third."""


@final
@dataclass(frozen=True, slots=True)
class TransferParts:
    """Parts that every coordinator works with.

    Attributes:
        agent: The transfer thread; its *owner* methods may be called, because all coordinators run on it.
        handshakes: Client of the side channel.
        codec: Writes and reads notifications.
        recorder: Takes observations and log lines.
        now_s: Monotonic clock.
        engine_id: This engine, as its completions name it.
    """

    agent: TransferThread
    handshakes: HandshakeClient
    codec: WireCodec
    recorder: Recorder
    now_s: Callable[[], float]
    engine_id: str


@final
@dataclass(frozen=True, slots=True)
class PeerPlanner:
    """Plans from this rank's geometry document and those of a peer engine's ranks.

    Attributes:
        document: This rank's geometry document.
        peer_geometry: Finds a peer rank's document.
        planner: Plans from documents.
        local_kind: Memory kind of this rank's pages.
    """

    document: GeometryDocument
    peer_geometry: PeerGeometry
    planner: Planner
    local_kind: MemoryKind

    def target_ranks(self, peer: PeerAddress) -> Sequence[Rank]:
        """Return the ranks whose metadata is needed before `plan`; raises a coded error for sizes that cannot be."""
        return self.planner.target_ranks(self.document, peer_tp=peer.tp, peer_pp=peer.pp, peer_dcp=peer.dcp)

    def check_sizes(self, peer: PeerAddress, first: PeerMetadata) -> None:
        """Raise a coded error if the metadata of rank (0, 0) of vLLM's own connector shows that its engine has other sizes.

        Our own listeners refuse a rank that is not there, and live.
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
            self.peer_geometry.document(self.document, first, (0, 0), peer)
        except AdapterError as error:
            # Of a pipeline's first rank only some layers may be held here; what is held is compared when the reads are planned.
            if peer.pp == 1 or error.code not in {"layer-not-held", "region-count-differs"}:
                raise

    def ranks(self, peer: PeerAddress, metadata: Mapping[Rank, PeerMetadata]) -> PeerRanks:
        """Return what `plan` needs of a peer's ranks, none of which has been read yet."""
        return PeerRanks(self, peer, metadata)

    def plan(self, ranks: PeerRanks) -> PeerPlan:
        """Plan the reads of this rank; raises a coded error for metadata that does not fit."""
        ranks.read_all()
        return self.planner.plan(self.document, ranks.geometries, peer_tp=ranks.peer.tp)

    def can_stream(self, ranks: PeerRanks, plan: PeerPlan) -> bool:
        """Tell whether prompts can be read from a peer in parts, while it computes them.

        It must have stream memory, its pages must need no conversion, and its groups must be ours, one by one: the peer's
        table lists blocks by its own groups. Example: blocks of 16 tokens here and of 32 there do not become whole
        together, so such a peer is read once its prompts are finished.
        """
        if plan.is_staged or any(ranks.metadata[rank].streams is None for rank in plan.producer_ranks):
            return False
        ours = _spans(self.document["groups"])
        return all(_spans(ranks.groups[rank]) == ours for rank in plan.producer_ranks)

    def memory_kind(self, metadata: PeerMetadata) -> MemoryKind:
        """Return where a peer rank's pages live."""
        return self.peer_geometry.memory_kind(metadata)


@final
class PeerRanks:
    """The geometry of a peer's ranks, read rank by rank: a document may take some 80 ms, and a peer may have many.

    Attributes:
        peer: The engine as its tickets name it.
        metadata: Metadata of the ranks, by (pp, tp).
        geometries: Of those that have been read, for the planner.
        groups: The cache groups of those that have been read, as their documents have them.
    """

    def __init__(self, planner: PeerPlanner, peer: PeerAddress, metadata: Mapping[Rank, PeerMetadata]) -> None:
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
        """Read a further rank; raises a coded error for metadata that does not fit."""
        rank = self._left.popleft()
        entry, geometry = self.metadata[rank], self._planner.peer_geometry
        self._values += geometry.value_count(entry)
        if self._values > _MOST_VALUES:
            raise AdapterError(
                f"the geometry documents of {len(self.metadata)} ranks have more than {_MOST_VALUES} values",
                code="bad-geometry-document",
                fault="peer",
                context={"ranks": len(self.metadata)},
            )
        document = geometry.document(self._planner.document, entry, rank, self.peer)
        self.geometries[rank] = self._planner.planner.geometry(document, rank)
        self.groups[rank] = cast("Sequence[GroupDocument]", document.get("groups", ()))
        geometry.check_context(self.groups[rank], self.peer)

    def read_all(self) -> None:
        """Read the ranks that are left."""
        while self._left:
            self.read_next()


def _spans(groups: Iterable[GroupDocument]) -> list[tuple[bool, int, int]]:
    """Return (whether it keeps states, tokens per block over all context ranks, window) of each group."""
    return [
        (group["kind"] == "state", group["block_tokens"] * group["context"][0], group["window_tokens"])
        for group in groups
    ]


def _layers(document: GeometryDocument) -> Iterator[str]:
    return (member.layer for region in document["regions"] for member in region["members"])
