"""Answers to "what is this request waiting for"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_scheduler_state._machine import GONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kv_scheduler_state._consumer import ConsumerDesk, ConsumerHalf
    from kv_scheduler_state._live import Live
    from kv_scheduler_state._machine import Table
    from kv_scheduler_state._outbox import Outbox
    from kv_scheduler_state._producer import ProducerDesk, ProducerHalf

__all__ = ["count_states", "describe", "violations", "youngest_leases"]

_WAITS_FOR: Final = {
    ("producer", "waiting"): "the engine, to allocate its prompt",
    ("producer", "prefilling"): "the engine, to compute its prompt",
    ("producer", "prefilled"): "the engine, to finish it",
    ("producer", "preempted"): "the engine, to start it again",
    ("producer", "leased"): "the workers, to report that its readers are done or its lease has expired",
    ("producer", "revoked"): "the workers, to report that its lease has ended early",
    ("consumer", "queued"): "the engine, to allocate blocks for the read",
    ("consumer", "reading"): "the workers, to report the end of its read",
    ("consumer", "draining"): "the workers, to report that its cancelled read is quiet",
    ("consumer", "local"): "the engine, to finish it",
    ("consumer", "failed"): "the engine, to fail it",
}


def count_states(requests: Iterable[Live]) -> dict[str, int]:
    """Return how many halves of requests are in each state, by role and state; an ordinary request has none."""
    counts: dict[str, int] = {}
    for live in requests:
        for role, half in (("consumer", live.consumer), ("producer", live.producer)):
            if half is not None:
                name = f"{role}-{half.state}"
                counts[name] = counts.get(name, 0) + 1
    return counts


def describe(request_id: str, live: Live, now_s: float) -> dict[str, object]:
    """Return a live request as plain values."""
    consumer, producer = live.consumer, live.producer
    entry: dict[str, object] = {
        "request_id": request_id,
        "role": "producer" if producer is not None else "consumer" if consumer is not None else "none",
        "age_s": now_s - live.born_s,
        "prompt_tokens": live.prompt_tokens,
        "rejected_code": live.rejected_code,
        "is_finished": live.is_finished,
    }
    if consumer is not None:
        entry["consumer"] = {
            **_half("consumer", consumer, now_s),
            "peer_engine_id": consumer.ticket.peer.engine_id,
            "peer_request_id": consumer.ticket.peer_request_id,
            "loadable_tokens": consumer.loadable_tokens,
            "is_renewed": consumer.peer is not None,
        }
    if producer is not None:
        entry["producer"] = {
            **_half("producer", producer, now_s),
            "fence": producer.fence,
            "saved_blocks": producer.saved_blocks,
        }
    pending = [half for half in (consumer, producer) if half is not None and half.state != GONE]
    entry["state"] = "+".join(half.state for half in pending) or "running"
    name = "consumer" if consumer is not None and consumer.state != GONE else "producer"
    entry["waits_for"] = _WAITS_FOR.get((name, pending[0].state), "") if pending else "the engine, to finish it"
    return entry


def _half(machine: str, half: ConsumerHalf | ProducerHalf, now_s: float) -> dict[str, object]:
    return {
        "machine": machine,
        "state": half.state,
        "in_state_s": now_s - half.since_s,
        "trace": [{"at_s": at_s, "event": event, "state": state} for at_s, event, state in half.trace],
    }


def youngest_leases(live: Mapping[str, Live], limit: int) -> tuple[str, ...]:
    """Return up to `limit` requests with a lease, youngest first. Costs a scan."""
    leased = [
        (entry.producer.since_s, order, request_id)
        for order, (request_id, entry) in enumerate(live.items())
        if entry.producer is not None and entry.producer.state == "leased"
    ]
    leased.sort(reverse=True)
    return tuple([request_id for _, _, request_id in leased[: max(0, limit)]])


def violations(
    live: Mapping[str, Live], consumers: ConsumerDesk, producers: ProducerDesk, outbox: Outbox
) -> Iterator[str]:
    """Yield every broken promise between the parts, in words."""
    yield from _half_violations(live, consumers.table, producers.table)
    yield from _fence_violations(live, producers)
    yield from _heartbeat_violations(live, consumers)
    yield from _outbox_violations(live, outbox)


def _half_violations(live: Mapping[str, Live], consumer_table: Table, producer_table: Table) -> Iterator[str]:
    for request_id, entry in live.items():
        for table, half in ((consumer_table, entry.consumer), (producer_table, entry.producer)):
            if half is not None and half.state not in table.states:
                yield f"{request_id}: {table.name} state '{half.state}' is in no table"
        pending = [half for half in (entry.consumer, entry.producer) if half is not None and half.state != GONE]
        if entry.is_finished and not pending:
            yield f"{request_id}: ended, but still remembered"
        if not entry.is_finished and any(half.state in {"draining", "leased", "revoked"} for half in pending):
            yield f"{request_id}: waits for the end of a request that has not finished"


def _fence_violations(live: Mapping[str, Live], producers: ProducerDesk) -> Iterator[str]:
    used = [entry.producer.fence for entry in live.values() if entry.producer and entry.producer.fence]
    slots = [slot for slot, _ in used] + list(producers.fences.free_slots)
    if sorted(slots) != list(range(producers.fences.slots)):
        yield f"fence slots in use and free are {sorted(slots)}, of {producers.fences.slots}"


def _heartbeat_violations(live: Mapping[str, Live], consumers: ConsumerDesk) -> Iterator[str]:
    wanted: dict[tuple[str, str], int] = {}
    for request_id, entry in live.items():
        half = entry.consumer
        if half is None:
            continue
        if half.peer is not None:
            key = (half.ticket.peer.engine_id, half.ticket.peer_request_id)
            wanted[key] = wanted.get(key, 0) + 1
        should_renew = half.state in {"queued", "reading"} and half.ticket.kind == "handoff"
        if (half.peer is not None) != should_renew:
            yield f"{request_id}: consumer in state '{half.state}' is {'' if half.peer else 'not '}renewed"
    if wanted != consumers.heartbeats.holders():
        yield f"heartbeats go to {consumers.heartbeats.holders()}, the live requests want {wanted}"


def _outbox_violations(live: Mapping[str, Live], outbox: Outbox) -> Iterator[str]:
    if outbox.holds_orders() != outbox.has_orders:
        yield f"outbox says has_orders={outbox.has_orders}, and is wrong"
    granted, saved = [grant.request_id for grant in outbox.grants], [request_id for request_id, _ in outbox.saves]
    for request_id in (*outbox.expects, *granted, *saved):
        entry = live.get(request_id)
        if entry is None or entry.producer is None:
            yield f"{request_id}: an order waits for a producer request that is not live"
