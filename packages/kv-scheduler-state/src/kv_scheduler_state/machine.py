"""State machines as data.

A table lists every legal (state, event) pair once: the state it leads to, the effects that must follow and why.
Nothing else decides what is legal. The code that owns a machine asks the table first, and acts on the row it gets;
the documents' diagrams are drawn from the same rows, and the proofs mutate them one by one and demand that each is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeAlias, final

from kv_scheduler_state.errors import IllegalTransition, InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GONE", "NEW", "Table", "Trace", "Transition", "advance", "describe_trace", "shorten"]

NEW = "new"
"""State of a request before its first event."""
GONE = "gone"
"""The one end of every machine; a request in it is forgotten."""


@final
@dataclass(frozen=True, slots=True)
class Transition:
    """A legal step.

    Attributes:
        state: State before.
        event: Name of the event.
        target: State afterwards.
        effects: Names of the actions that must follow.
        why: Reason, a sentence for the reader of the documents.
    """

    state: str
    event: str
    target: str
    effects: tuple[str, ...]
    why: str


Trace: TypeAlias = "list[tuple[float, Transition]]"
"""Steps of a request from state to state, oldest first: its observed time and its row."""
_TRACE_LENGTH: Final = 16


@final
class Table:
    """The transitions of one machine.

    Args:
        name: Name of the machine in messages.
        rows: Its transitions.

    Raises:
        InvalidConfig: `invalid-config`, if two rows share a state and an event, or a row leaves the end.
    """

    def __init__(self, name: str, rows: tuple[Transition, ...]) -> None:
        self.name = name
        self.rows = rows
        self.by_state: dict[str, dict[str, Transition]] = {}
        self._by_event: dict[str, dict[str, Transition]] = {}
        for row in rows:
            events = self.by_state.setdefault(row.state, {})
            if row.event in events or row.state == GONE:
                raise InvalidConfig(f"{name}: '{row.state}' x '{row.event}' is listed twice or leaves the end")
            events[row.event] = row
            self._by_event.setdefault(row.event, {})[row.state] = row
        # Every state, in order of first mention.
        self.states = tuple(dict.fromkeys(state for row in rows for state in (row.state, row.target)))

    def joined(self, other: Table) -> Table:
        """Return a machine with the rows of both, under this one's name.

        Raises:
            InvalidConfig: `invalid-config`, if two rows share a state and an event.
        """
        return Table(self.name, (*self.rows, *other.rows))

    @property
    def events(self) -> tuple[str, ...]:
        """Every event, in order of first mention."""
        return tuple(dict.fromkeys(row.event for row in self.rows))

    def on(self, event: str) -> Mapping[str, Transition]:
        """Return the event's rows by state, so that a caller of one event finds a row in a single look-up.

        A state that is missing there has no transition for the event: call `refuse`.
        """
        return self._by_event.get(event, {})

    def refuse(self, request_id: str, state: str, event: str) -> NoReturn:
        """Refuse an event that the table has no row for.

        Raises:
            IllegalTransition: `illegal-transition`, always.
        """
        raise IllegalTransition(self.name, request_id, state, event)

    def find(self, request_id: str, state: str, event: str) -> Transition:
        """Return the row for an event.

        Raises:
            IllegalTransition: `illegal-transition`, if the table has none.
        """
        row = self.by_state.get(state, {}).get(event)
        return row or self.refuse(request_id, state, event)


class Tracked(Protocol):
    """The part of a request's record that every machine keeps."""

    state: str
    trace: Trace


def advance(record: Tracked, row: Transition, now_s: float) -> None:
    """Move a request to a row's target and remember the step, unless the request stays where it is."""
    if row.target != record.state:
        record.state = row.target
        record.trace.append((now_s, row))


def shorten(trace: Trace) -> None:
    """Drop all but the newest steps of a trace.

    Only for the steps that close a circle in a table (`preempt`): between two of those a trace cannot grow beyond the table.
    """
    del trace[:-_TRACE_LENGTH]


def describe_trace(trace: Trace, now_s: float) -> dict[str, object]:
    """Return how long a request has been in its state, and its newest steps, oldest first."""
    return {
        "in_state_s": now_s - trace[-1][0] if trace else 0.0,
        "trace": [{"at_s": at_s, "event": row.event, "state": row.target} for at_s, row in trace[-_TRACE_LENGTH:]],
    }
