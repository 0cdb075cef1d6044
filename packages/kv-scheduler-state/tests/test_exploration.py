"""Every order of events for up to three requests and two readers, and a planted bug in every transition.

Worlds that are too large to be walked to the end are walked to a depth, and completely so. With the exploration of streams the
full depths cost two minutes of a core, which the daily run cannot spare: it walks three steps less and plants every tenth bug.
`KVDEV_LONG=1` walks to the full depths, and plants all.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from model.explore import decode_world, explore, pair_world, prefill_world

from kv_scheduler_state import LeaseTable
from kv_scheduler_state.machine import Table, Transition
from kv_scheduler_state.scheduler import state as scheduler_state
from kv_scheduler_state.tables import CONSUMER_TABLE
from kv_scheduler_state.worker import leases

IS_LONG = os.environ.get("KVDEV_LONG") == "1"

# Each with the depth to which every order of events is walked; None walks to the end.
WORLDS = {
    "prefill, 1 request, host buffer": (lambda: prefill_world(requests=1), None),
    "prefill, 1 request, device memory": (lambda: prefill_world(requests=1, is_plain=True), None),
    "prefill, 1 request, 2 workers": (lambda: prefill_world(requests=1, workers=2), 12),
    "prefill, 2 requests": (lambda: prefill_world(requests=2), 9),
    "prefill, 3 requests": (lambda: prefill_world(requests=3), 9),
    "decode, 1 request": (lambda: decode_world(requests=1), None),
    "decode, 1 request, failures are final": (lambda: decode_world(requests=1, fails_requests=True), None),
    "decode, 2 requests": (lambda: decode_world(requests=2), 9),
    "decode, 3 requests": (lambda: decode_world(requests=3), 9),
    "decode, 2 requests of one ticket": (lambda: decode_world(requests=2, readers=1, is_shared=True), 11),
    "decode, 3 requests of one ticket": (lambda: decode_world(requests=3, is_shared=True), 7),
    "pair, 1 request": (lambda: pair_world(requests=1), None),
    "pair, 1 request, faults": (lambda: pair_world(requests=1, adversity=1), 11),
    "pair, 2 requests": (lambda: pair_world(requests=2), 11),
    "pair, 3 requests, faults": (lambda: pair_world(requests=3, adversity=1), 8),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_no_order_of_events_breaks_a_promise(name, capsys):
    make_world, max_depth = WORLDS[name]
    if max_depth is not None and not IS_LONG:
        max_depth = max(max_depth - 3, 5)
    result = explore(make_world, max_depth=max_depth)
    with capsys.disabled():
        print(f"\n  {name}: {result}", end="")
    assert not result.violation
    assert result.is_complete or max_depth is not None
    assert result.is_complete or result.depth == max_depth
    assert result.states > 100


PLACES = {
    "producer": (scheduler_state, "PRODUCER_TABLE"),
    "consumer": (scheduler_state, "CONSUMER_TABLE"),
    "lease": (leases, "LEASE_TABLE"),
}


def planted_bugs():
    """Every row without itself, without each effect, and leading somewhere else."""
    for kind, place in PLACES.items():
        table: Table = getattr(*place)
        for index, row in enumerate(table.rows):
            name = f"{kind}: {row.state} x {row.event}"
            others = [state for state in table.states if state not in {row.target, "new"}]
            wrong = others[index % len(others)]
            changes: list[tuple[str, tuple[Transition, ...]]] = [(f"{name}, removed", ())]
            changes += [
                (f"{name}, without {effect}", (replace(row, effects=tuple(e for e in row.effects if e != effect)),))
                for effect in row.effects
            ]
            changes.append((f"{name}, to {wrong}", (replace(row, target=wrong),)))
            for label, rows in changes:
                yield label, kind, (*table.rows[:index], *rows, *table.rows[index + 1 :])


ALL_BUGS = {label: (kind, rows) for label, kind, rows in planted_bugs()}
BUGS = dict(list(ALL_BUGS.items())[:: 1 if IS_LONG else 10])


@pytest.mark.parametrize("label", BUGS)
def test_a_planted_bug_in_any_transition_is_caught(label, monkeypatch):
    kind, rows = BUGS[label]
    monkeypatch.setattr(*PLACES[kind], Table(kind, rows))
    worlds = (
        [
            lambda: decode_world(requests=1),
            lambda: decode_world(requests=1, fails_requests=True),
            lambda: decode_world(requests=2, readers=1, is_shared=True),
            lambda: decode_world(requests=2, readers=1, is_shared=True, fails_requests=True),
        ]
        if kind == "consumer"
        else [lambda: prefill_world(requests=1, is_plain=True), lambda: prefill_world(requests=1)]
    )
    assert any(explore(world, max_states=1400).violation for world in worlds)


def test_grants_that_the_lease_table_does_not_apply_are_noticed(monkeypatch):
    apply = LeaseTable.apply

    def without_grants(table, plan, **values):
        return apply(table, plan._replace(grants=()), **values)

    monkeypatch.setattr(LeaseTable, "apply", without_grants)
    assert "its lease is over, unnoticed" in str(explore(lambda: prefill_world(requests=1)))


def test_a_violation_comes_with_its_path(monkeypatch):
    rows = tuple(row for row in CONSUMER_TABLE.rows if (row.state, row.event) != ("reading", "done"))
    monkeypatch.setattr(*PLACES["consumer"], Table("consumer", rows))
    result = explore(lambda: decode_world(requests=1))
    assert "no transition for event 'done'" in str(result)
    assert result.path == (("d-arrive", "d0"), ("d-load", "d0"))


def test_a_bound_on_depth_is_kept():
    result = explore(lambda: decode_world(requests=1), max_depth=3)
    assert (result.depth, result.is_complete) == (3, False)


def test_a_bound_on_states_is_kept():
    result = explore(lambda: decode_world(requests=1), max_states=30)
    assert (result.states, result.is_complete) == (30, False)
