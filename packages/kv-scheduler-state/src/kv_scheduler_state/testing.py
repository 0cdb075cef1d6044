"""For tests of a user of this package: forged tickets, and checks for any implementation of `SchedulerState` and `LeaseTable`.

Each check takes a maker of a fresh object and drives it only through the methods that the classes have in common with their
callers' ports. Free of pytest: a failed check raises `ModelViolation`, which is an `AssertionError`.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, final

from kv_scheduler_state._early_ticket import prefill_request_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kv_scheduler_state._leases import LeaseTable
    from kv_scheduler_state._scheduler import SchedulerState

__all__ = ["ModelViolation", "check_lease_table", "check_scheduler_state", "forged_tickets", "tampered_tickets"]

Params = dict[str, Any]

_Drawn = TypeVar("_Drawn")


class Chance(Protocol):
    """Part of `random.Random` that forging takes."""

    def choice(self, values: Sequence[_Drawn], /) -> _Drawn:
        """Return one of the values."""
        ...

    def sample(self, values: Sequence[_Drawn], count: int, /) -> list[_Drawn]:
        """Return so many of them, each once."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return an integer from 0, below `stop`."""
        ...


_HARMLESS = frozenset(("remote_registration_generation",))
"""Keys that a reader ignores beside `kv_generation`; all others are acted upon."""


def _other_blocks(lists: list[list[int]]) -> Iterator[list[list[int]]]:
    for group, ids in enumerate(lists):
        for index in {0, len(ids) - 1} if ids else ():
            changed = copy.deepcopy(lists)
            changed[group][index] += 1
            yield changed
        if len(ids) > 1:
            for kept in (ids[:-1], ids[1:], ids[::-1]):
                changed = copy.deepcopy(lists)
                changed[group] = list(kept)
                yield changed
        yield [[*each, 9] if number == group else list(each) for number, each in enumerate(lists)]


def _changes(key: str, value: object) -> Iterator[object]:
    """Yield other values of a key that a reader would take, or could be made to take."""
    if key == "remote_block_ids":
        yield from _other_blocks(cast("list[list[int]]", value))
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        yield from (value + 1, value - 1 if value > 1 else value + 2, None)
    elif isinstance(value, float):
        yield from (value + 0.5, value * 2, None)
    elif isinstance(value, str):
        flipped = ("0" if value[:1] != "0" else "1") + value[1:]
        yield from (flipped, value[:-1], value + "0", None)
    elif isinstance(value, list):
        numbers = cast("list[int]", value)
        for index, each in enumerate(numbers):
            yield [*numbers[:index], each + 1, *numbers[index + 1 :]]
        yield None
    else:
        yield 7.0 if key == "remote_blocks_expiry_time" else 1


def tampered_tickets(params: Params) -> Iterator[tuple[str, Params]]:
    """Yield (description, ticket) for each key of a ticket that a consumer acts on, changed without knowledge of a secret."""
    for key, value in params.items():
        if key in _HARMLESS or key in {"do_remote_prefill", "do_remote_decode"}:
            continue
        for number, other in enumerate(_changes(key, value)):
            yield f"{key} #{number}", {**copy.deepcopy(params), key: other}
        yield f"{key} cut", {name: each for name, each in copy.deepcopy(params).items() if name != key}
    flipped = copy.deepcopy(params)
    flipped["do_remote_prefill"], flipped["do_remote_decode"] = (
        params["do_remote_decode"],
        params["do_remote_prefill"],
    )
    yield "direction", flipped


def forged_tickets(
    tickets: list[Params], count: int, draw: Chance, reseal: Callable[[Params], Params]
) -> Iterator[tuple[str, Params]]:
    """Yield `count` forged tickets, drawn from honest ones.

    Args:
        tickets: At least two honest, sealed tickets.
        count: How many.
        draw: Where chance comes from.
        reseal: Seals a ticket under a secret that is not the fleet's.
    """
    for index in range(count):
        mine, other = (copy.deepcopy(each) for each in draw.sample(tickets, 2))
        kind = ("changed", "foreign blocks", "foreign request", "foreign seal", "cut", "re-signed", "unsealed")[
            index % 7
        ]
        if kind == "changed":
            what, mine = draw.choice(list(tampered_tickets(mine)))
            kind = f"changed {what}"
        elif kind == "foreign blocks":
            ids = [[block + 1 + draw.randrange(5) for block in group] for group in mine["remote_block_ids"]]
            mine["remote_block_ids"] = ids
        elif kind == "foreign request":
            mine["remote_request_id"], mine["kv_nonce"] = other["remote_request_id"], other["kv_nonce"]
        elif kind == "foreign seal":
            mine["kv_seal"] = other["kv_seal"]
        elif kind == "cut":
            mine["kv_seal"] = mine["kv_seal"][: draw.randrange(64)]
        elif kind == "re-signed":
            mine = reseal(mine)
        else:
            del mine["kv_seal"]
        yield kind, json.loads(json.dumps(mine))


