"""Internal promises between the parts of a state; every test that meets a broken one fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kv_scheduler_state import LeaseTable, SchedulerState
from kv_scheduler_state.plan import Outbox
from kv_scheduler_state.records import Request, TicketKey
from kv_scheduler_state.scheduler.consumer import Consumers
from kv_scheduler_state.scheduler.producer import Producers
from kv_scheduler_state.scheduler.sharing import key_of
from kv_scheduler_state.tables import Table

_AFTER_THE_END: Final = frozenset(
    {"draining", "leased", "revoked", "voiding", "streamed", "taken-back", "draining-stream"}
)
_RENEWED: Final = frozenset({"queued", "reading", "offered", "streaming"})


def problems(part: SchedulerState | LeaseTable) -> list[str]:
    """Return every broken internal promise in words; empty when the state is sound."""
    if isinstance(part, LeaseTable):
        return list(_lease_violations(part))
    live, consumers, producers = part._requests, part._consumers, part._producers
    return [
        *_record_violations(live, consumers.table, producers.table),
        *_fence_violations(live, producers),
        *_heartbeat_violations(live, consumers),
        *_outbox_violations(live, part._outbox),
    ]


def _record_violations(live: Mapping[str, Request], consumer_table: Table, producer_table: Table) -> Iterator[str]:
    for request_id, entry in live.items():
        records = (consumer_table, entry.consumer), (producer_table, entry.producer)
        for table, record in records:
            if record is not None and record.state not in table._by_state:
                yield f"{request_id}: {table.name} state '{record.state}' is in no table"
        states = [record.state for _, record in records if record is not None]
        if entry.is_finished and not states:
            yield f"{request_id}: ended, but still remembered"
        if not entry.is_finished and not _AFTER_THE_END.isdisjoint(states):
            yield f"{request_id}: waits for the end of a request that has not finished"


def _fence_violations(live: Mapping[str, Request], producers: Producers) -> Iterator[str]:
    used = [entry.producer.fence for entry in live.values() if entry.producer and entry.producer.fence]
    streams, plain = producers.streams.fences, producers.fences
    free = [slot for pool in (streams, plain) for slot in (*range(pool._unused, pool._end), *pool._returned)]
    slots = [slot for slot, _ in used] + free
    if sorted(slots) != list(range(streams.slots + plain.slots)):
        yield f"fence slots in use and free are {sorted(slots)}, of {streams.slots} and {plain.slots}"


def _heartbeat_violations(live: Mapping[str, Request], consumers: Consumers) -> Iterator[str]:
    wanted: dict[TicketKey, int] = {}
    for request_id, entry in live.items():
        record = entry.consumer
        if record is None:
            continue
        if record.renewed_at is not None:
            key = key_of(record.ticket)
            wanted[key] = wanted.get(key, 0) + 1
        should_renew = record.state in _RENEWED and record.ticket.kind == "handoff"
        if (record.renewed_at is not None) != should_renew:
            yield f"{request_id}: consumer in state '{record.state}' is {'' if record.renewed_at else 'not '}renewed"
    peers = consumers.heartbeats._peers.values()
    renewed = dict(Counter(key_of(record.ticket) for peer in peers for record in peer.holders))
    if wanted != renewed:
        yield f"heartbeats go to {renewed}, the live requests want {wanted}"


def _outbox_violations(live: Mapping[str, Request], outbox: Outbox) -> Iterator[str]:
    parts = [outbox.orders[part] for part in ("expects", "restarts", "completes", "grants", "saves")]
    for request_id in (request_id for part in parts for request_id in part):
        entry = live.get(request_id)
        if entry is None or entry.producer is None:
            yield f"{request_id}: an order waits for a producer request that is not live"


def _lease_violations(table: LeaseTable) -> Iterator[str]:
    for request_id, lease in table._leases.items():
        entries = [due_s for due_s, entry_id in table._due if entry_id == request_id]
        if lease.state == "granted" and lease.deadline_s < min(entries, default=math.inf):
            yield f"{request_id}: granted, but nothing will ever expire it"
        if lease.state not in {"expected", "granted"}:
            yield f"{request_id}: lease state '{lease.state}' is not a live state"
    found = Counter([lease.lease_s for lease in table._leases.values() if lease.state == "granted"])
    if found != table._lengths:
        yield f"lengths of live leases are {dict(found)}, noted are {dict(table._lengths)}"
