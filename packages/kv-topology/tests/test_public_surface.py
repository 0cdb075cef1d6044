"""The public names: a change here is a change for every user, so it is made on purpose."""

import copy
import importlib
import pickle

import pytest

from kv_topology import InvalidBlocks, TopologyError

SURFACE = {
    "kv_topology": (
        "Axis BlockList CostModel Estimate FieldLayout GeometryMismatch Group InvalidBlocks InvalidGeometry Layout Member "
        "PageMove Planner RankGeometry Region Route StageLayer StagedRegion TokenDeal TopologyError TransferPlan "
        "UnsupportedTopology from_document plan_transfer reshard target_ranks to_document"
    ),
    "kv_topology.layouts": "region",
}


@pytest.mark.parametrize("module", SURFACE)
def test_public_names(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == SURFACE[module].split()
    assert all(hasattr(found, name) for name in found.__all__)


def test_errors_carry_what_a_caller_needs():
    error = InvalidBlocks("x", "Block 5 is gone.", {"block": 5})
    assert isinstance(error, TopologyError)
    assert (error.code, error.fault, error.is_retry_safe, dict(error.context)) == ("x", "local", False, {"block": 5})
    blamed = error.blamed_on("peer", rank=(0, 1))
    assert type(blamed) is InvalidBlocks
    assert (blamed.fault, dict(blamed.context), str(blamed)) == ("peer", {"block": 5, "rank": (0, 1)}, str(error))


@pytest.mark.parametrize("kind", TopologyError.__subclasses__())
@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_cross_processes(kind, carry):
    error = kind("x", "Block 5 is gone.", {"block": 5}, fault="peer")
    found = carry(error)
    assert (type(found), str(found), found.code, found.fault) == (kind, "Block 5 is gone.", "x", "peer")
    assert dict(found.context) == {"block": 5}
