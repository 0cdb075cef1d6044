"""The client session's states as data; the diagram in the documentation is generated from here.

Theory of operation. One session is one connection to one listener, asked for one or more ranks. Queries may be sent
ahead of their replies (pipelining); a listener answers in order, so replies are matched to queries by position. A
reply is a message of one or two frames, which may come in pieces of any size: bytes move the session to *receiving*,
and the end of the message lets it judge the whole reply. The first error ends the session, because afterwards no later
reply can be matched to its query.

A session only reports causes: it sent a query, bytes came, a reply was accepted, something failed. `next_step` looks up
the event that this cause means in the present state and returns the next state. Three events share the cause "a reply was
accepted"; the ranks that are left choose among them. Example with ranks A, B, C, of which A and B were asked:

    receiving, reply of A accepted, B outstanding       -> reply-accepted     -> waiting
    receiving, reply of B accepted, only C unasked      -> all-replied        -> answered
    receiving, reply of C accepted, nothing left        -> last-rank-accepted -> done

A cause that no event of the state covers is illegal: `IllegalEvent.fault` is the caller for a query too many
and for bytes before the first query, the peer for bytes that answer no query.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "EVENTS",
    "FINAL_STATES",
    "INITIAL_STATE",
    "TRANSITIONS",
    "Cause",
    "Event",
    "IllegalEvent",
    "RanksLeft",
    "State",
    "next_step",
    "state_diagram",
]

State = Literal["idle", "waiting", "receiving", "answered", "done", "failed"]
Event = Literal["query-sent", "bytes", "reply-accepted", "all-replied", "last-rank-accepted", "fault"]
Cause = Literal["query", "bytes", "reply", "fault"]
RanksLeft = Literal["outstanding", "unasked", "none"]
"""The strongest statement about ranks without an answer: a query is outstanding, some are unasked, or none is left."""

INITIAL_STATE: State = "idle"
FINAL_STATES: frozenset[State] = frozenset({"done", "failed"})


class Trigger(NamedTuple):
    """Meaning of an event.

    Attributes:
        cause: The report of the session that makes it happen.
        left: Ranks that must be left for it; None for any.
    """

    cause: Cause
    left: RanksLeft | None = None


EVENTS: Mapping[Event, Trigger] = MappingProxyType(
    {
        "query-sent": Trigger("query"),
        "bytes": Trigger("bytes"),
        "reply-accepted": Trigger("reply", "outstanding"),
        "all-replied": Trigger("reply", "unasked"),
        "last-rank-accepted": Trigger("reply", "none"),
        "fault": Trigger("fault"),
    }
)

TRANSITIONS: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {
        # No query has been sent yet.
        "idle": MappingProxyType[Event, State]({"query-sent": "waiting", "fault": "failed"}),
        # At least one reply is outstanding, none has begun.
        "waiting": MappingProxyType[Event, State]({"query-sent": "waiting", "bytes": "receiving", "fault": "failed"}),
        # Part of a reply is here.
        "receiving": MappingProxyType[Event, State](
            {
                "query-sent": "receiving",
                "bytes": "receiving",
                "reply-accepted": "waiting",
                "all-replied": "answered",
                "last-rank-accepted": "done",
                "fault": "failed",
            }
        ),
        # Every query has its reply, some ranks are still to be asked.
        "answered": MappingProxyType[Event, State]({"query-sent": "waiting", "fault": "failed"}),
        "done": MappingProxyType[Event, State]({}),
        "failed": MappingProxyType[Event, State]({}),
    }
)

_PEER_CAUSES: frozenset[Cause] = frozenset({"bytes", "reply"})


class IllegalEvent(NamedTuple):
    """A cause that the present state does not allow.

    Attributes:
        state: The present state.
        cause: The cause.
        fault: ``local`` for a mistake of the caller, ``peer`` for one of the peer.
    """

    state: State
    cause: Cause
    fault: Literal["local", "peer"]


def _look_up(state: State, cause: Cause, left: RanksLeft) -> State | IllegalEvent:
    for event, target in TRANSITIONS[state].items():
        trigger = EVENTS[event]
        if trigger.cause == cause and trigger.left in (None, left):
            return target
    is_peer = cause in _PEER_CAUSES and state != INITIAL_STATE
    return IllegalEvent(state, cause, "peer" if is_peer else "local")


_STEPS: Mapping[tuple[State, Cause, RanksLeft], State | IllegalEvent] = {
    (state, cause, left): _look_up(state, cause, left)
    for state in TRANSITIONS
    for cause in get_args(Cause)
    for left in get_args(RanksLeft)
}


def next_step(state: State, cause: Cause, left: RanksLeft) -> State | IllegalEvent:
    """Return the next state, or the illegal event if the table has none for this cause."""
    return _STEPS[state, cause, left]


def state_diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL_STATE}"]
    for state, events in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {event}" for event, target in events.items()]
    lines += [f"    {state} --> [*]" for state in TRANSITIONS if state in FINAL_STATES]
    return "\n".join(lines) + "\n"
