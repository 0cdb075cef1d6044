"""`Transfer`: one accepted order, from its first part to its single result.

`TABLE` lists every legal (state, event) pair once; each method of `Transfer` takes one of these steps. The diagram and the table
in docs/transfers.md are generated from the same rows.

With a fence, the notification is *not* attached to the data: it would make the producer release the blocks, and so void the
fence, before the consumer has checked it. It is sent separately after the verification. Without a fence, it travels with the
data as in vLLM's own connector, at no cost.

A transfer *reports* its single result in the step that leaves the states in which the caller waits for it. If some of its parts
are on the wire at that moment, it reports `is_memory_quiet=False`, and its handles are kept and its pages stay in quarantine.
Its id stays in use until the quarantine ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, final

from kv_nixl_agent.errors import AgentError, transfer_code
from kv_nixl_agent.transfers.handles import Hold, has_left_the_wire, was_rejected
from kv_nixl_agent.values import TransferResult

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Mapping

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import MemoryKind, NixlPort, Progress
    from kv_nixl_agent.transfers.handles import Handles, Part
    from kv_nixl_agent.values import Outcome, TransferOrder

__all__ = ["Event", "State", "TABLE", "Transfer", "Transition", "Wiring"]

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
    _T("queued", "skip-data", "data-done", (), "The order names no descriptors."),
    _T("queued", "end", "gone", ("report",), "Cancelled, late, refused by NIXL, or its peer was removed."),
    _T("posted", "post", "posted", (), "A further part is handed to NIXL."),
    _T("posted", "last-part-done", "data-done", (), "NIXL said done for every part."),
    _T("posted", "end", "gone", ("report",), "It ends early, and nothing of it is on the wire."),
    _T("posted", "abandon", "quarantined", ("report", "hold"), "It ends early with parts on the wire."),
    _T("data-done", "trust", "verified", (), "The order names no fence."),
    _T("data-done", "post-fence", "fence-posted", (), "The peer's word is read, after the data."),
    _T("data-done", "end", "gone", ("report",), "The fence cannot be read, or it ends before that."),
    _T("fence-posted", "match", "verified", (), "The word shows the lease's generation (a probe takes any)."),
    _T("fence-posted", "end", "gone", ("report",), "The word differs, or it ends early."),
    _T("verified", "confirm", "gone", ("report",), "The peer is notified."),
    _T("verified", "end", "gone", ("report",), "A peer that is only notified cannot be reached."),
    _T("quarantined", "quiet", "gone", ("report-quiet",), "Nothing of it can reach the local pages any more."),
)

_STEPS: Final[Mapping[tuple[State, Event], Transition]] = MappingProxyType(
    {(row.state, row.event): row for row in TABLE}
)


@final
@dataclass(slots=True, eq=False)
class Wiring:
    """Parts of the agent that every transfer uses.

    `on_end` receives a transfer and its result in the step that reports it, `ask` a transfer whose peer's word is to be read, and
    `forget` one that no longer waits for that.
    """

    port: NixlPort
    handles: Handles
    clock: Callable[[], float]
    on_end: Callable[[Transfer, TransferResult], None]
    ask: Callable[[Transfer], None]
    forget: Callable[[Transfer], None]
    counts: dict[str, int]
    """Counts since the start, by name."""
    quiet: list[str]
    """Ids of transfers that have left quarantine and that the owner has not taken yet, oldest first."""
    wire_bytes: int = 0
    """Payload bytes of posted parts of transfers in progress."""


@final
class Transfer:
    """Life of one order: posting, polling, verification, end.

    Args:
        order: The accepted order.
        peer: Its peer.
        parts: Its parts, in the order of posting; empty if the order names no descriptors.
        wiring: See `Wiring`.
    """

    def __init__(self, order: TransferOrder, peer: Peer, parts: deque[Part], wiring: Wiring) -> None:
        self._wiring = wiring
        self.order = order
        self.peer = peer
        self.pending = parts
        self.active: list[Part] = []
        """Parts that are posted and not known to have ended."""
        self.state: State = "new"
        self.moved_s = 0.0
        """Time of the last sign of progress."""
        # A notification travels with the data, or is sent after the verification.
        self._is_attached = bool(len(parts) == 1 and order.notification and order.fence is None)
        # Figures for the result; no decision depends on them.
        self._row_count = sum([len(part.peer_indices) for part in parts])
        self._payload_bytes = sum([part.payload_bytes for part in parts])
        self._post_s = 0.0
        self._moved_bytes: dict[tuple[str, MemoryKind, MemoryKind], int] = {}
        self._entered_s: dict[State, float] = {}
        self._go("accept")
        self.deadline_s = self._entered_s["queued"] + order.deadline_s

    def _go(self, event: Event) -> Transition:
        """Take the step that the table lists for an event; a missing row is a defect of this package."""
        row = _STEPS.get((self.state, event))
        if row is None:
            raise AssertionError(f"transfer table: no event {event!r} in state {self.state!r}")
        if row.target != self.state:
            self.state = row.target
            self.moved_s = self._entered_s[row.target] = self._wiring.clock()
        return row

    # --------------------------------------------------------------------------------------------------------- posting

    def post(self, part: Part) -> None:
        """Post the next part of `pending`."""
        wiring, order = self._wiring, self.order
        started_s = self.moved_s = wiring.clock()
        self._go("post")
        self.active.append(part)
        wiring.wire_bytes += part.payload_bytes
        self.peer.parts_on_wire += 1
        progress: Progress | None = None
        failure: AgentError | None = None
        try:
            part.handle = wiring.port.make(
                self.peer.local_lists[part.local_kind],
                part.local_indices,
                self.peer.peer_lists[part.peer_kind],
                part.peer_indices,
                order.notification if self._is_attached else b"",
            )
            self.peer.outstanding += 1
            progress = wiring.port.post(part.handle)
        except AgentError as error:
            failure = error
        self._post_s += wiring.clock() - started_s
        if failure is not None:
            self._fail_part(part, failure, is_off_wire=part.handle is None or was_rejected(failure))
        elif progress == "done":
            self._complete_part(part)
            self.verify()

    # --------------------------------------------------------------------------------------------------------- polling

    def poll(self) -> bool:
        """Poll all parts on the wire; return True if anything progressed."""
        moved = False
        for part in list(self.active):
            try:
                if self._wiring.port.check(part.handle) != "done":
                    continue
            except AgentError as error:
                self._fail_part(part, error, is_off_wire=has_left_the_wire(error))
                return True
            moved = True
            self._complete_part(part)
        return self.verify() or moved

    def _complete_part(self, part: Part) -> None:
        self.moved_s = self._wiring.clock()
        path = (self._wiring.port.backend(part.handle), part.local_kind, part.peer_kind)
        self._moved_bytes[path] = self._moved_bytes.get(path, 0) + part.payload_bytes
        self._release_part(part)

    def _release_part(self, part: Part) -> None:
        self.active.remove(part)
        self._wiring.wire_bytes -= part.payload_bytes
        self.peer.parts_on_wire -= 1
        if part.handle is not None:
            self._wiring.handles.release(self.peer, part.handle)

    def _fail_part(self, part: Part, error: AgentError, *, is_off_wire: bool) -> None:
        """End the transfer because of one part's error; the part stays active unless it is certainly off the wire."""
        self.peer.note_failure(error)
        part.last_error = str(error)
        if is_off_wire:
            self._release_part(part)
        self.end("failed", transfer_code(error), f"{error.message} (peer {self.peer.key!r})")

    # ---------------------------------------------------------------------------------------------------- verification

    def verify(self) -> bool:
        """Ask for the peer's word once all data has arrived; return True if anything progressed."""
        if self.active or self.pending or self.state not in ("queued", "posted"):
            return False
        self._go("last-part-done" if self.state == "posted" else "skip-data")
        order = self.order
        if self._row_count and self._entered_s["data-done"] > self.deadline_s:
            self.end_late()
        elif order.fence is None and order.operation != "probe":
            self._go("trust")
            self._confirm()
        else:
            self._wiring.ask(self)
        return True

    def note_posted(self) -> None:
        """Record that the peer's word is being read."""
        self._go("post-fence")

    def judge(self, found: int) -> None:
        """End the transfer by what its word shows; a probe takes any."""
        self._wiring.counts["fence_checks"] += 1
        fence = self.order.fence
        if fence is None or found == fence[1]:
            self._go("match")
            self._confirm()
            return
        self.end(
            "fence-rejected",
            "fence-mismatch",
            f"fence slot {fence[0]} of peer {self.peer.key!r} shows generation {found}, the lease had {fence[1]}: "
            "the producer gave the blocks away before they were read",
        )

    def fail_check(self, error: AgentError) -> None:
        """End the transfer, whose data has arrived, because its word cannot be read."""
        self._wiring.counts["fence_checks"] += 1
        text = f"the fence of peer {self.peer.key!r} could not be read: {error.message}"
        self.end("failed", transfer_code(error), text)

    def _confirm(self) -> None:
        """Notify the peer, and report success."""
        order, is_notified = self.order, self._is_attached
        if order.notification and not is_notified:
            with suppress(AgentError):
                self._wiring.port.send_notification(self.peer.agent_name, order.notification)
                is_notified = True
            if not is_notified and not self._row_count:
                self.end("failed", "notification-failed", f"peer {self.peer.key!r} could not be notified")
                return
        self._report("confirm", "done", is_notified=is_notified)

    # --------------------------------------------------------------------------------------------------------- the end

    def end_late(self) -> None:
        """End the transfer because its deadline has passed."""
        if self.state == "queued":
            where = "in the queue"
        elif self.state == "posted":
            where = f"with {len(self.active)} parts in flight and {len(self.pending)} to post"
        else:
            where = "while its fence was read"
        self.end(
            "timed-out",
            "deadline-exceeded",
            f"not seen to end within {self.order.deadline_s:.3f} s ({where}); peer {self.peer.key!r} may be stopped or busy",
        )

    def end(self, outcome: Outcome, code: str, message: str) -> None:
        """Report the result of a transfer that ends early, then let go of it or hold it in quarantine."""
        if self.state in ("gone", "quarantined"):
            return
        self._wiring.forget(self)
        self.pending.clear()
        self._wiring.wire_bytes -= sum(part.payload_bytes for part in self.active)
        self.peer.parts_on_wire -= len(self.active)
        self._report("abandon" if self.active else "end", outcome, code, message)

    def _report(
        self, event: Event, outcome: Outcome, code: str = "", message: str = "", *, is_notified: bool = False
    ) -> None:
        """Take the step that reports the result, and carry out the effects that the table lists."""
        effects = self._go(event).effects
        entered_s = self._entered_s
        now_s = entered_s[self.state]
        first_s, data_s = entered_s.get("posted"), entered_s.get("data-done")
        has_data = data_s is not None
        was_verified = "fence-posted" in entered_s and "verified" in entered_s
        result = TransferResult(
            transfer_id=self.order.transfer_id,
            peer=self.peer.key,
            outcome=outcome,
            code=code,
            message=message,
            is_memory_quiet=not self.active,
            bytes_moved=self._payload_bytes if has_data else 0,
            descriptor_count=self._row_count,
            queue_s=(now_s if first_s is None else first_s) - entered_s["queued"],
            post_s=self._post_s,
            wire_s=0.0 if first_s is None else (now_s if data_s is None else data_s) - first_s,
            fence_s=entered_s["verified"] - entered_s["data-done"] if was_verified else 0.0,
            is_notified=is_notified,
            bytes_by_path=tuple([(*path, size) for path, size in self._moved_bytes.items()]) if has_data else (),
        )
        self._wiring.on_end(self, result)
        if "hold" in effects:
            hold = Hold(self.order.transfer_id, self.peer, self.active, now_s, self._become_quiet)
            self._wiring.handles.hold(hold)

    def _become_quiet(self) -> None:
        """Record that nothing of the transfer can write to the local pages any more."""
        self._go("quiet")
        self._wiring.quiet.append(self.order.transfer_id)
