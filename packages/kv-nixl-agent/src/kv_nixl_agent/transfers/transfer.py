"""`Transfer`: one accepted order, from its first part to its single result.

`TABLE` in `states.py` lists the legal steps; each method here takes one of them. With a fence, the notification is
*not* attached to the data: it would make the producer release the blocks, and so void the fence, before the consumer has
checked it. It is sent separately after the verification. Without a fence, it travels with the data as in vLLM's
own connector, at no cost.

A transfer that ends while parts of it are active reports its result at once, with `is_memory_quiet=False`, and moves to
quarantine. Its id stays in use until the quarantine ends.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from kv_nixl_agent.errors import AgentError, transfer_code
from kv_nixl_agent.transfers.handles import has_left_the_wire, was_rejected
from kv_nixl_agent.transfers.states import step
from kv_nixl_agent.values import TransferResult

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort, Progress
    from kv_nixl_agent.transfers.handles import Handles
    from kv_nixl_agent.transfers.parts import Part, WireLoad
    from kv_nixl_agent.transfers.reader import WordRead, WordReader
    from kv_nixl_agent.transfers.states import Event, State, Transition
    from kv_nixl_agent.values import Outcome, Statistics, TransferOrder

__all__ = ["Transfer", "Wiring"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """Parts of the agent that every transfer uses; `on_end` receives a transfer and its result in the step that reports it."""

    port: NixlPort
    handles: Handles
    words: WordReader
    load: WireLoad
    statistics: Statistics
    clock: Callable[[], float]
    on_end: Callable[[Transfer, TransferResult], None]
    quiet: list[str]


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
        self._read: WordRead | None = None
        """Read of the peer's fence word, or of any word for a probe."""
        # Figures for the result; no decision depends on them.
        self._row_count = sum([len(part.peer_indices) for part in parts])
        self._payload_bytes = sum([part.payload_bytes for part in parts])
        self._merged_count = 0
        self._post_s = 0.0
        self._moved_bytes: dict[tuple[str, MemoryKind, MemoryKind], int] = {}
        self._entered_s: dict[State, float] = {}
        self._go("accept")
        self.deadline_s = self._entered_s["queued"] + order.deadline_s

    @property
    def has_ended(self) -> bool:
        """Whether the result has been reported."""
        return self.state in ("gone", "quarantined")

    @property
    def bytes_left(self) -> int:
        """Payload bytes of the parts that have not ended."""
        return sum([part.payload_bytes for part in (*self.active, *self.pending)])

    def _go(self, event: Event) -> Transition:
        """Take the step that the table lists for an event."""
        row = step(self.state, event)
        target = row.target
        if target != self.state:
            self.state = target
            self.moved_s = self._entered_s[target] = self._wiring.clock()
        return row

    # --------------------------------------------------------------------------------------------------------- posting

    def post(self, part: Part) -> None:
        """Post the next part of `pending`."""
        wiring = self._wiring
        started_s = self.moved_s = wiring.clock()
        self._go("post")
        self.active.append(part)
        wiring.load.add(self.peer, part)
        progress: Progress | None = None
        failure: AgentError | None = None
        try:
            part.handle = self._make(part)
            self.peer.outstanding += 1
            if self.order.fence is not None and not self.pending:
                with suppress(AgentError):  # it counts only if the read is still needed and fails again
                    self._make_read(is_early=True)
            progress = wiring.port.post(part.handle)
        except AgentError as error:
            failure = error
        self._post_s += wiring.clock() - started_s
        if failure is not None:
            self._fail_part(part, failure, is_off_wire=part.handle is None or was_rejected(failure))
        elif progress == "done":
            self._complete_part(part)
            self._finish_data_if_complete()

    def _make(self, part: Part) -> Handle:
        return self._wiring.port.make(
            self.peer.local_lists[part.local_kind],
            part.local_indices,
            self.peer.peer_lists[part.peer_kind],
            part.peer_indices,
            self.order.notification if self._is_attached else b"",
        )

    def skip_data(self) -> None:
        """Skip to the verification, because the order names no descriptors."""
        self._go("skip-data")
        self._verify()

    # --------------------------------------------------------------------------------------------------------- polling

    def poll(self) -> bool:
        """Poll all parts on the wire; return True if anything progressed."""
        if self.state != "posted":
            return self._verify()
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
        self._finish_data_if_complete()
        return moved

    def _complete_part(self, part: Part) -> None:
        self.moved_s = self._wiring.clock()
        telemetry, backend = self._wiring.port.telemetry(part.handle), ""
        if telemetry is not None:
            self._merged_count += telemetry.descriptor_count
            backend = telemetry.backend
        path = (backend, part.local_kind, part.peer_kind)
        self._moved_bytes[path] = self._moved_bytes.get(path, 0) + part.payload_bytes
        self._release_part(part)

    def _release_part(self, part: Part) -> None:
        self.active.remove(part)
        self._wiring.load.remove(self.peer, part)
        if part.handle is not None:
            self._wiring.handles.release(self.peer, part.handle)

    def _fail_part(self, part: Part, error: AgentError, *, is_off_wire: bool) -> None:
        """End the transfer because of one part's error; the part stays active unless it is certainly off the wire."""
        self._note_disconnection(error)
        part.last_error = f"{error.code}: {error}"
        if is_off_wire:
            self._release_part(part)
        self.end("failed", transfer_code(error), f"{error} (peer {self.peer.key!r})")

    def _note_disconnection(self, error: AgentError) -> None:
        if error.code == "nixl-disconnected":
            self.peer.is_connected = False

    def _finish_data_if_complete(self) -> None:
        if self.active or self.pending or self.state != "posted":
            return
        self._go("last-part-done")
        if self._entered_s["data-done"] > self.deadline_s:
            self.end_late()
        else:
            self._verify()

    # ---------------------------------------------------------------------------------------------------- verification

    def _verify(self) -> bool:
        """Start or continue to read the peer's word; return True once that is finished."""
        if self.state == "data-done" and self.order.fence is None and self.order.operation != "probe":
            self._go("trust")
            self._confirm()
            return True
        try:
            is_done = self._poll_read() if self.state == "fence-posted" else self._post_read()
        except AgentError as error:
            self._note_disconnection(error)
            self._end_unread(error)
            return True
        if is_done:
            self._judge()
        return is_done

    def _make_read(self, *, is_early: bool = False) -> WordRead | None:
        if self._read is None:
            words = self._wiring.words
            if self.order.fence is None:
                self._read = words.make_probe(self.peer)
            else:
                self._read = words.make_fence_read(self.peer, *self.order.fence, is_early=is_early)
        return self._read

    def _post_read(self) -> bool:
        read = self._make_read()
        if read is None:
            return False  # all scratch words are in use; the next turn tries again
        self._go("post-fence")
        return self._wiring.words.post_and_spin(read)

    def _poll_read(self) -> bool:
        return self._read is not None and self._wiring.words.is_done(self._read)

    def _let_go_of_read(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            self._wiring.words.let_go(read)

    def _judge(self) -> None:
        if self._read is None:
            raise AssertionError("a word that was not read is judged")
        found, fence = int(self._read.words[0]), self.order.fence
        is_valid = fence is None or found == fence[1]
        if is_valid:
            self._go("match")  # first, because this step records when the word was known
        self._let_go_of_read()
        self._wiring.statistics.count("fence_checks")
        if fence is None or is_valid:
            self._confirm()
            return
        self.end(
            "fence-rejected",
            "fence-mismatch",
            f"fence slot {fence[0]} of peer {self.peer.key!r} shows generation {found}, the lease had {fence[1]}: "
            "the producer gave the blocks away before they were read",
        )

    def _end_unread(self, error: AgentError) -> None:
        """End the transfer because the word cannot be read: the data has arrived, but nothing vouches for it."""
        self._wiring.statistics.count("fence_checks")
        self.end("failed", transfer_code(error), f"the fence of peer {self.peer.key!r} could not be read: {error}")

    def _confirm(self) -> None:
        """Notify the peer, and report success."""
        order, is_notified = self.order, self._is_attached
        if order.notification and not is_notified:
            is_notified = self._notify()
            if not is_notified and not self._row_count:
                self.end("failed", "notification-failed", f"peer {self.peer.key!r} could not be notified")
                return
        self._report("confirm", ("done", "", ""), is_notified=is_notified)

    def _notify(self) -> bool:
        try:
            self._wiring.port.send_notification(self.peer.agent_name, self.order.notification)
        except AgentError:
            return False
        return True

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
        if self.has_ended:
            return
        self._let_go_of_read()
        self.pending.clear()
        for part in self.active:
            self._wiring.load.remove(self.peer, part)
        self._report("abandon" if self.active else "end", (outcome, code, message))

    def _report(self, event: Event, ending: tuple[Outcome, str, str], *, is_notified: bool = False) -> None:
        """Take the step that reports the result, and carry out the effects that the table lists."""
        effects = self._go(event).effects
        now_s = self._entered_s[self.state]
        self._wiring.on_end(self, self._result(ending, now_s, is_notified=is_notified))
        if "hold" in effects:
            self._wiring.handles.hold(self.order.transfer_id, self.peer, self.active, now_s, self._become_quiet)

    def _become_quiet(self) -> None:
        """Record that nothing of the transfer can write to the local pages any more."""
        self._go("quiet")
        self._wiring.quiet.append(self.order.transfer_id)

    def _result(self, ending: tuple[Outcome, str, str], now_s: float, *, is_notified: bool) -> TransferResult:
        entered_s = self._entered_s
        first_s, data_s = entered_s.get("posted"), entered_s.get("data-done")
        has_data = data_s is not None
        outcome, code, message = ending
        was_verified = "fence-posted" in entered_s and "verified" in entered_s
        return TransferResult(
            transfer_id=self.order.transfer_id,
            peer=self.peer.key,
            outcome=outcome,
            code=code,
            message=message,
            is_memory_quiet=not self.active,
            bytes_moved=self._payload_bytes if has_data else 0,
            descriptor_count=self._row_count,
            merged_count=self._merged_count,
            queue_s=(now_s if first_s is None else first_s) - entered_s["queued"],
            post_s=self._post_s,
            wire_s=0.0 if first_s is None else (now_s if data_s is None else data_s) - first_s,
            fence_s=entered_s["verified"] - entered_s["data-done"] if was_verified else 0.0,
            is_notified=is_notified,
            bytes_by_path=tuple([(*path, size) for path, size in self._moved_bytes.items()]) if has_data else (),
        )
