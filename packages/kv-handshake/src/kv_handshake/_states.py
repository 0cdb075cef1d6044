"""The client session's states as data; the diagram in the documentation is generated from here.

Theory of operation. One session is one connection to one listener, asked for one or more ranks. Queries may be sent
ahead of their replies (pipelining); a listener answers in order, so replies are matched to queries by position. A
reply is a message of one or two frames, which may come in pieces of any size: bytes move the session to *receiving*,
and the end of the message lets it judge the whole reply. The first thing that goes wrong ends the session, since
after it nobody can say which later reply belongs to which query.

Each table entry maps (state, event) to the next state. An event that a state does not list is the fault of whoever
caused it: the caller's if he sends or feeds in the wrong state, the peer's if a reply comes that nobody asked for.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FINAL_STATES", "INITIAL_STATE", "TRANSITIONS", "Event", "State", "state_diagram"]

State = Literal["idle", "waiting", "receiving", "done", "failed"]
Event = Literal["query-sent", "bytes", "reply-accepted", "all-replied", "last-rank-accepted", "fault"]

INITIAL_STATE: State = "idle"
FINAL_STATES: frozenset[State] = frozenset({"done", "failed"})

TRANSITIONS: Mapping[State, Mapping[Event, State]] = MappingProxyType(
    {
        # Nothing is outstanding, some ranks are still to be asked.
        "idle": MappingProxyType[Event, State]({"query-sent": "waiting", "fault": "failed"}),
        # At least one reply is outstanding, none has begun.
        "waiting": MappingProxyType[Event, State]({"query-sent": "waiting", "bytes": "receiving", "fault": "failed"}),
        # Part of a reply is here.
        "receiving": MappingProxyType[Event, State](
            {
                "query-sent": "receiving",
                "bytes": "receiving",
                "reply-accepted": "waiting",
                "all-replied": "idle",
                "last-rank-accepted": "done",
                "fault": "failed",
            }
        ),
        "done": MappingProxyType[Event, State]({}),
        "failed": MappingProxyType[Event, State]({}),
    }
)


def state_diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL_STATE}"]
    for state, events in TRANSITIONS.items():
        lines += [f"    {state} --> {target}: {event}" for event, target in events.items()]
    lines += [f"    {state} --> [*]" for state in TRANSITIONS if state in FINAL_STATES]
    return "\n".join(lines) + "\n"