@final
class ModelViolation(AssertionError):  # noqa: N818 -- as in _errors
    """The code under test broke a promise that an engine, or a reader, relies on."""


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
    _demand(admission.role == "producer", "a router's prefill request makes a producer")
    state.allocate("p1", block_ids=blocks, new_block_ids=blocks, external_tokens=0, now_s=0.0)
    state.take_step_plan(now_s=0.0)
    decision = state.finish("p1", reason="length", block_ids=blocks, computed_tokens=32, now_s=1.0)
    _demand(decision.keep_blocks and decision.params is not None, "a finished prefill is handed over")
    grants = state.take_step_plan(now_s=1.0).grants
    _demand([grant.request_id for grant in grants] == ["p1"], "a hand-over comes with a lease")
    state.report(sent=["p1"], received=[], failed=[])
    _demand(not state.snapshot(now_s=2.0), "a sent request is forgotten")
    # The reader of the check may have this engine's name, and no engine reads from itself.
    return {**(decision.params or {}), "remote_engine_id": "another"}


def _start_read(state: SchedulerState, params: dict[str, object]) -> None:
    admission = state.arrive("d1", params, prompt_tokens=32, now_s=0.0)
    _demand(admission.role == "consumer", "a good ticket makes a consumer")
    _demand(state.external_tokens("d1", computed_tokens=16) == 16, "what the prefix hit covers is not read")
    state.allocate("d1", block_ids=[[1, 2]], new_block_ids=[[2]], external_tokens=16, now_s=0.0)
    plan = state.take_step_plan(now_s=0.0)
    _demand([order.is_reported for order in plan.reads] == [True], "a parked request gets one reported order")
    beaten = [request_id for beat in plan.heartbeats for request_id, _ in beat.readers]
    _demand(beaten == ["p1"], "a reading request renews its lease")


def _check_read(state: SchedulerState, params: dict[str, object]) -> None:
    _start_read(state, params)
    state.report(sent=[], received=["d1"], failed=[])
    _demand(not state.take_step_plan(now_s=100.0).heartbeats, "a read that is done renews nothing")
    state.finish("d1", reason="stop", block_ids=[[1, 2]], computed_tokens=33, now_s=100.0)
    _demand(not state.snapshot(now_s=100.0), "a finished request is forgotten")


def _check_full_hit(state: SchedulerState, params: dict[str, object]) -> None:
    state.arrive("d1", params, prompt_tokens=32, now_s=0.0)
    _demand(state.external_tokens("d1", computed_tokens=32) == 0, "a full hit leaves nothing to read")
    state.allocate("d1", block_ids=[[1, 2]], new_block_ids=[[]], external_tokens=0, now_s=0.0)
    orders = state.take_step_plan(now_s=0.0).reads
    _demand([order.is_reported for order in orders] == [False], "a full hit gets one order that nobody waits for")
    _demand(all(order.is_notify_only for order in orders), "a full hit reads nothing")


def _check_abort_while_reading(state: SchedulerState, params: dict[str, object]) -> None:
    _start_read(state, params)
    decision = state.finish("d1", reason="abort", block_ids=[[1, 2]], computed_tokens=0, now_s=0.0)
    _demand(not decision.keep_blocks, "an aborted read is nobody's producer")
    _demand(bool(state.snapshot(now_s=0.0)), "an aborted read is remembered until it is quiet")
    state.report(sent=[], received=["d1"], failed=[])
    _demand(not state.snapshot(now_s=0.0), "a quiet read is forgotten")


def _check_bad_ticket(state: SchedulerState, params: dict[str, object]) -> None:
    values: tuple[object, ...] = (None, [], {"a": 1}, True, -1, "")
    for name in ("remote_host", "remote_port", "remote_engine_id", "remote_request_id", "remote_block_ids"):
        for value in values:
            admission = state.arrive("d1", {**params, name: value}, prompt_tokens=32, now_s=0.0)
            _demand(bool(admission.rejected_code), f"a ticket with {name}={value!r} is refused")
            _demand(state.external_tokens("d1", computed_tokens=0) == 0, "a refused ticket loads nothing")
            state.finish("d1", reason="abort", block_ids=[[]], computed_tokens=0, now_s=0.0)


def check_lease_table(make: Callable[[], LeaseTable]) -> None:
    """Check a lease table.

    Raises:
        ModelViolation: with the promise that is broken.
    """
    table = make()
    for request_id, lease_s in (("long", 20.0), ("short", 10.0)):
        table.grant(request_id, lease_s=lease_s, fence=(0, 7), now_s=0.0)
    _demand(table.next_deadline_s == 10.0, "the next deadline is the earliest one")
    ended = [end for now_s in range(11) for end in table.take_ended(now_s=float(now_s))]
    _demand([(end.request_id, end.reason) for end in ended] == [("short", "expired")], "leases end by deadline")
    _demand(all(end.fence is not None and end.fence[1] != 7 for end in ended), "an end changes the fence word")
    _demand(table.renew("long", now_s=10.0) and not table.renew("short", now_s=10.0), "only a live lease is renewed")
    verdicts = [table.read_complete("long", reader=name, reader_count=2, now_s=10.0) for name in ("a", "a", "b")]
    _demand(verdicts == ["counted", "duplicate", "complete"], f"readers count once each, not {verdicts}")
    _demand([end.reason for end in table.take_ended(now_s=10.0)] == ["read"], "a lease that all have read ends")
    _demand(table.read_complete("short", reader="a", reader_count=1, now_s=10.0) != "counted", "an end is final")
    _demand(table.live_count() == 0 and not table.take_ended(now_s=99.0), "nothing is left, and nothing ends twice")


def _demand(is_kept: bool, promise: str) -> None:
    if not is_kept:
        raise ModelViolation(promise)
