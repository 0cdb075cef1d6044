"""Planning from geometry documents, for callers that must not know this package's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from kv_topology._document import from_document, to_document
from kv_topology._errors import TopologyError
from kv_topology._model import RankGeometry
from kv_topology._plan import plan_transfer
from kv_topology._readers import target_ranks
from kv_topology._reshard import reshard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._estimate import CostModel
    from kv_topology._plan import Staging, TransferPlan
    from kv_topology._reshard import RankShapeLike

__all__ = ["Planner"]


@final
class Planner:
    """Makes plans from documents; errors of a peer's document carry `fault="peer"` and the rank.

    Args:
        staging: As for `plan_transfer`; "never" unless the caller executes `staged_regions`.
        cost: Prices by which "auto" decides.
    """

    def __init__(self, *, staging: Staging = "never", cost: CostModel | None = None) -> None:
        self._staging: Staging = staging
        self._cost = cost

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
        self, local: Mapping[str, object], peers: Mapping[tuple[int, int], object], *, peer_tp: int
    ) -> TransferPlan:
        """Return the plan by which this rank reads from the producer engine; raises as `plan_transfer` does.

        Args:
            local: This rank's document.
            peers: Documents by (pp, tp), or what `geometry` returned for them.
            peer_tp: Tensor-parallel size of the producer.
        """
        geometries = {rank: self._geometry(peer, rank) for rank, peer in peers.items()}
        return plan_transfer(from_document(local), geometries, peer_tp=peer_tp, staging=self._staging, cost=self._cost)

    def reshard(self, local: Mapping[str, object], shape: RankShapeLike) -> dict[str, object]:
        """Return the document of another rank of the same make, at addresses that count up from 0; see `RankShape`.

        Raises:
            UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
        """
        return to_document(reshard(from_document(local), shape))

    def _geometry(self, peer: object, rank: tuple[int, int]) -> RankGeometry:
        return peer if isinstance(peer, RankGeometry) else self.geometry(cast("Mapping[str, object]", peer), rank)
