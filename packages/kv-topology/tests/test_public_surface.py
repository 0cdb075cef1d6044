"""The public names: a change here is a change for every user, so it is made on purpose."""

import importlib
import pkgutil

import pytest

import kv_topology

SURFACE = {
    "kv_topology": (
        "Axis BlockList CostModel FieldLayout GeometryMismatch Group InvalidBlocks InvalidGeometry Layout Member Planner "
        "RankGeometry RankShape Region StageLayer TokenDeal TopologyError TransferPlan UnsupportedTopology "
        "canonical_segments expand_rows from_document plan_transfer target_ranks to_document"
    ),
    "kv_topology.layouts": (
        "AttentionShape StateShape cells_layout cpu_layout gated_delta_layout halves_layout "
        "keys_by_channel_layout layer_regions mamba1_layout mamba2_layout mla_layout packed_layout "
        "rank_geometry region split_layouts"
    ),
    "kv_topology.testing": "MemoryOfRank OracleFailure Proof Request execute permute prove",
}


@pytest.mark.parametrize("module", SURFACE)
def test_public_names(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == SURFACE[module].split()
    assert all(hasattr(found, name) for name in found.__all__)


def test_no_other_public_module():
    found = {f"kv_topology.{each.name}" for each in pkgutil.iter_modules(kv_topology.__path__)}
    assert {name for name in found if not name.startswith("kv_topology._")} == set(SURFACE) - {"kv_topology"}


def test_the_top_level_is_small():
    assert len(kv_topology.__all__) <= 25
