"""The byte oracle over the listed spaces, thinned out by default.

`KV_TOPOLOGY_PROOF_STEP=1` proves every listed pair (a few minutes); the default takes every 37th, `KVDEV_LONG=1` every 17th.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from byte_oracle.cases import FAMILIES, ProofCase, request_for, run_proofs
from byte_oracle.oracle import OracleFailure, prove

from kv_topology import BlockList, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, build_engine

STEP = int(os.environ.get("KV_TOPOLOGY_PROOF_STEP", "17" if os.environ.get("KVDEV_LONG") == "1" else "37"))


@pytest.mark.parametrize("family", FAMILIES)
def test_listed_pairs(family):
    assert run_proofs(family, step=STEP) > 0


class Wrong:
    """A plan of which some members are replaced."""

    def __init__(self, plan, **members):
        self._plan, self._members = plan, members

    def __getattr__(self, name):
        return self._members.get(name) or getattr(self._plan, name)


def with_pairs(change):
    def wrong(plan):
        def route(local, peer, *, tokens):
            found = plan.route(local, peer, tokens=tokens)
            return found._replace(indices={rank: change(*pair) for rank, pair in found.indices.items()})

        return Wrong(plan, route=route)

    return wrong


def unfilled(local, peer):
    """Leave the end of the last block as it was: no peer unit is read a second time."""
    once = np.unique(peer, return_index=True)[1]
    return local[once], peer[once]


UNEQUAL = EngineSpec(block_tokens=64, block_count=8), EngineSpec(block_tokens=16, block_count=8)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (with_pairs(lambda local, peer: (local[:-1], peer[:-1])), "is 0x"),
        (with_pairs(lambda local, peer: (local.repeat(2), peer.repeat(2))), "was written 2 times"),
        pytest.param(
            with_pairs(unfilled), "bytes of ordered blocks keep their old value", marks=pytest.mark.never_wrong("A11")
        ),
    ],
)
def test_the_oracle_catches_wrong_plans(broken, why):
    consumer, producer = UNEQUAL
    case = ProofCase(ModelSpec(("attention",), 2, 4), consumer, replace(producer, tp=2), 20)
    consumers, producers = build_engine(case.model, case.consumer), build_engine(case.model, case.producer)
    request = request_for(case)
    request = replace(request, peer=[BlockList([*request.peer[0][0], 7])])
    with pytest.raises(OracleFailure, match=why):
        prove(consumers, producers, request, lambda mine, theirs: broken(plan_transfer(mine, theirs)))
    prove(consumers, producers, request, plan_transfer)
