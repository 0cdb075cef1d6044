"""Faults planted in the parts that the simulation shares with production: each of them fails a hand-over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import TOKENS, Engine

from kv_scheduler_state import LeaseTable
from vllm_adapter.config import Settings
from vllm_adapter.scheduler.side import SchedulerSide

Make = Callable[..., Engine]


def _hand_over(make: Make) -> None:
    """Hand a prompt over and wait until the producer has its blocks back; a planted fault raises here."""
    producer, consumer = make("P"), make("D", settings=Settings(read_timeout_s=2.0))
    source, ticket = producer.prefill(3 * TOKENS)
    request = consumer.start_decode(ticket, 3 * TOKENS, hit_blocks=1)
    assert consumer.wait_received(request, within_s=3)
    consumer.assert_has(request, source, 3 * TOKENS, hit_blocks=1)
    producer.wait_idle(within_s=3)


def test_without_a_fault_the_hand_over_succeeds(make: Make) -> None:
    _hand_over(make)


def test_blocks_that_the_scheduler_side_mixes_up_are_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = SchedulerSide.allocated

    def mixed_up(side: SchedulerSide, request_id: str, blocks: Any, new: Any, **values: Any) -> None:
        if values["external_tokens"]:
            blocks, new = ([list(reversed(ids)) for ids in lists] for lists in (blocks, new))
        allocated(side, request_id, blocks, new, **values)

    monkeypatch.setattr(SchedulerSide, "allocated", mixed_up)
    with pytest.raises(AssertionError):
        _hand_over(make)


def test_tickets_that_the_scheduler_side_binds_to_nothing_are_noticed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = SchedulerSide.finished

    def without_fence(side: SchedulerSide, ending: Any, blocks: Any) -> Any:
        keeps, ticket = finished(side, ending, blocks)
        return keeps, {key: value for key, value in (ticket or {}).items() if key != "kv_first_tokens"} | {
            "kv_fence": [0, 1]
        }

    monkeypatch.setattr(SchedulerSide, "finished", without_fence)
    with pytest.raises(AssertionError):
        _hand_over(make)


def test_grants_that_a_worker_does_not_apply_are_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = LeaseTable.apply

    def without_grants(table: LeaseTable, plan: Any, **values: Any) -> Any:
        return apply(table, plan._replace(grants=()), **values)

    monkeypatch.setattr(LeaseTable, "apply", without_grants)
    with pytest.raises(AssertionError):
        _hand_over(make)
