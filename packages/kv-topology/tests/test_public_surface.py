"""The public names: a change here is a change for every user, so it is made on purpose."""

import copy
import importlib
import pickle
from typing import Any

import numpy as np
import pytest
from helpers import lists, plan_of

from kv_topology import (
    BlockList,
    CostModel,
    Group,
    InvalidBlocks,
    Layout,
    Planner,
    RankGeometry,
    TopologyError,
    from_document,
    plan_transfer,
    reshard,
    target_ranks,
    to_document,
)
from kv_topology.layouts import region

SURFACE = {
    "kv_topology": (
        "Axis BlockList Cast CostModel Estimate FieldLayout GeometryMismatch Group InvalidBlocks InvalidGeometry Layout Member "
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
    assert (type(found), str(found), found.code, found.fault) == (kind, "Block 5 is gone. (x)", "x", "peer")
    assert dict(found.context) == {"block": 5}


PLAN = plan_of()
RANK, RANKS, BLOCKS = PLAN.local, {(0, 0): PLAN.local}, lists([1])
DOCUMENT, CACHE, SIZES = to_document(RANK), np.zeros((4, 8)), {"tp_size": 1, "tp_rank": 0, "page_tokens": 16}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plan_transfer": (
        plan_transfer,
        {"local": RANK, "peers": RANKS, "peer_tp": 1, "staging": "auto", "cost": CostModel()},
    ),
    "target_ranks": (target_ranks, {"local": RANK, "peer_tp": 1, "peer_pp": 1, "peer_dcp": 1}),
    "to_document": (to_document, {"geometry": RANK}),
    "from_document": (from_document, {"document": DOCUMENT}),
    "reshard": (reshard, {"local": DOCUMENT, **SIZES, "pages_per_block": 1, "context_sizes": (1,), "order": "HN"}),
    "region": (
        region,
        {"axes": "page channel", "tensor": CACHE, "fields": ["key"], "heads": 2, "tp_size": 1, "tp_rank": 0},
    ),
    "region's sizes": (region, {"axes": "page channel", "tensor": CACHE, "fields": ["key"], "channel": 8}),
    "Planner.plan": (Planner().plan, {"local": DOCUMENT, "peers": {(0, 0): DOCUMENT}, "peer_tp": 1}),
    "Planner.geometry": (lambda document: Planner().geometry(document, (0, 0)), {"document": DOCUMENT}),
    "Planner.target_ranks": (Planner().target_ranks, {"local": DOCUMENT, "peer_tp": 1}),
    "TransferPlan.route": (PLAN.route, {"local": BLOCKS, "peer": BLOCKS, "tokens": 16}),
    "TransferPlan.indices": (PLAN.indices, {"producer_rank": (0, 0), "local": BLOCKS, "peer": BLOCKS, "tokens": 16}),
    "BlockList": (
        lambda **k: PLAN.route([BlockList(**k)], BLOCKS, tokens=16),
        {"ids": [1], "first_token": 0, "null": 0},
    ),
    **{
        f"TransferPlan.{name}": (getattr(PLAN, name), {"producer_rank": (0, 0)})
        for name in ("local_rows", "peer_rows", "reader_count", "slices")
    },
    "RankGeometry": (
        RankGeometry,
        {
            name: getattr(RANK, name)
            for name in ("tp_size", "tp_rank", "groups", "regions", "stage_layers", "null_block")
        },
    ),
    "Layout": (Layout, {"fields": RANK.regions[0].members[0].layout.fields}),
    "Group": (
        lambda **k: RankGeometry(1, 0, (Group(**k),), RANK.regions),
        {"kind": "attention", "block_tokens": 16, "pages_per_block": 1, "window_tokens": 0},
    ),
    "CostModel": (CostModel, dict.fromkeys(CostModel.__slots__, 1)),
}
ODD = (object(), b"x", 1.5, True, [[]], {"a": [1]})


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_a_wrong_type_is_a_coded_error(name):
    call, good = CALLS[name]
    call(**good)
    accepted = []
    for key in good:
        for odd in ODD:
            try:
                call(**{**good, key: odd})
                accepted.append((key, odd))
            except TopologyError as error:
                assert str(error).endswith(f"({error.code})")
    assert all(name == "CostModel" and odd == 1.5 for _, odd in accepted), accepted


def test_a_plan_says_what_it_is():
    assert repr(PLAN) == "<TransferPlan: rank (0, 0) reads [(0, 0)], direct, 32 bytes a token>"
    assert repr(RANK) == "<RankGeometry: rank (0, 0) of (1, 1), 1 groups, 1 regions, 1 layers>"
