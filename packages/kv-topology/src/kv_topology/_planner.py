"""Planning from geometry documents, for callers that must not know this package's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from kv_topology._document import from_document, to_document
from kv_topology._errors import TopologyError
from kv_topology._plan import plan_transfer
from kv_topology._readers import target_ranks
from kv_topology._reshard import reshard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kv_topology._estimate import CostModel
    from kv_topology._model import RankGeometry
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

    def plan(
        self, local: Mapping[str, object], peers: Mapping[tuple[int, int], Mapping[str, object]], *, peer_tp: int
    ) -> TransferPlan:
        """Return the plan by which this rank reads from the producer engine; raises as `plan_transfer` does."""
        geometries = {rank: _peer_geometry(rank, document) for rank, document in peers.items()}
        return plan_transfer(from_document(local), geometries, peer_tp=peer_tp, staging=self._staging, cost=self._cost)

    def reshard(self, local: Mapping[str, object], shape: RankShapeLike) -> dict[str, object]:
        """Return the document of another rank of the same make, at addresses that count up from 0; see `RankShape`.

        Raises:
            UnsupportedTopology: `layout-not-dense`, `packed-block-needs-equal-pages`.
        """
        return to_document(reshard(from_document(local), shape))


def _peer_geometry(rank: tuple[int, int], document: Mapping[str, object]) -> RankGeometry:
    try:
        return from_document(document)
    except TopologyError as error:
        raise error.blamed_on("peer", rank=rank) from None
