"""Descriptions of live requests, and checks of the internal promises between the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_scheduler_state.machine import GONE, describe_trace
from kv_scheduler_state.scheduler.sharing import key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kv_scheduler_state.machine import Table
    from kv_scheduler_state.outbox import Outbox
    from kv_scheduler_state.records import ConsumerRecord, ProducerRecord, Request
    from kv_scheduler_state.scheduler.consumer import Consumers
    from kv_scheduler_state.scheduler.producer import Producers
    from kv_scheduler_state.scheduler.sharing import TicketKey

__all__ = ["count_states", "describe", "state_of", "violations"]

_WAITS_FOR: Final = {
    ("producer", "waiting"): "the engine, to allocate its prompt",
    ("producer", "prefilling"): "the engine, to compute its prompt",
    ("producer", "prefilled"): "the engine, to finish it",
    ("producer", "preempted"): "the engine, to start it again",
    ("producer", "leased"): "the workers, to report that its readers are done or its lease has expired",
    ("producer", "revoked"): "the workers, to report that its lease has ended early",
    ("producer", "early"): "the engine, to allocate its prompt",
    ("producer", "opening"): "the engine, to compute its prompt",
    ("producer", "offered"): "the engine, to compute its prompt",
    ("producer", "plain"): "the engine, to compute its prompt",
    ("producer", "complete"): "the engine, to finish it",
    ("producer", "stale"): "the engine, to start it again or to finish it",
    ("producer", "voided"): "the engine, to start it again",
    ("producer", "plain-again"): "the engine, to start it again",
    ("producer", "voiding"): "the workers, to report that its word has moved",
    ("producer", "streamed"): "the workers, to report that its readers are done or its lease has expired",
    ("producer", "taken-back"): "the workers, to report that its lease has ended early",
    ("consumer", "asking"): "the peer, to offer a stream or to finish the prompt",
    ("consumer", "asking-final"): "the peer, to finish the prompt, which cannot be read before",
    ("consumer", "offered"): "the engine, to find room for its blocks",
    ("consumer", "streaming"): "the workers, to report the end of its stream",
    ("consumer", "awaiting"): "the peer, to offer a new stream or to finish the prompt",
    ("consumer", "stopping"): "the workers, to report that its stream is given up",
    ("consumer", "draining-stream"): "the workers, to report that its stream is quiet",
    ("consumer", "queued"): "the engine, to allocate blocks for the read",
    ("consumer", "reading"): "the workers, to report the end of its read",
    ("consumer", "draining"): "the workers, to report that its cancelled read is quiet",
    ("consumer", "local"): "the engine, to finish it",
    ("consumer", "failed"): "the engine, to fail it",
}
_AFTER_THE_END: Final = frozenset(
    {"draining", "leased", "revoked", "voiding", "streamed", "taken-back", "draining-stream"}
)
_RENEWED: Final = frozenset({"queued", "reading", "offered", "streaming"})


def count_states(requests: Iterable[Request]) -> dict[str, int]:
    """Return how many records are in each state, by role and state; an ordinary request has none."""
    counts: dict[str, int] = {}
    for live in requests:
        for role, record in (("consumer", live.consumer), ("producer", live.producer)):
            if record is not None:
                name = f"{role}-{record.state}"
                counts[name] = counts.get(name, 0) + 1
    return counts


def state_of(live: Request) -> str:
    """Return the states of a request's records as one word."""
    return "+".join([record.state for record in _pending(live)]) or "running"


def _pending(live: Request) -> list[ConsumerRecord | ProducerRecord]:
    return [record for record in (live.consumer, live.producer) if record is not None and record.state != GONE]


def describe(request_id: str, live: Request, now_s: float) -> dict[str, object]:
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
            **_record("consumer", consumer, now_s),
            "peer_engine_id": consumer.ticket.peer.engine_id,
            "peer_request_id": consumer.ticket.peer_request_id,
            "loadable_tokens": consumer.loadable_tokens,
            "is_renewed": consumer.renewed_at is not None,
        }
    if producer is not None:
        entry["producer"] = {
            **_record("producer", producer, now_s),
            "fence": producer.fence,
            "saved_blocks": producer.saved_blocks,
        }
    pending = _pending(live)
    entry["state"] = state_of(live)
    name = "consumer" if consumer is not None and consumer.state != GONE else "producer"
    entry["waits_for"] = _WAITS_FOR.get((name, pending[0].state), "") if pending else "the engine, to finish it"
    return entry


def _record(machine: str, record: ConsumerRecord | ProducerRecord, now_s: float) -> dict[str, object]:
    return {
        "machine": machine,
        "state": record.state,
        **describe_trace(record.trace, now_s),
    }


def violations(
    live: Mapping[str, Request], consumers: Consumers, producers: Producers, outbox: Outbox
) -> Iterator[str]:
    """Yield every broken promise between the parts, in words."""
    yield from _record_violations(live, consumers.table, producers.table)
    yield from _fence_violations(live, producers)
    yield from _heartbeat_violations(live, consumers)
    yield from _outbox_violations(live, outbox)


def _record_violations(live: Mapping[str, Request], consumer_table: Table, producer_table: Table) -> Iterator[str]:
    for request_id, entry in live.items():
        for table, record in ((consumer_table, entry.consumer), (producer_table, entry.producer)):
            if record is not None and record.state not in table.states:
                yield f"{request_id}: {table.name} state '{record.state}' is in no table"
        pending = _pending(entry)
        if entry.is_finished and not pending:
            yield f"{request_id}: ended, but still remembered"
        if not entry.is_finished and any(record.state in _AFTER_THE_END for record in pending):
            yield f"{request_id}: waits for the end of a request that has not finished"


def _fence_violations(live: Mapping[str, Request], producers: Producers) -> Iterator[str]:
    used = [entry.producer.fence for entry in live.values() if entry.producer and entry.producer.fence]
    streams, plain = producers.streams.fences, producers.fences
    slots = [slot for slot, _ in used] + [*streams.free_slots, *plain.free_slots]
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
    if wanted != consumers.heartbeats.holders():
        yield f"heartbeats go to {consumers.heartbeats.holders()}, the live requests want {wanted}"


def _outbox_violations(live: Mapping[str, Request], outbox: Outbox) -> Iterator[str]:
    parts = [outbox.orders[part] for part in ("expects", "restarts", "completes", "grants", "saves")]
    for request_id in (request_id for part in parts for request_id in part):
        entry = live.get(request_id)
        if entry is None or entry.producer is None:
            yield f"{request_id}: an order waits for a producer request that is not live"
