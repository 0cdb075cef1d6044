"""Keys of states: everything that determines a prefill request's future, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_scheduler_state.worker.leases import Lease

    from .prefill import PrefillSide


def prefill_key(side: PrefillSide, request_id: str, now_s: float, *, is_named: bool) -> tuple[object, ...]:
    """Return everything that determines this request's future, with times relative to now and, perhaps, readers unnamed."""
    prompt = side.prompts[request_id]
    live = side.state._requests.get(request_id)  # the key must see what decides the future
    outbox = side.state._outbox.orders
    leases = [table._leases.get(request_id) for table in side.tables]
    readers = [
        [
            (reader in told, lease is not None and reader in lease.readers_done)
            for told, lease in zip(prompt.delivered, leases, strict=True)
        ]
        for reader in side.readers
    ]
    return (
        prompt.status,
        prompt.is_stepped,
        prompt.chunks,
        prompt.preemptions,
        (prompt.is_revoked, prompt.is_revocation_told),
        tuple(sorted(prompt.saved)) and tuple(block % 10 for block in sorted(prompt.saved)),
        readers if is_named else sorted(readers),
        tuple(None if at is None else max(0.0, at - now_s) for at in prompt.deadlines),
        tuple(sorted(prompt.reported)),
        (
            prompt.is_start_due,
            prompt.completes_due,
            request_id in outbox["restarts"],
            request_id in outbox["completes"],
        ),
        (prompt.is_release_told, tuple(sorted(prompt.released)), prompt.is_allocated_twice, prompt.decoded),
        live and live.producer and live.producer.state,
        [_lease_key(lease, now_s) for lease in leases],
        prompt.ticket is not None and side.is_fence_intact(request_id),
        request_id in outbox["expects"],
        request_id in outbox["grants"],
        request_id in outbox["releases"],
        request_id in outbox["revokes"],
        len(outbox["saves"].get(request_id, ())),
    )


def _lease_key(lease: Lease | None, now_s: float) -> tuple[object, ...] | None:
    if lease is None:
        return None
    left_s = max(0.0, lease.deadline_s - now_s) if lease.state == "granted" else None
    return lease.state, left_s, len(lease.readers_done), any(each.is_complete for each in lease.readers.values())
