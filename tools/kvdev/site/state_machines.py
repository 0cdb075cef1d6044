"""The page of state machines: a diagram and a table of each, from the tables of kv-scheduler-state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kv_scheduler_state.machine import GONE, NEW
from kv_scheduler_state.tables import (
    CONSUMER_TABLE,
    LEASE_TABLE,
    PRODUCER_TABLE,
    STREAM_CONSUMER_TABLE,
    STREAM_PRODUCER_TABLE,
    STREAM_READER_TABLE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_scheduler_state.machine import Table

__all__ = ["state_machines_page"]

_HEAD: Final = """\
# State machines of a hand-over

Read from the code. An event that a state does not list raises `IllegalTransition` and changes nothing.

A request has a *producer* record if a peer is to read its blocks, and a *consumer* record if its prompt is to be read
from a peer; both live in the engine's scheduler process. A *lease* lives once in every worker of the producer. A prompt that
is read while it is computed has the states of a *streamed* producer or consumer, until it goes on as a plain one; its
*stream reader* lives once in every worker of the consumer.
"""

_SECTIONS: Final = (
    ("Producer", PRODUCER_TABLE, "`SchedulerState`, for a request whose blocks are handed over."),
    (
        "Consumer",
        CONSUMER_TABLE,
        (
            "`SchedulerState`, for a request that came with a ticket. `load` is an allocation with external "
            "tokens, `hit` one without. `broken` is a failed read under the policy to recompute, `broken-for-good` under the "
            "policy to fail. `hit-shared` and `finish-shared` stand for `hit` and `finish` while another request holds the same "
            "ticket (n > 1)."
        ),
    ),
    (
        "Lease",
        LEASE_TABLE,
        "`LeaseTable`. `reader` and `last-reader` are completions of readers that were not counted before.",
    ),
    (
        "Streamed producer",
        STREAM_PRODUCER_TABLE,
        (
            "`SchedulerState`, for a request with an early ticket: rows that the producer has besides. `reset` voids all KV from "
            "before. A question is answered as soon as its request is `offered`, `complete`, `streamed` or at its end."
        ),
    ),
    (
        "Streamed consumer",
        STREAM_CONSUMER_TABLE,
        (
            "`SchedulerState`, for a request with nothing but an early ticket: rows that the consumer has besides. `torn` is the "
            "workers' common report of a stream that did not hold, which the engine does not hear; `broken` and "
            "`broken-for-good` are reports that it hears. `queued`, `reading`, `local` and `failed` are as of a plain one."
        ),
    ),
    (
        "Stream reader",
        STREAM_READER_TABLE,
        (
            "`StreamReaders`, for a stream on one worker of the consumer. Its end goes through `WorkerState`, which knows what "
            "the engine may hear."
        ),
    ),
)


def state_machines_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *["\n".join(_section(*section)) for section in _SECTIONS]])


def _section(title: str, table: Table, about: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield about
    yield ""
    yield "```mermaid"
    yield "stateDiagram-v2"
    for (state, target), events in _edges(table).items():
        yield f"    {_node(state)} --> {_node(target)}: {', '.join(events)}"
    yield "```"
    yield ""
    yield "| state | event | next state | effects | why |"
    yield "|---|---|---|---|---|"
    for row in table.rows:
        yield f"| {row.state} | {row.event} | {row.target} | {', '.join(row.effects)} | {row.why} |"
    yield ""


def _edges(table: Table) -> dict[tuple[str, str], list[str]]:
    edges: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        edges.setdefault((row.state, row.target), []).append(row.event)
    return edges


def _node(state: str) -> str:
    """Return the name of a state in a diagram, where not every reader of diagrams takes a hyphen."""
    return "[*]" if state in {NEW, GONE} else state.replace("-", "_")
