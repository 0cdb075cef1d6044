"""Transfer plans for paged KV caches: which bytes of which peer rank land where."""

from kv_topology._canonical import canonical_segments
from kv_topology._document import from_document, to_document
from kv_topology._errors import GeometryMismatch, InvalidBlocks, InvalidGeometry, TopologyError, UnsupportedTopology
from kv_topology._estimate import CostModel, Estimate
from kv_topology._lists import BlockList
from kv_topology._model import Axis, FieldLayout, Group, Layout, Member, RankGeometry, Region, StageLayer
from kv_topology._plan import TransferPlan, plan_transfer
from kv_topology._planner import Planner
from kv_topology._readers import target_ranks
from kv_topology._reshard import RankShape
from kv_topology._rows import expand_rows
from kv_topology._shards import TokenDeal
from kv_topology._staged import PageMove, StagedRegion

__version__ = "0.2.0"

__all__ = [
    "Axis",
    "BlockList",
    "CostModel",
    "Estimate",
    "FieldLayout",
    "GeometryMismatch",
    "Group",
    "InvalidBlocks",
    "InvalidGeometry",
    "Layout",
    "Member",
    "PageMove",
    "Planner",
    "RankGeometry",
    "RankShape",
    "Region",
    "StageLayer",
    "StagedRegion",
    "TokenDeal",
    "TopologyError",
    "TransferPlan",
    "UnsupportedTopology",
    "canonical_segments",
    "expand_rows",
    "from_document",
    "plan_transfer",
    "target_ranks",
    "to_document",
]
