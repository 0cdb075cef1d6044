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
    from kv_nixl_agent.nixl.port import Handle, MemoryKind, NixlPort, Progress, WireTelemetry
    from kv_nixl_agent.statistics import Statistics, Tracer
    from kv_nixl_agent.transfers.handles import Handles
    from kv_nixl_agent.transfers.parts import Part, WireLoad
    from kv_nixl_agent.transfers.reader import WordRead, WordReader
    from kv_nixl_agent.transfers.states import Event, State, Transition
    from kv_nixl_agent.values import Outcome, TransferOrder

__all__ = ["Account", "Transfer", "Wiring"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """Parts of the agent that every transfer uses.

    `on_end` receives a transfer and its result, in the step that reports it; `on_quiet` a transfer that leaves quarantine.
    """

    port: NixlPort
    handles: Handles
    words: WordReader
    load: WireLoad
    statistics: Statistics
    trace: Tracer
    clock: Callable[[], float]
    on_end: Callable[[Transfer, TransferResult], None]
    on_quiet: Callable[[Transfer], None]


@final
class Transfer:
    """Life of one order: posting, polling, verification, end.

    Args:
        order: The accepted order.
        peer: Its peer.
        parts: Its parts, in the order of posting; empty if the order names no descriptors.
        wiring: See `Wiring`.
    """

    __slots__ = (
        "_account",
        "_clock",
        "_is_attached",
        "_read",
        "_wiring",
        "active",
        "deadline_s",
        "order",
        "peer",
        "pending",
        "state",
    )

    def __init__(self, order: TransferOrder, peer: Peer, parts: deque[Part], wiring: Wiring) -> None:
        self._wiring = wiring
        self._clock = wiring.clock
        self.order = order
        self.peer = peer
        self.pending = parts
        self.active: list[Part] = []
        """Parts that are posted and not known to have ended."""
        self.state: State = "new"
        self._account = Account(
            sum([len(part.peer_indices) for part in parts]), sum([part.payload_bytes for part in parts])
        )
        self._is_attached = bool(len(parts) == 1 and order.notification and order.fence is None)
        """Whether the notification travels with the data; otherwise it is sent after the verification."""
        self._read: WordRead | None = None
        """Read of the peer's fence word, or of any word for a probe."""
        self._go("accept")
        self.deadline_s = self._account.entered_s["queued"] + order.deadline_s
        wiring.trace(order, "queued")

    @property
    def has_ended(self) -> bool:
        """Whether the result has been reported."""
        return self.state in ("gone", "quarantined")

    def _go(self, event: Event) -> Transition:
        """Take the step that the table lists for an event."""
        row = step(self.state, event)
        target = row.target
        if target != self.state:
            self.state = target
            self._account.entered_s[target] = self._clock()
        return row

    # --------------------------------------------------------------------------------------------------------- posting

    def post(self, part: Part) -> None:
        """Post the next part of `pending`."""
        wiring = self._wiring
        started_s = self._clock()
        is_first = self.state == "queued"
        self._go("post")
        if is_first:
            wiring.trace(self.order, "posted")
        self.active.append(part)
        wiring.load.add(self.peer, part)
        progress: Progress | None = None
        failure: AgentError | None = None
        try:
            part.handle = self._make(part)
            wiring.handles.made(self.peer)
            if self.order.fence is not None and not self.pending:
                with suppress(AgentError):  # it counts only if the read is still needed and fails again
                    self._make_read(is_early=True)
            progress = wiring.port.post(part.handle)
        except AgentError as error:
            failure = error
        self._account.post_s += self._clock() - started_s
        if failure is not None:
            self._fail_part(part, failure, is_off_wire=part.handle is None or was_rejected(failure))
        elif progress == "done":
            self._complete_part(part)
            self._finish_data_if_complete()

    def _make(self, part: Part) -> Handle:
        wiring = self._wiring
        lists = self.peer.lists
        return wiring.port.make(
            lists.local[part.local_kind],
            part.local_indices,
            lists.peer[part.peer_kind],
            part.peer_indices,
            self.order.notification if self._is_attached else b"",
        )

    def skip_data(self) -> None:
        """Skip to the verification, because the order names no descriptors."""
        self._go("skip-data")
        self._wiring.trace(self.order, "data-done")
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
        self._account.complete(part, self._wiring.port.telemetry(part.handle))
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
        self._wiring.trace(self.order, "data-done")
        self.peer.is_wired = True
        if self._account.entered_s["data-done"] > self.deadline_s:
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

    def _verdict(self, found: int) -> str:
        """Return why the word that was found voids the data; empty if it does not."""
        if self.order.fence is None or found == self.order.fence[1]:
            return ""
        slot, generation = self.order.fence
        return (
            f"fence slot {slot} of peer {self.peer.key!r} shows generation {found}, the lease had {generation}: "
            "the producer gave the blocks away before they were read"
        )

    def _judge(self) -> None:
        if self._read is None:
            raise AssertionError("a word that was not read is judged")
        found = int(self._read.words[0])
        objection = self._verdict(found)
        if not objection:
            self._go("match")  # first, because this step records when the word was known
        self._let_go_of_read()
        self._wiring.statistics.count("fence_checks")
        self._wiring.trace(self.order, "fence-read", str(found))
        if objection:
            self.end("fence-rejected", "fence-mismatch", objection)
        else:
            self._confirm()

    def _end_unread(self, error: AgentError) -> None:
        """End the transfer because the word cannot be read: the data has arrived, but nothing vouches for it."""
        self._wiring.statistics.count("fence_checks")
        self._wiring.trace(self.order, "fence-read", error.code)
        self.end("failed", transfer_code(error), f"the fence of peer {self.peer.key!r} could not be read: {error}")

    def _confirm(self) -> None:
        """Notify the peer, and report success."""
        wiring, order = self._wiring, self.order
        is_notified = self._is_attached
        if is_notified:
            wiring.statistics.count("notifications_sent")
        elif order.notification:
            is_notified = self._notify()
            if not is_notified and not self._account.descriptor_count:
                self.end("failed", "notification-failed", f"peer {self.peer.key!r} could not be notified")
                return
        self._report("confirm", ("done", "", ""), is_notified=is_notified)

    def _notify(self) -> bool:
        try:
            self._wiring.port.send_notification(self.peer.agent_name, self.order.notification)
        except AgentError:
            self._wiring.statistics.count("notifications_failed")
            return False
        self._wiring.statistics.count("notifications_sent")
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
        wiring = self._wiring
        self._let_go_of_read()
        self.pending.clear()
        for part in self.active:
            wiring.load.remove(self.peer, part)
        self._report("abandon" if self.active else "end", (outcome, code, message))

    def _report(self, event: Event, ending: tuple[Outcome, str, str], *, is_notified: bool = False) -> None:
        """Take the step that reports the result, and carry out the effects that the table lists."""
        effects = self._go(event).effects
        now_s = self._account.entered_s[self.state]
        result = self._account.result(
            self.order, self.peer, ending, now_s=now_s, is_memory_quiet=not self.active, is_notified=is_notified
        )
        self._wiring.on_end(self, result)
        self._wiring.trace(self.order, "ended", result.code or result.outcome)
        if "hold" in effects:
            self._wiring.handles.hold(self.order.transfer_id, self.peer, self.active, now_s, self._become_quiet)

    def _become_quiet(self) -> None:
        """Record that nothing of the transfer can write to the local pages any more."""
        self._go("quiet")
        self._wiring.trace(self.order, "quiet")
        self._wiring.on_quiet(self)


@final
class Account:
    """Collects the figures that a result reports. No decision depends on it."""

    __slots__ = ("_carried", "descriptor_count", "entered_s", "merged_count", "payload_bytes", "post_s")

    def __init__(self, descriptor_count: int, payload_bytes: int) -> None:
        self.descriptor_count = descriptor_count
        self.payload_bytes = payload_bytes
        self.post_s = 0.0
        """Time inside NIXL's make and post calls."""
        self.merged_count = 0
        self.entered_s: dict[State, float] = {}
        """Time at which each state was entered."""
        self._carried: dict[tuple[str, MemoryKind, MemoryKind], int] = {}

    def complete(self, part: Part, telemetry: WireTelemetry | None) -> None:
        """Record a completed part and NIXL's telemetry of it."""
        backend = ""
        if telemetry is not None:
            self.merged_count += telemetry.descriptor_count
            backend = telemetry.backend
        path = (backend, part.local_kind, part.peer_kind)
        self._carried[path] = self._carried.get(path, 0) + part.payload_bytes

    def result(
        self,
        order: TransferOrder,
        peer: Peer,
        ending: tuple[Outcome, str, str],
        *,
        now_s: float,
        is_memory_quiet: bool,
        is_notified: bool,
    ) -> TransferResult:
        """Return the result of the transfer as of now; `ending` is (outcome, code, message)."""
        entered_s = self.entered_s
        first_s, data_s = entered_s.get("posted"), entered_s.get("data-done")
        was_moved = data_s is not None
        outcome, code, message = ending
        return TransferResult(
            transfer_id=order.transfer_id,
            peer=peer.key,
            outcome=outcome,
            code=code,
            message=message,
            is_memory_quiet=is_memory_quiet,
            bytes_moved=self.payload_bytes if was_moved else 0,
            descriptor_count=self.descriptor_count,
            merged_count=self.merged_count,
            queue_s=(now_s if first_s is None else first_s) - entered_s["queued"],
            post_s=self.post_s,
            wire_s=0.0 if first_s is None else (now_s if data_s is None else data_s) - first_s,
            fence_s=self._fence_s(),
            is_notified=is_notified,
            bytes_by_path=tuple([(*path, size) for path, size in self._carried.items()]) if was_moved else (),
        )

    def _fence_s(self) -> float:
        entered_s = self.entered_s
        if "fence-posted" not in entered_s or "verified" not in entered_s:
            return 0.0
        return entered_s["verified"] - entered_s["data-done"]
