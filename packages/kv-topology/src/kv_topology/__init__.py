"""Which bytes of which peer rank land where: layouts, shards and transfer plans for paged KV caches."""

from kv_topology._blocks import clip_window, kernel_pages, window_blocks
from kv_topology._boxes import Pairing
from kv_topology._canonical import DescriptorMeaning, canonical_segments
from kv_topology._document import DOCUMENT_SCHEMA, DOCUMENT_VERSION, from_document, to_document
from kv_topology._errors import GeometryMismatch, InvalidBlocks, InvalidGeometry, TopologyError, UnsupportedTopology
from kv_topology._estimate import Estimate
from kv_topology._families import (
    AttentionShape,
    PageOrder,
    cells_layout,
    cpu_layout,
    cross_layer_region,
    halves_layout,
    indexer_layout,
    keys_by_channel_layout,
    layer_regions,
    mla_layout,
    packed_layout,
    rank_geometry,
    split_layouts,
)
from kv_topology._families_state import ConvOrder, StateShape, gated_delta_layout, mamba1_layout, mamba2_layout
from kv_topology._model import TOKEN_AXIS, Axis, FieldLayout, Group, Layout, Member, RankGeometry, Region
from kv_topology._plan import TransferPlan, plan_transfer
from kv_topology._planner import Planner
from kv_topology._readers import target_ranks
from kv_topology._reshard import reshard_layout
from kv_topology._rows import expand_rows
from kv_topology._shards import TokenDeal, even_interval, home_ranks
from kv_topology._slices import SliceTable
from kv_topology._staged import CostModel, PageMove, StagedRegion
from kv_topology._vllm import peer_document_from_vllm, peer_geometry_from_vllm, state_pages_per_block

__version__ = "0.2.0"

__all__ = [
    "Planner",
    "TransferPlan",
    "plan_transfer",
    "target_ranks",
    "RankGeometry",
    "Region",
    "Member",
    "Layout",
    "FieldLayout",
    "Axis",
    "Group",
    "TokenDeal",
    "TOKEN_AXIS",
    "Pairing",
    "SliceTable",
    "Estimate",
    "CostModel",
    "StagedRegion",
    "PageMove",
    "from_document",
    "to_document",
    "DOCUMENT_SCHEMA",
    "DOCUMENT_VERSION",
    "AttentionShape",
    "PageOrder",
    "packed_layout",
    "cells_layout",
    "halves_layout",
    "keys_by_channel_layout",
    "split_layouts",
    "cpu_layout",
    "mla_layout",
    "indexer_layout",
    "StateShape",
    "ConvOrder",
    "mamba2_layout",
    "mamba1_layout",
    "gated_delta_layout",
    "layer_regions",
    "cross_layer_region",
    "rank_geometry",
    "reshard_layout",
    "peer_document_from_vllm",
    "peer_geometry_from_vllm",
    "state_pages_per_block",
    "canonical_segments",
    "DescriptorMeaning",
    "even_interval",
    "home_ranks",
    "window_blocks",
    "clip_window",
    "kernel_pages",
    "expand_rows",
    "TopologyError",
    "InvalidGeometry",
    "GeometryMismatch",
    "UnsupportedTopology",
    "InvalidBlocks",
]
