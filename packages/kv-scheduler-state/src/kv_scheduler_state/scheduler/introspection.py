"""Descriptions of live requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_scheduler_state.tables import GONE, describe_trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_scheduler_state.records import ConsumerRecord, ProducerRecord, Request

__all__ = ["count_states", "describe", "pending_records", "state_of"]

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
    return "+".join([record.state for record in pending_records(live)]) or "running"


def pending_records(live: Request) -> list[ConsumerRecord | ProducerRecord]:
    """Return the records of a request that have not ended."""
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
    pending = pending_records(live)
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
