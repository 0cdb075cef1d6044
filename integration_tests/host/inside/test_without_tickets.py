"""Requests that take part in no hand-over cost the scheduler next to nothing: not even their blocks are listed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine import prompt

from vllm_adapter.host.requests import scheduled_tokens


class CountedBlocks:
    """Blocks of a request that count how often they are listed."""

    def __init__(self) -> None:
        self.listed = 0

    def get_block_ids(self) -> tuple[list[int], ...]:
        self.listed += 1
        return ([1, 2],)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        self.listed += 1
        return [[1, 2]]


@pytest.mark.parametrize(("params", "listed"), [(None, 0), ({}, 0), ({"do_remote_decode": True}, 2)])
def test_blocks_are_listed_only_for_requests_of_a_hand_over(make_engine: Any, params: Any, listed: int) -> None:
    engine = make_engine("P")
    request = engine.add("r", prompt(4), params=params)
    connector = engine.scheduler.connector
    blocks = CountedBlocks()
    connector.update_state_after_alloc(request, blocks, 0)
    assert blocks.listed == listed


class Listed(list[int]):
    """Block ids that refuse to be copied."""

    def __iter__(self) -> Any:
        raise AssertionError("the blocks of a request without a role were listed")


def test_a_step_lists_the_blocks_of_the_requests_that_are_followed() -> None:
    new = [
        SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=0)
        for name, ids in (("a", [1]), ("b", Listed()))
    ]
    running = SimpleNamespace(
        req_ids=["c", "d"], new_block_ids=[(Listed(),), ([5],)], num_computed_tokens=[8, 9], resumed_req_ids=set[str]()
    )
    output: Any = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys("abcd", 4), scheduled_new_reqs=new, scheduled_cached_reqs=running
    )
    steps = list(scheduled_tokens(output, (0,), (16,), {"a", "d"}))
    assert [(step.request_id, step.block_ids) for step in steps] == [("a", [[1]]), ("d", [[5]])]


@pytest.mark.parametrize(("other_computed", "loads", "held"), [(32, False, 32), (0, False, 0), (32, True, 0)])
def test_a_prefix_hit_is_there_before_a_step_that_computes_none_of_it(
    other_computed: int, loads: bool, held: int
) -> None:
    """Another request of the step may compute the very blocks of the hit, or load them for another connector."""
    tables = {"hit": ([1, 2, 3],), "other": ([1, 2, 4],)}
    new = [
        SimpleNamespace(req_id="hit", block_ids=tables["hit"], num_computed_tokens=32),
        SimpleNamespace(req_id="other", block_ids=tables["other"], num_computed_tokens=other_computed),
    ]
    running = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set[str]())
    output: Any = SimpleNamespace(
        num_scheduled_tokens={"hit": 10, "other": 40},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=running,
        has_sync_kv_loads=loads,
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get),
    )
    (step,) = scheduled_tokens(output, (0,), (16,), {"hit"})
    assert step.held_tokens == held
