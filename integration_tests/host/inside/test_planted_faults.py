"""A fault planted in the leases or in the scheduler's half fails a hand-over between two whole connectors.

The same faults fail the simulation; the first one fails the exploration of the machines too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine import BLOCK, prompt
from full_engine import FullEngine, hand_over

from kv_scheduler_state import LeaseTable
from vllm_adapter.scheduler.side import SchedulerSide

Make = Callable[..., FullEngine]
SOME, OTHER = prompt(3 * BLOCK + 5, seed=1), prompt(2 * BLOCK + 3, seed=2)


def _drop_grants(patch: pytest.MonkeyPatch) -> None:
    apply = LeaseTable.apply

    def without_grants(table: LeaseTable, plan: Any, **values: Any) -> Any:
        return apply(table, plan._replace(grants=()), **values)

    patch.setattr(LeaseTable, "apply", without_grants)


def _mix_blocks_up(patch: pytest.MonkeyPatch) -> None:
    allocated = SchedulerSide.allocated

    def mixed_up(side: SchedulerSide, request_id: str, blocks: Any, new: Any, **values: Any) -> None:
        if values["external_tokens"]:
            blocks, new = ([list(reversed(ids)) for ids in lists] for lists in (blocks, new))
        allocated(side, request_id, blocks, new, **values)

    patch.setattr(SchedulerSide, "allocated", mixed_up)


@pytest.mark.parametrize(
    ("plant", "what_fails"),
    [
        pytest.param(_drop_grants, "p2 was never reported", id="grants-dropped-by-the-leases"),
        pytest.param(_mix_blocks_up, "Tensor-likes are not equal", id="blocks-mixed-up-by-the-scheduler-side"),
    ],
)
def test_a_planted_fault_fails_a_hand_over(
    make: Make, plant: Callable[[pytest.MonkeyPatch], None], what_fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = make("P"), make("D")
    hand_over(producer, consumer, "1", SOME)
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError, match=what_fails):
            hand_over(producer, consumer, "2", OTHER, freed_within_s=2)


def test_hand_overs_succeed_without_a_fault(make: Make) -> None:
    producer, consumer = make("P"), make("D")
    hand_over(producer, consumer, "1", SOME)
    hand_over(producer, consumer, "2", OTHER)
    producer.run()
    producer.assert_nothing_left()
    consumer.assert_nothing_left()
