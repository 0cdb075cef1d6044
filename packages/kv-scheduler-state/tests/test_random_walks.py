"""Fleets of random configurations: nothing breaks, and each fix that is taken back is missed.

`KV_PROOF=full` walks ten times as many fleets.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import ModuleType

import pytest
from model.fleet import random_walk

from kv_scheduler_state import _admission, _leases, _scheduler_base
from kv_scheduler_state._blocks import BlockRules
from kv_scheduler_state._lease import Lease
from kv_scheduler_state._leases import LeaseTable
from kv_scheduler_state._machine import Table
from kv_scheduler_state._producer import Producers
from kv_scheduler_state.testing import ModelViolation

SEEDS = 600 if os.environ.get("KV_PROOF") == "full" else 60
ROUNDS = 60


def found(*, seeds: int = 400) -> str:
    """Walk until a promise is broken; return the promise, or nothing."""
    for seed in range(seeds):
        try:
            random_walk(random.Random(seed).randrange, rounds=ROUNDS)
        except ModelViolation as violation:
            return str(violation)
    return ""


@pytest.mark.never_wrong("C8")
@pytest.mark.timeout(600)
def test_no_fleet_of_any_configuration_breaks_a_promise():
    configurations = {random_walk(random.Random(seed).randrange, rounds=ROUNDS) for seed in range(SEEDS)}
    for name in ("groups", "workers", "readers", "consumers", "siblings", "fence_slots", "ids", "lease_s", "has_lag"):
        assert len({getattr(configuration, name) for configuration in configurations}) > 1, name


def without(module: ModuleType, name: str, state: str, event: str, effect: str) -> tuple[ModuleType, str, Table]:
    """Return the module's table without an effect, and its place."""
    table: Table = getattr(module, name)
    rows = [
        replace(row, effects=tuple(kept for kept in row.effects if kept != effect))
        if (row.state, row.event) == (state, event)
        else row
        for row in table.rows
    ]
    assert tuple(rows) != table.rows
    return module, name, Table(table.name, tuple(rows))


TABLES = {
    "revocations are not ordered": without(_scheduler_base, "PRODUCER_TABLE", "leased", "revoke", "order-revoke"),
    "a restart keeps its word": without(_scheduler_base, "PRODUCER_TABLE", "preempted", "allocate", "restart"),
    "slots do not come back": without(_scheduler_base, "PRODUCER_TABLE", "leased", "sent", "return-slot"),
    "an aborted read is renewed": without(_scheduler_base, "CONSUMER_TABLE", "reading", "finish", "stop-heartbeat"),
    "nobody renews": without(_scheduler_base, "CONSUMER_TABLE", "new", "arrive", "start-heartbeat"),
    "a renewal is not counted": without(_leases, "LEASE_TABLE", "granted", "renew", "extend"),
}


@pytest.mark.never_wrong("C8")
@pytest.mark.parametrize("bug", TABLES)
def test_a_bug_in_a_table_is_found(bug, monkeypatch):
    monkeypatch.setattr(*TABLES[bug])
    assert found()


def any_slot(self, request_id, record, block_ids, computed_tokens, *, withhold):
    row = self.table.find(request_id, record.state, "drop" if withhold or record.is_void else "hand-over")
    return row, "cache-reset" if record.is_void else ""


def all_blocks(self, block_ids, tokens, _offered=BlockRules.offered):
    return _offered(self, block_ids, 1 << 20)


def consumers_together(self, request_id, _count=LeaseTable.read_complete, **values):
    return _count(self, request_id, **{**values, "consumer": ""})


def returned_ids_are_problems(self, _check=LeaseTable.check_invariants):
    ended = [end.request_id for end in self._ended]
    return (*_check(self), *(f"{name}: ended, but still live" for name in ended if name in self._leases))


def grants_are_not_applied(self, plan, _apply=LeaseTable.apply, **values):
    return _apply(self, plan._replace(grants=()), **values)


REVERTED = {
    "a worker applies no grants": (LeaseTable, "apply", grants_are_not_applied),
    "no slot, and a ticket without a fence": (Producers, "ending", any_slot),
    "tickets cover blocks that were allocated ahead": (BlockRules, "offered", all_blocks),
    "a ticket serves any prompt": (_admission, "_require_prompt", lambda *_: None),
    "pauses of five seconds end short leases": (
        LeaseTable,
        "_note_length",
        lambda self, lease_s, change: self._lengths.update({lease_s: change}),
    ),
    "readers of all consumers add up": (LeaseTable, "read_complete", consumers_together),
    "readers of an earlier grant count": (Lease, "keep_readers_of", lambda *_: None),
    "an id that returns is called broken": (LeaseTable, "check_invariants", returned_ids_are_problems),
}


@pytest.mark.never_wrong("C8")
@pytest.mark.parametrize("fix", REVERTED)
def test_a_fix_that_is_taken_back_is_missed(fix, monkeypatch):
    monkeypatch.setattr(*REVERTED[fix])
    assert found()


@pytest.mark.never_wrong("C8")
def test_a_late_notification_of_an_earlier_grant_is_missed(monkeypatch):
    monkeypatch.setattr("kv_scheduler_state._leases._is_stale", lambda *_: False)
    assert "have reported" in found()
