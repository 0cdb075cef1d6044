"""Layouts of the caches that exist, and regions of pages that hold them."""

from kv_topology._attention_layouts import (
    AttentionShape,
    cells_layout,
    cpu_layout,
    halves_layout,
    keys_by_channel_layout,
    layer_regions,
    mla_layout,
    packed_layout,
    rank_geometry,
    split_layouts,
)
from kv_topology._state_layouts import StateShape, gated_delta_layout, mamba1_layout, mamba2_layout
from kv_topology._tensor_region import region

__all__ = [
    "AttentionShape",
    "StateShape",
    "cells_layout",
    "cpu_layout",
    "gated_delta_layout",
    "halves_layout",
    "keys_by_channel_layout",
    "layer_regions",
    "mamba1_layout",
    "mamba2_layout",
    "mla_layout",
    "packed_layout",
    "rank_geometry",
    "region",
    "split_layouts",
]
