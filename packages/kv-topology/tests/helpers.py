"""Engines, block lists, refusals and samples for tests."""

import os
from contextlib import contextmanager
from itertools import count
from math import gcd
from typing import Any, NamedTuple

import pytest
from byte_oracle.oracle import expand_rows

from kv_topology import BlockList, TopologyError, plan_transfer
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine
from kv_topology.tools.engine import attention_layouts

LONG = os.environ.get("KVDEV_LONG") == "1"
DENSE = ModelSpec(("attention",), 2, 4)
LATENT = ModelSpec(("latent",), latent_dim=4)
STATE = StateSpec(heads=4, head_dim=2, state_dim=2, groups=2, conv_rows=2)


def sampled(cases, about=36):
    """Return every n-th case; n has no divisor in common with their number, so that each axis goes through all its values."""
    found = list(cases)
    step = next(n for n in count(max(1, len(found) // about)) if gcd(n, len(found)) == 1)
    return found if LONG else found[::step]


@contextmanager
def refused(code, fault: str | None = None, kind: type[TopologyError] = TopologyError, **context: Any):
    """Check that the block raises an error of that code, whose context has these values."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code
    assert fault in {None, caught.value.fault}
    assert {key: caught.value.context[key] for key in context} == context


def plan_of(model=DENSE, peer=None, **mine):
    """Return the plan of rank 0 of an engine, against `peer`, or against an engine of the same settings."""
    local = build_engine(model, EngineSpec(**mine))[0, 0]
    return plan_transfer(local, build_engine(model, EngineSpec(**(peer if peer is not None else mine))))


def lists(*groups, first=0, null=None):
    """Return a block list per group of ids, all from the same first token."""
    return [BlockList(ids, first, null) for ids in groups]


def indices(plan, local, peer, *, tokens, rank=(0, 0)):
    """Return the (local, peer) indices of one producer rank as lists."""
    mine, theirs = plan.indices(rank, local, peer, tokens=tokens)
    return mine.tolist(), theirs.tolist()


def bytes_moved(plan, local, peer, *, tokens):
    """Return the bytes that a request moves into this rank from all producer ranks."""
    route = plan.route(local, peer, tokens=tokens)
    return sum(int(expand_rows(plan.local_rows(rank))[to, 1].sum()) for rank, (to, _) in route.indices.items())


class AttentionShape(NamedTuple):
    """Numbers of an attention layer and of the rank that holds a share of it."""

    kv_heads: int
    head_dim: int
    page_tokens: int
    element_bytes: int = 2
    tp_size: int = 1
    tp_rank: int = 0

    def layout(self, name):
        """Return the layout of that name, of the first region where there are several."""
        return attention_layouts(name, *self)[0]
