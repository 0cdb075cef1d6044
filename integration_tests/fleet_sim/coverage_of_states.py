"""Count the steps that production's machines take, by (state, event)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from world import World

import kv_nixl_agent._transfer
import kv_scheduler_state._leases
from kv_nixl_agent._states import TABLE as TRANSFER_TABLE
from kv_nixl_agent._states import step
from kv_scheduler_state._consumer import ConsumerRecord
from kv_scheduler_state._machine import advance
from kv_scheduler_state._producer_record import ProducerRecord
from kv_scheduler_state._stream_reader import StreamReaders
from kv_scheduler_state._stream_tables import STREAM_CONSUMER_TABLE, STREAM_PRODUCER_TABLE, STREAM_READER_TABLE
from kv_scheduler_state._tables import CONSUMER_TABLE, LEASE_TABLE, PRODUCER_TABLE

__all__ = ["OUT_OF_REACH", "all_pairs", "count_steps", "stream_pairs"]

OUT_OF_REACH = {
    ("consumer local", "hit"): "changes nothing, so the step is not taken",
    ("consumer failed", "hit"): "the simulated host has the failure policy of its connector",
    ("lease new", "grant"): "the adapter announces every prompt before it grants its lease",
    ("producer prefilled", "allocate"): "the simulated host tells of an allocation once per start",
    ("producer prefilled", "last-chunk"): "the adapter tells of no step after the last of the prompt",
    ("transfer data-done", "trust"): "every simulated engine has fences",
    ("transfer posted", "post"): "a simulated read is one part: few pages, one kind of memory",
    ("transfer verified", "end"): "the adapter checks no pages and notifies without a transfer of its own",
}
"""Pairs that no seed can meet, and why."""


def all_pairs() -> set[tuple[str, str]]:
    """Return every pair that the machines' tables list."""
    tables = {"producer": PRODUCER_TABLE.rows, "consumer": CONSUMER_TABLE.rows, "lease": LEASE_TABLE.rows}
    pairs = {(f"{name} {row.state}", row.event) for name, rows in tables.items() for row in rows}
    return pairs | {(f"transfer {row.state}", row.event) for row in TRANSFER_TABLE}


def stream_pairs() -> set[tuple[str, str]]:
    """Return every pair that streams add to the machines."""
    tables = {
        "producer": STREAM_PRODUCER_TABLE.rows,
        "consumer": STREAM_CONSUMER_TABLE.rows,
        "reader": STREAM_READER_TABLE.rows,
    }
    return {(f"{name} {row.state}", row.event) for name, rows in tables.items() for row in rows}


def count_steps(stack: ExitStack, world: World) -> None:
    """Count steps into the world's pairs."""
    for name, record in (("producer", ProducerRecord), ("consumer", ConsumerRecord)):
        stack.enter_context(patch.object(record, "__init__", _arriving(record.__init__, name, world)))
        stack.enter_context(patch.object(record, "advance", _counting(record.advance, name, world)))
    stack.enter_context(patch.object(kv_scheduler_state._leases, "advance", _counting(advance, "lease", world)))

    taken = StreamReaders._step

    def read(readers: StreamReaders, request_id: str, reading: Any, event: str) -> Any:
        world.pairs[f"reader {reading.state}", event] += 1
        return taken(readers, request_id, reading, event)

    watched = StreamReaders.watch

    def watch(readers: StreamReaders, *arguments: Any, **facts: Any) -> None:
        world.pairs["reader new", "watch"] += 1
        watched(readers, *arguments, **facts)

    stack.enter_context(patch.object(StreamReaders, "_step", read))
    stack.enter_context(patch.object(StreamReaders, "watch", watch))

    def stepped(state: Any, event: Any) -> Any:
        world.pairs[f"transfer {state}", event] += 1
        return step(state, event)

    stack.enter_context(patch.object(kv_nixl_agent._transfer, "step", stepped))


def _counting(step_of: Any, name: str, world: World) -> Any:
    def advanced(record: Any, row: Any, at_s: float) -> None:
        world.pairs[f"{name} {row.state}", row.event] += 1
        step_of(record, row, at_s)

    return advanced


def _arriving(initialize: Any, name: str, world: World) -> Any:
    def arrived(record: Any, row: Any, *arguments: Any, **named: Any) -> None:
        world.pairs[f"{name} {row.state}", row.event] += 1
        initialize(record, row, *arguments, **named)

    return arrived
