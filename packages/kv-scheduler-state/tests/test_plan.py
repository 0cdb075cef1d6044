"""The step plan's bytes: what they look like, and that no other bytes get through."""

from __future__ import annotations

import contextlib
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_scheduler_state import (
    EMPTY_PLAN,
    PLAN_VERSION,
    FenceOrder,
    GrantOrder,
    HeartbeatOrder,
    PeerAddress,
    PlanDecodeError,
    ReadOrder,
    StepPlan,
)

PEER = PeerAddress("prefill-0", "10.0.0.1", 5600, 2, 1, 1, 5, None, 14)
PLAN = StepPlan(
    reads=(ReadOrder("d1", PEER, "p1", ((1, 2), ()), ((3, 4), ()), (0, 77), 30.0, True, 32, (0, 0)),),
    fences=(FenceOrder("p2", 0, 1),),
    grants=(GrantOrder("p3", 30.0, None), GrantOrder("p4", 480.0, (1, 2))),
    releases=("p5",),
    saves=(("p6", ((1,), (2,))),),
    heartbeats=(HeartbeatOrder(PEER, ("p1", "p7")),),
    expects=("p2",),
    revokes=("p8",),
    cancels=("d2",),
)
# Append only: bytes that version 1 wrote must stay readable.
GOLDEN = (
    b'{"version":1,"reads":[["d1",["prefill-0","10.0.0.1",5600,2,1,1,5,null,14],"p1",[[1,2],[]],[[3,4],[]],[0,77],30.0,'
    b'true,32,[0,0]]],"fences":[["p2",0,1]],"grants":[["p3",30.0,null],["p4",480.0,[1,2]]],"releases":["p5"],'
    b'"saves":[["p6",[[1],[2]]]],"heartbeats":[[["prefill-0","10.0.0.1",5600,2,1,1,5,null,14],["p1","p7"]]],'
    b'"expects":["p2"],"revokes":["p8"],"cancels":["d2"]}'
)


def test_the_bytes_are_the_documented_ones():
    assert PLAN.to_bytes() == GOLDEN
    assert StepPlan.from_bytes(GOLDEN) == PLAN
    assert EMPTY_PLAN.to_bytes() == b'{"version":1}'
    assert StepPlan.from_bytes(b'{"version":1}').is_empty
    assert not PLAN.is_empty
    assert PLAN_VERSION == 1
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN


def test_a_later_writer_may_append_and_an_earlier_one_may_lack_the_tail():
    document = json.loads(GOLDEN)
    document["reads"][0].append("new")
    document["reads"][0][1].append("new")
    document["unknown"] = [1]
    assert StepPlan.from_bytes(json.dumps(document).encode()) == PLAN
    document["reads"][0] = document["reads"][0][:8]
    (order,) = StepPlan.from_bytes(json.dumps(document).encode()).reads
    assert (order.external_tokens, order.local_computed_blocks) == (0, ())


@pytest.mark.parametrize(
    ("code", "data"),
    [
        ("plan-not-json", b""),
        ("plan-not-json", b"\xff"),
        ("plan-not-json", b"[" * 200_000),
        ("plan-not-json", None),
        ("plan-malformed", b"[]"),
        ("plan-version", b"{}"),
        ("plan-version", b'{"version":2}'),
        ("plan-version", b'{"version":true}'),
        ("plan-malformed", b'{"version":1,"releases":"p1"}'),
        ("plan-malformed", b'{"version":1,"releases":[1]}'),
        ("plan-malformed", b'{"version":1,"fences":[["p1",0]]}'),
        ("plan-malformed", b'{"version":1,"fences":[["p1",0,true]]}'),
        ("plan-malformed", b'{"version":1,"grants":[["p1",0,null]]}'),
        ("plan-malformed", b'{"version":1,"grants":[["p1","30",null]]}'),
        ("plan-malformed", b'{"version":1,"grants":[["p1",1e999,null]]}'),
        ("plan-malformed", b'{"version":1,"grants":[["p1",30,[1]]]}'),
        ("plan-malformed", b'{"version":1,"grants":[["p1",30,[1,2,3]]]}'),
        ("plan-malformed", b'{"version":1,"saves":[["p1"]]}'),
        ("plan-malformed", b'{"version":1,"saves":[["p1",[1]]]}'),
        ("plan-malformed", GOLDEN.replace(b"true", b"1")),
    ],
)
def test_other_bytes_are_refused_with_a_code(code, data):
    with pytest.raises(PlanDecodeError) as caught:
        StepPlan.from_bytes(data)
    assert caught.value.code == code


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255), st.integers(0, len(GOLDEN)))
def test_damaged_bytes_are_a_plan_or_a_coded_refusal(at, byte, cut):
    for data in (GOLDEN[:at] + bytes([byte]) + GOLDEN[at + 1 :], GOLDEN[:cut]):
        with contextlib.suppress(PlanDecodeError):
            assert isinstance(StepPlan.from_bytes(data), StepPlan)
