"""Posting, polling and verifying: the life of a transfer.

Theory of operation. An order becomes a transfer with one or more *parts*, each of which is one NIXL handle. `advance`
is called again and again by the owner and does, in this order: post parts whose turn it is, ask for posted parts, end
transfers past their deadline, and look after quarantine and strays.

    queued -> posted -> data done -> [fence read -> fence verified] -> [pages checked] -> [notified] -> result

With a fence, or a page check, the notification is *not* attached to the data: it would make the producer release the
blocks, and so bump the fence, before the consumer has looked. It is sent by itself after the verification. Without
either it travels with the data, as vLLM's own connector does it, and costs nothing.

A transfer that ends while parts of it are active gives its result at once, with `is_memory_quiet=False`, and moves to
quarantine. An id is in use until then.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, final

from ._admission import admit, differing_pages
from ._custody import Custody
from ._errors import AgentError
from ._failures import code_of, is_off_the_wire, late_message
from ._fence_reader import FenceReader
from ._quarantine import Quarantine
from ._stalls import StallWatch
from ._statistics import Tracer
from ._transfer import FairQueue, Part, Transfer, split_into_parts
from ._values import Outcome, TransferOrder, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._memory import MemoryTable
    from ._options import AgentOptions
    from ._peers import Peer, PeerTable
    from ._port import Handle, NixlPort, Progress
    from ._statistics import Statistics

__all__ = ["TransferEngine"]

_QUARANTINE_POLL_S: Final = 1e-3


@final
class TransferEngine:
    """All transfers of one agent."""

    def __init__(
        self,
        port: NixlPort,
        memory: MemoryTable,
        peers: PeerTable,
        options: AgentOptions,
        statistics: Statistics,
        clock: Callable[[], float],
    ) -> None:
        self._port = port
        self._peers = peers
        self._options = options
        self._statistics = statistics
        self._clock = clock
        self._trace = Tracer(options.trace, statistics, clock)
        self.stalls = StallWatch(options.stall_after_s, statistics, self._trace, clock)
        self.custody = Custody(port, peers, statistics)
        self._fences = FenceReader(port, memory.fences, clock, self.custody)
        self._queue = FairQueue()
        self._live: dict[str, Transfer] = {}
        self._posted: dict[str, Transfer] = {}
        self._deadlines: list[tuple[float, int, Transfer]] = []
        self._sequence = itertools.count()
        self._next_quarantine_s = 0.0
        self.quarantine = Quarantine(port, is_quiet_on_release=options.is_quiet_on_release)
        self.inflight_bytes = 0
        self.results: deque[TransferResult] = deque()
        self.quiet: deque[str] = deque()

    # ---------------------------------------------------------------------------------------------------- orders in

    def post(self, order: TransferOrder) -> None:
        """Accept an order; its end appears in `results`.

        Raises:
            AgentError: a refusal, by which nothing is changed.
        """
        peer = self._peers.get(order.peer)
        transfer_id = order.transfer_id
        if transfer_id in self._live or transfer_id in self.quarantine:
            raise AgentError("duplicate-transfer", f"transfer id {transfer_id!r} is in progress or in quarantine")
        admit(order, peer, self._options, waiting=self._queue.count, held=self.quarantine.count_of(peer))
        parts = split_into_parts(peer, order.local_indices, order.peer_indices, self._options)
        transfer = Transfer(order, peer, parts, now_s=self._clock())
        self._live[order.transfer_id] = transfer
        self._trace(transfer.order, "queued")
        if not parts:
            self._finish(transfer)
            return
        heapq.heappush(self._deadlines, (transfer.deadline_s, next(self._sequence), transfer))
        self._queue.push(transfer)

    def refuse(self, order: TransferOrder, error: AgentError) -> None:
        """Report an order that was not accepted as a failed transfer."""
        result = TransferResult(order.transfer_id, order.peer, "failed", error.code, str(error))
        self._statistics.ended(result)
        self.results.append(result)

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer early; False if no such transfer is in progress."""
        transfer = self._live.get(transfer_id)
        if transfer is None:
            return False
        self._end(transfer, "cancelled", "cancelled", "cancelled by the caller")
        return True

    def peer_removed(self, peer: Peer) -> None:
        """End all transfers of a peer that was removed."""
        for transfer in [one for one in self._live.values() if one.peer is peer]:
            self._end(transfer, "failed", "peer-removed", f"peer {peer.key!r} was removed or replaced")

    # ---------------------------------------------------------------------------------------------------- the turn

    def advance(self) -> bool:
        """Do one turn; True if anything moved."""
        moved = self._launch()
        if self._posted:
            moved = self._poll_posted() or moved
            self.stalls.look(self._posted)
        if self._deadlines:
            self._end_late()
        return self.look_after() or moved

    @property
    def is_busy(self) -> bool:
        """Whether something on the wire needs polling."""
        return bool(self._posted or self.custody.stray_count or self._queue.count)

    def gauges(self) -> dict[str, float]:
        """Return what is queued, in flight and in quarantine."""
        entries = self.quarantine.entries()
        return {
            "queued": float(self._queue.count),
            "queued_bytes": float(self._queue.waiting_bytes()),
            "inflight": float(len(self._posted)),
            "inflight_bytes": float(self.inflight_bytes),
            "strays": float(self.custody.stray_count),
            "quarantined": float(len(entries)),
            "quarantined_bytes": float(sum(entry.bytes_at_risk for entry in entries)),
        }

    def _launch(self) -> bool:
        rows = 0
        budget = self._options.chunk_rows or 1 << 31
        while rows < budget:
            transfer = self._queue.head()
            if transfer is None:
                break
            part = transfer.pending[0]
            cap = self._options.max_inflight_bytes
            if cap is not None and self.inflight_bytes and self.inflight_bytes + part.payload_bytes > cap:
                break
            transfer.pending.popleft()
            self._queue.advance()
            rows += len(part.peer_indices)
            self._post_part(transfer, part)
        return rows > 0

    def _post_part(self, transfer: Transfer, part: Part) -> None:
        started_s = self._clock()
        if not transfer.first_post_s:
            transfer.first_post_s = started_s
            self._posted[transfer.order.transfer_id] = transfer
            self._trace(transfer.order, "posted")
        progress: Progress | None = None
        failure: AgentError | None = None
        try:
            part.handle = self._make(transfer, part)
            self.custody.posted(transfer.peer)
            self.inflight_bytes += part.payload_bytes
            transfer.active.append(part)
            if transfer.order.fence is not None and not transfer.pending:
                self._fences.make_ready(transfer)
            progress = self._port.post(part.handle)
        except AgentError as error:
            failure = error
        transfer.post_s += self._clock() - started_s
        if failure is not None:
            self._part_failed(transfer, part, failure)
        elif progress == "done":
            self._part_done(transfer, part)
            self._maybe_data_done(transfer)

    def _make(self, transfer: Transfer, part: Part) -> Handle:
        peer = transfer.peer
        self._peers.prepare(peer)
        return self._port.make(
            transfer.order.operation,
            peer.local_lists[part.local_kind],
            part.local_indices,
            peer.peer_lists[part.peer_kind],
            part.peer_indices,
            transfer.order.notification if transfer.is_attached else b"",
        )

    def _part_failed(self, transfer: Transfer, part: Part, error: AgentError) -> None:
        """End the transfer for an error of one part, which stays active unless it certainly is off the wire."""
        if error.code == "nixl-disconnected":
            transfer.peer.is_connected = False
        part.last_error = f"{error.code}: {error}"
        if part in transfer.active and is_off_the_wire(error):
            transfer.active.remove(part)
            self._part_over(transfer, part)
        self._end(transfer, "failed", code_of(error), f"{error} (peer {transfer.peer.key!r})")

    def _part_done(self, transfer: Transfer, part: Part) -> None:
        transfer.account(part, self._port.telemetry(part.handle))
        transfer.active.remove(part)
        self._part_over(transfer, part)

    def _part_over(self, transfer: Transfer, part: Part) -> None:
        """Give back what a part held."""
        self.inflight_bytes -= part.payload_bytes
        self.custody.over(transfer.peer, part.handle)

    def _poll_posted(self) -> bool:
        moved = False
        for transfer in list(self._posted.values()):
            if transfer.data_done_s:
                moved = self._verify(transfer) or moved
                continue
            for part in list(transfer.active):
                try:
                    if self._port.check(part.handle) != "done":
                        continue
                except AgentError as error:
                    self._part_failed(transfer, part, error)
                    moved = True
                    break
                moved = True
                self._part_done(transfer, part)
            self._maybe_data_done(transfer)
        return moved

    # ------------------------------------------------------------------------------------------------ verification

    def _maybe_data_done(self, transfer: Transfer) -> None:
        if transfer.active or transfer.pending or transfer.has_ended or transfer.data_done_s:
            return
        transfer.data_done_s = self._clock()
        self._trace(transfer.order, "data-done")
        transfer.peer.is_wired = True
        if transfer.data_done_s > transfer.deadline_s:
            self._end_at_deadline(transfer)
        elif transfer.order.fence is None:
            self._finish(transfer)
        else:
            self._verify(transfer)

    def _verify(self, transfer: Transfer) -> bool:
        verdict = self._fences.advance(transfer)
        if verdict is None:
            return False
        self._statistics.count("fence_checks")
        self._trace(transfer.order, "fence-read", verdict.detail)
        if verdict.outcome == "done":
            self._finish(transfer)
        else:
            self._end(transfer, verdict.outcome, verdict.code, verdict.message)
        return True

    def _finish(self, transfer: Transfer) -> None:
        """Check pages, notify, and report success."""
        now_s = self._clock()
        fence_s = transfer.fence_done_s - transfer.data_done_s if transfer.fence_done_s else 0.0
        check_s = 0.0
        if transfer.order.page_check is not None and transfer.descriptor_count:
            differing = differing_pages(transfer.order.page_check)
            check_s = self._clock() - now_s
            self._statistics.count("page_checks")
            if differing:
                self._end(transfer, "failed", "checksum-mismatch", differing, fence_s=fence_s, check_s=check_s)
                return
        is_notified = transfer.is_attached
        if transfer.order.notification and not transfer.is_attached:
            is_notified = self._notify(transfer)
            if not is_notified and not transfer.descriptor_count:
                self._end(
                    transfer, "failed", "notification-failed", f"peer {transfer.peer.key!r} could not be notified"
                )
                return
        elif is_notified:
            self._statistics.count("notifications_sent")
        self._end(transfer, "done", fence_s=fence_s, check_s=check_s, is_notified=is_notified)

    def _notify(self, transfer: Transfer) -> bool:
        try:
            self._port.send_notification(transfer.peer.agent_name, transfer.order.notification)
        except AgentError:
            self._statistics.count("notifications_failed")
            return False
        self._statistics.count("notifications_sent")
        return True

    # ------------------------------------------------------------------------------------------------------- the end

    def _end_at_deadline(self, transfer: Transfer) -> None:
        self._end(transfer, "timed-out", "deadline-exceeded", late_message(transfer))

    def _end(
        self,
        transfer: Transfer,
        outcome: Outcome,
        code: str = "",
        message: str = "",
        *,
        fence_s: float = 0.0,
        check_s: float = 0.0,
        is_notified: bool = False,
    ) -> None:
        """Report the one and only result of a transfer and let go of it, or hold it in quarantine."""
        if transfer.has_ended:
            return
        now_s = self._clock()
        transfer.has_ended = True
        transfer.pending.clear()
        transfer_id = transfer.order.transfer_id
        del self._live[transfer_id]
        self._posted.pop(transfer_id, None)
        self._fences.abandon(transfer)
        result = transfer.result(
            outcome, code, message, now_s=now_s, fence_s=fence_s, check_s=check_s, is_notified=is_notified
        )
        self._statistics.ended(result)
        self.results.append(result)
        self._trace(transfer.order, "ended", code or outcome)
        if transfer.active:
            self._statistics.count("quarantined_total")
            for part in transfer.active:
                self.inflight_bytes -= part.payload_bytes
            self.quarantine.hold(transfer, now_s=now_s)

    def _end_late(self) -> None:
        now_s = self._clock()
        while self._deadlines and (self._deadlines[0][0] < now_s or self._deadlines[0][2].has_ended):
            transfer = heapq.heappop(self._deadlines)[2]
            if not transfer.has_ended:
                self._end_at_deadline(transfer)

    # --------------------------------------------------------------------------------------- quarantine and strays

    def look_after(self, *, at_once: bool = False) -> bool:
        """Poll strays and, `at_once` or when it is time, quarantine; True if one of them ended."""
        moved = self.custody.poll() if self.custody.stray_count else False
        if not (len(self.quarantine) or self.custody.unreleased_count):
            return moved
        now_s = self._clock()
        if now_s < self._next_quarantine_s and not at_once:
            return moved
        self._next_quarantine_s = now_s + _QUARANTINE_POLL_S
        for transfer in self.quarantine.poll(self._quarantined_part_over):
            self._report_quiet(transfer)
            moved = True
        self.custody.retry_releases()
        return moved

    def _quarantined_part_over(self, transfer: Transfer, part: Part) -> None:
        self.custody.over(transfer.peer, part.handle)

    def declare_quiet(self, transfer_id: str) -> bool:
        """Let a transfer leave quarantine on the caller's word; False if it is not held."""
        transfer = self.quarantine.declare_quiet(transfer_id, self._quarantined_part_over)
        if transfer is not None:
            self._report_quiet(transfer)
        return transfer is not None

    def _report_quiet(self, transfer: Transfer) -> None:
        self._statistics.count("quiet_total")
        self.quiet.append(transfer.order.transfer_id)
        self._trace(transfer.order, "quiet")

    # ---------------------------------------------------------------------------------------------------------- close

    def end_all(self, code: str, message: str) -> None:
        """End every transfer in progress."""
        for transfer in list(self._live.values()):
            self._end(transfer, "cancelled" if code == "cancelled" else "failed", code, message)

    def close(self) -> None:
        """Release every handle; whatever is still in quarantine is reported quiet after the port is closed."""
        for transfer in self.quarantine.abandon(self._quarantined_part_over):
            self._report_quiet(transfer)
        self.custody.close()
        self._deadlines.clear()
        try:
            self._port.release_prepared(self._fences.scratch)
        except AgentError:
            self._statistics.count("release_failures")
