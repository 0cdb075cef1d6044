"""Checks for any implementation of the scheduler state and of the lease table, as plain callables.

Each check takes a maker of a fresh object, drives it only through the methods that `SchedulerState` and `LeaseTable`
have in common with their callers' ports, and raises `ModelViolation` when a promise is broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_scheduler_state._ticket import prefill_request_params
from kv_scheduler_state.testing._model import demand

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_scheduler_state._leases import LeaseTable
    from kv_scheduler_state._scheduler import SchedulerState

__all__ = ["check_lease_table", "check_scheduler_state"]


def check_scheduler_state(make: Callable[[], SchedulerState]) -> None:
    """Check a scheduler state of a model with one full-attention group.

    Raises:
        ModelViolation: with the promise that is broken.
    """
    params = _check_hand_over(make())
    _check_read(make(), params)
    _check_full_hit(make(), params)
    _check_abort_while_reading(make(), params)
    _check_bad_ticket(make(), params)


def _check_hand_over(state: SchedulerState) -> dict[str, object]:
    blocks = [[1, 2]]
    admission = state.arrive("p1", prefill_request_params(), prompt_tokens=32, now_s=0.0)
    demand(admission.role == "producer", "a router's prefill request makes a producer")
    state.allocate("p1", block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    state.take_step_plan(now_s=0.0)
    decision = state.finish("p1", reason="length", block_ids=blocks, computed_tokens=32, now_s=1.0)
    demand(decision.keep_blocks and decision.params is not None, "a finished prefill is handed over")
    grants = state.take_step_plan(now_s=1.0).grants
    demand([grant.request_id for grant in grants] == ["p1"], "a hand-over comes with a lease")
    state.report(sent=["p1"], received=[], failed=[])
    demand(not state.snapshot(now_s=2.0), "a sent request is forgotten")
    # The reader of the check may have this engine's name, and no engine reads from itself.
    return {**(decision.params or {}), "remote_engine_id": "another"}


def _start_read(state: SchedulerState, params: dict[str, object]) -> None:
    admission = state.arrive("d1", params, prompt_tokens=32, now_s=0.0)
    demand(admission.role == "consumer", "a good ticket makes a consumer")
    demand(state.external_tokens("d1", computed_tokens=16) == 16, "what the prefix hit covers is not read")
    state.allocate("d1", block_ids=[[1, 2]], new_block_ids=[[2]], external_tokens=16, now_s=0.0)
    plan = state.take_step_plan(now_s=0.0)
    demand([order.is_reported for order in plan.reads] == [True], "a parked request gets one reported order")
    beaten = [request_id for beat in plan.heartbeats for request_id, _ in beat.readers]
    demand(beaten == ["p1"], "a reading request renews its lease")


def _check_read(state: SchedulerState, params: dict[str, object]) -> None:
    _start_read(state, params)
    state.report(sent=[], received=["d1"], failed=[])
    demand(not state.take_step_plan(now_s=100.0).heartbeats, "a read that is done renews nothing")
    state.finish("d1", reason="stop", block_ids=[[1, 2]], computed_tokens=33, now_s=100.0)
    demand(not state.snapshot(now_s=100.0), "a finished request is forgotten")


def _check_full_hit(state: SchedulerState, params: dict[str, object]) -> None:
    state.arrive("d1", params, prompt_tokens=32, now_s=0.0)
    demand(state.external_tokens("d1", computed_tokens=32) == 0, "a full hit leaves nothing to read")
    state.allocate("d1", block_ids=[[1, 2]], new_block_ids=[[]], external_tokens=0, now_s=0.0)
    orders = state.take_step_plan(now_s=0.0).reads
    demand([order.is_reported for order in orders] == [False], "a full hit gets one order that nobody waits for")
    demand(all(order.is_notify_only for order in orders), "a full hit reads nothing")


def _check_abort_while_reading(state: SchedulerState, params: dict[str, object]) -> None:
    _start_read(state, params)
    decision = state.finish("d1", reason="abort", block_ids=[[1, 2]], computed_tokens=0, now_s=0.0)
    demand(not decision.keep_blocks, "an aborted read is nobody's producer")
    demand(bool(state.snapshot(now_s=0.0)), "an aborted read is remembered until it is quiet")
    state.report(sent=[], received=["d1"], failed=[])
    demand(not state.snapshot(now_s=0.0), "a quiet read is forgotten")


def _check_bad_ticket(state: SchedulerState, params: dict[str, object]) -> None:
    values: tuple[object, ...] = (None, [], {"a": 1}, True, -1, "")
    for name in ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_block_ids"):
        for value in values:
            admission = state.arrive("d1", {**params, name: value}, prompt_tokens=32, now_s=0.0)
            demand(bool(admission.rejected_code), f"a ticket with {name}={value!r} is refused")
            demand(state.external_tokens("d1", computed_tokens=0) == 0, "a refused ticket loads nothing")
            state.finish("d1", reason="abort", block_ids=[[]], computed_tokens=0, now_s=0.0)


def check_lease_table(make: Callable[[], LeaseTable]) -> None:
    """Check a lease table.

    Raises:
        ModelViolation: with the promise that is broken.
    """
    table = make()
    for request_id, lease_s in (("long", 20.0), ("short", 10.0)):
        table.grant(request_id, lease_s=lease_s, fence=(0, 7), now_s=0.0)
    demand(table.next_deadline_s == 10.0, "the next deadline is the earliest one")
    ended = [end for now_s in range(11) for end in table.take_ended(now_s=float(now_s))]
    demand([(end.request_id, end.reason) for end in ended] == [("short", "expired")], "leases end by deadline")
    demand(all(end.fence is not None and end.fence[1] != 7 for end in ended), "an end changes the fence word")
    demand(table.renew("long", now_s=10.0) and not table.renew("short", now_s=10.0), "only a live lease is renewed")
    verdicts = [table.read_complete("long", reader=name, reader_count=2, now_s=10.0) for name in ("a", "a", "b")]
    demand(verdicts == ["counted", "duplicate", "complete"], f"readers count once each, not {verdicts}")
    demand([end.reason for end in table.take_ended(now_s=10.0)] == ["read"], "a lease that all have read ends")
    demand(table.read_complete("short", reader="a", reader_count=1, now_s=10.0) != "counted", "an end is final")
    demand(table.live_count() == 0 and not table.take_ended(now_s=99.0), "nothing is left, and nothing ends twice")
