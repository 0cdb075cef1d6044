"""States, and groups that share memory: whole states are paired, and no byte is written by two groups."""

from dataclasses import replace

import pytest
from helpers import bytes_moved, lists, plan_of, refused

from kv_topology import Group, plan_transfer
from kv_topology.checks import find_aliases
from kv_topology.tools import EngineSpec, ModelSpec, StateSpec, build_engine

STATE = StateSpec(heads=2, head_dim=2, state_dim=2, conv_rows=2)
STATES = ModelSpec(("mamba2",), state=STATE)


@pytest.mark.never_wrong("A3")
def test_states_pair_from_the_end():
    plan = plan_of(STATES)

    def found(local, peer, **options):
        sides = plan.indices((0, 0), lists(local, **options), lists(peer, **options), tokens=99)
        return [side.tolist() for side in sides]

    assert found([5], [7, 8]) == [[5], [8]]
    assert found([5], [7]) == [[5], [7]]
    assert found([], [7]) == [[], []]
    assert found([0, 0, 5], [0, 8], null=0) == [[5], [8]]
    assert found([0, 0], [0], null=0) == [[], []]
    for local, peer, null, code in (
        ([5, 6, 4], [7], None, "state-list-too-long"),
        ([5, 6], [7, 8], None, "state-list-too-long"),
        ([5, 0], [7], 0, "state-list-too-long"),
        ([5], [], None, "peer-blocks-too-few"),
        ([5], [0], 0, "peer-blocks-too-few"),
        ([5], [7, 0], 0, "peer-blocks-too-few"),
    ):
        with refused(code, "peer" if code.startswith("peer") else "local"):
            found(local, peer, null=null)


@pytest.mark.never_wrong("A3")
def test_all_pages_of_a_state_are_moved():
    local = build_engine(STATES, EngineSpec())[0, 0]
    two = replace(local, groups=(Group("state", 0, 2),))
    mine, theirs = plan_transfer(two, {(0, 0): two}).indices((0, 0), lists([5]), lists([7, 8]), tokens=1)
    assert (mine.tolist(), theirs.tolist()) == ([10, 11], [16, 17])
    with refused("state-pages-differ"):
        plan_transfer(two, {(0, 0): local})


def test_hybrid_groups_share_memory_but_no_block():
    plan = plan_of(ModelSpec(("attention", "mamba2"), 2, 4, state=STATE), block_tokens=32, kernel_block_tokens=16)
    tokens = {"tokens": 32}
    assert bytes_moved(plan, lists([3], [4]), lists([3], [4]), **tokens) > 0
    ((views),) = find_aliases(plan.local.regions, plan.local.groups)
    attention, memory = plan.local.groups[0], plan.local.regions[0]
    assert attention.pages_per_block == 2
    assert [view.stride * view.pages_per_block for view in views] == [memory.page_stride_bytes * 2] * 2
    assert {view.group: view.page_bytes for view in views} == {
        0: memory.page_bytes,
        1: plan.local.regions[1].page_bytes,
    }
    for local in ([3], [3]), ([3, 8], [8]), ([8, 3], [8]), ([5, 3, 4], [4]):
        with refused("local-block-twice", groups=(0, 1)):
            plan.route(lists(*local), lists([1, 2, 3], [4]), tokens=96)
    separate = plan_of(ModelSpec(("attention", "sliding"), 2, 4, window_tokens=64))
    assert bytes_moved(separate, lists([3], [3]), lists([3], [4]), tokens=16) > 0
    assert find_aliases(separate.local.regions, separate.local.groups) == ()
    high = plan_of(
        ModelSpec(("attention", "mamba2"), 2, 4, state=STATE), block_tokens=32, base_address=(1 << 64) - (1 << 20)
    )
    assert bytes_moved(high, lists([3], [4]), lists([3], [4]), **tokens) > 0
    with refused("local-block-twice"):
        high.route(lists([4], [4]), lists([3], [4]), **tokens)


def test_groups_on_two_devices_share_no_memory():
    local = build_engine(ModelSpec(("attention", "sliding"), 2, 4, window_tokens=64), EngineSpec())[0, 0]
    regions = [replace(region, base_address=1 << 32, device=n) for n, region in enumerate(local.regions)]
    assert find_aliases(regions, local.groups) == ()
    regions = [replace(region, base_address=1 << 32) for region in local.regions]
    assert len(find_aliases(regions, local.groups)) == 1
