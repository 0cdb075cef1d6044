"""The byte oracle over the listed spaces, thinned out by default, and sampled beyond them.

`KV_TOPOLOGY_PROOF_STEP=1` proves every listed pair (a few minutes); the default takes every 37th, `KVDEV_LONG=1` every 17th.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from byte_oracle.cases import FAMILIES, LAYOUTS, ProofCase, request_for, run_proofs
from byte_oracle.oracle import OracleFailure, prove
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kv_topology import BlockList, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine

STEP = int(os.environ.get("KV_TOPOLOGY_PROOF_STEP", "17" if os.environ.get("KVDEV_LONG") == "1" else "37"))


@pytest.mark.parametrize("family", FAMILIES)
def test_listed_pairs(family):
    (pairs, proof) = run_proofs((family,), step=STEP)[family]
    print(f"{family}: {pairs} pairs, {proof.plans} plans, {proof.copies} copies, {proof.bytes_proved} bytes")
    assert pairs > 0
    assert proof.bytes_proved > 0


def test_spaces_are_as_listed():
    counts = {family: sum(1 for _ in make()) for family, make in FAMILIES.items()}
    assert counts["tp"] == 8 * 8 * 5 * 6
    assert counts["layouts"] == 6 * 6 * 5 * 5
    assert counts["cross-layer"] == 5 * 5 * 8 * 8
    assert counts["pipeline"] == 4 * 4 * 3 * 3
    assert sum(counts.values()) > 6000


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""Shrinking is left out: a failing case is small enough to read, and slow to shrink."""

engines = st.builds(
    EngineSpec,
    tp=st.integers(1, 8),
    pp=st.integers(1, 3),
    block_tokens=st.sampled_from([12, 24, 36]),
    kernel_block_tokens=st.sampled_from([0, 4, 6, 12]),
    layout=st.sampled_from([*LAYOUTS, "heads-outer"]),
    block_count=st.just(40),
)
states = st.builds(
    StateSpec,
    heads=st.sampled_from([4, 6, 12]),
    head_dim=st.integers(1, 3),
    state_dim=st.integers(1, 3),
    groups=st.integers(1, 4),
    conv_rows=st.sampled_from([2, 4]),
    state_element_bytes=st.sampled_from([2, 4]),
)


@settings(max_examples=int(os.environ.get("KV_TOPOLOGY_EXAMPLES", "25")), deadline=None, phases=PHASES)
@given(
    kinds=st.lists(st.sampled_from(["attention", "sliding", "latent", "mamba2", "mamba1"]), min_size=3, max_size=6),
    heads=st.integers(1, 7),
    window=st.sampled_from([16, 50]),
    state=states,
    consumer=engines,
    producer=engines,
    tokens=st.integers(1, 140),
    hit=st.integers(0, 2),
)
def test_sampled_pairs(kinds, heads, window, state, consumer, producer, tokens, hit):
    model = ModelSpec(tuple(kinds), heads, 3, 2, window, latent_dim=5, index_dim=2, state=replace(state, head_dim=2))
    consumer, producer = (
        replace(e, layout="packed-HND") if "mamba" in "".join(kinds) else e for e in (consumer, producer)
    )
    case = ProofCase("sampled", model, consumer, producer, tokens, min(hit, tokens // consumer.block_tokens))
    request = request_for(case)
    proof = case.run()
    assert proof.plans == consumer.tp * consumer.pp
    assert request.tokens == tokens


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
            with_pairs(unfilled),
            "bytes of ordered blocks keep their old value",
            marks=pytest.mark.never_wrong("A11"),
        ),
    ],
)
def test_the_oracle_catches_wrong_plans(broken, why):
    consumer, producer = UNEQUAL
    case = ProofCase("planted", ModelSpec(("attention",), 2, 4), consumer, replace(producer, tp=2), 20)
    consumers, producers = build_engine(case.model, case.consumer), build_engine(case.model, case.producer)
    request = request_for(case)
    request = replace(request, peer=[BlockList([*request.peer[0][0], 7])])
    with pytest.raises(OracleFailure, match=why):
        prove(consumers, producers, request, lambda mine, theirs: broken(plan_transfer(mine, theirs)))
    prove(consumers, producers, request, plan_transfer)
