"""The states of a transfer, as data.

`TABLE` lists every legal (state, event) pair once. `Transfer` consults it before anything else happens; the diagram and the
table in docs/transfers.md are generated from the same rows, and the random driver of the tests compares every step
of every transfer with them.

A transfer *reports* its single result in the step that leaves the states in which the caller waits for it. If some of its parts
are on the wire at that moment, their handles are kept and its pages stay in quarantine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Effect", "Event", "State", "TABLE", "Transition", "step"]

State = Literal["new", "queued", "posted", "data-done", "fence-posted", "verified", "quarantined", "gone"]
Event = Literal[
    "accept",
    "post",
    "skip-data",
    "last-part-done",
    "trust",
    "post-fence",
    "match",
    "confirm",
    "end",
    "abandon",
    "quiet",
]
Effect = Literal["report", "hold", "report-quiet"]


@final
@dataclass(frozen=True, slots=True)
class Transition:
    """Legal step of a transfer.

    Attributes:
        state: State before.
        event: Name of the event.
        target: State afterwards.
        effects: Effects that must follow: `report` the result, `hold` the handles of the active parts, `report-quiet`.
        why: Reason, as a sentence for the documentation.
    """

    state: State
    event: Event
    target: State
    effects: tuple[Effect, ...]
    why: str


_T = Transition

TABLE: Final = (
    _T("new", "accept", "queued", (), "The order is valid; it waits for its peer's turn and for room on the wire."),
    _T("queued", "post", "posted", (), "The first part is handed to NIXL."),
    _T(
        "queued",
        "skip-data",
        "data-done",
        (),
        "The order names no descriptors: a notification, a fence check or a probe.",
    ),
    _T("queued", "end", "gone", ("report",), "Cancelled, late, refused by NIXL, or its peer was removed."),
    _T("posted", "post", "posted", (), "A further part is handed to NIXL."),
    _T("posted", "last-part-done", "data-done", (), "NIXL said done for every part."),
    _T("posted", "end", "gone", ("report",), "It ends early, and nothing of it is on the wire."),
    _T("posted", "abandon", "quarantined", ("report", "hold"), "It ends early with parts on the wire."),
    _T("data-done", "trust", "verified", (), "The order names no fence."),
    _T("data-done", "post-fence", "fence-posted", (), "One word of the peer is read, after the data."),
    _T(
        "data-done",
        "end",
        "gone",
        ("report",),
        "It ends while it waits for a scratch word, or the fence cannot be read.",
    ),
    _T("fence-posted", "match", "verified", (), "The word shows the lease's generation (a probe takes any)."),
    _T(
        "fence-posted",
        "end",
        "gone",
        ("report",),
        "The word differs, or it ends early; only a scratch word is at risk.",
    ),
    _T("verified", "confirm", "gone", ("report",), "The peer is notified."),
    _T("verified", "end", "gone", ("report",), "A peer that is only notified cannot be reached."),
    _T("quarantined", "quiet", "gone", ("report-quiet",), "Nothing of it can reach the local pages any more."),
)

_BY_STATE_AND_EVENT: Final[Mapping[tuple[State, Event], Transition]] = MappingProxyType(
    {(row.state, row.event): row for row in TABLE}
)


def step(state: State, event: Event) -> Transition:
    """Return the row for an event; a missing row is a defect of this package and raises `AssertionError`."""
    row = _BY_STATE_AND_EVENT.get((state, event))
    if row is None:
        raise AssertionError(f"transfer table: no event {event!r} in state {state!r}")
    return row
