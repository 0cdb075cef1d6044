"""Transfer plans for paged KV caches: which bytes of which peer rank land where."""

from kv_topology.arithmetic import TokenDeal
from kv_topology.document import from_document, to_document
from kv_topology.errors import GeometryMismatch, InvalidBlocks, InvalidGeometry, TopologyError, UnsupportedTopology
from kv_topology.geometry import RankGeometry
from kv_topology.model import Axis, FieldLayout, Group, Layout, Member, Region, StageLayer
from kv_topology.plan.blocks import BlockList
from kv_topology.plan.plan import Planner, Route, TransferPlan, plan_transfer
from kv_topology.plan.readers import target_ranks
from kv_topology.plan.staged import Cast, CostModel, Estimate, PageMove, StagedRegion
from kv_topology.resharding import reshard

__version__ = "0.3.0"

__all__ = [
    "Axis",
    "BlockList",
    "Cast",
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
    "Region",
    "Route",
    "StageLayer",
    "StagedRegion",
    "TokenDeal",
    "TopologyError",
    "TransferPlan",
    "UnsupportedTopology",
    "from_document",
    "plan_transfer",
    "reshard",
    "target_ranks",
    "to_document",
]
