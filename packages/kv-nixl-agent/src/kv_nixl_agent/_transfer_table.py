"""All transfers of one agent that are in progress, and the results that its owner has not taken yet."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, final

from ._schedule import Deadlines, Schedule
from ._stalls import StallWatch
from ._values import TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._options import AgentOptions
    from ._peer import Peer
    from ._statistics import Statistics, Tracer
    from ._transfer import Transfer
    from ._values import Outcome

__all__ = ["TransferTable"]

_NO_LIMIT: Final = 1 << 31


@final
class TransferTable:
    """Transfers by id: waiting in `schedule`, posted, and under their deadlines."""

    def __init__(
        self, options: AgentOptions, statistics: Statistics, trace: Tracer, clock: Callable[[], float]
    ) -> None:
        self._statistics = statistics
        self._share = options.chunk_rows or _NO_LIMIT
        self.schedule: Schedule[Transfer] = Schedule(options.max_inflight_bytes)
        self.stalls = StallWatch(options.stall_after_s, statistics, trace, clock)
        self.results: deque[TransferResult] = deque()
        """Results that the owner has not taken yet, oldest first."""
        self.quiet: deque[str] = deque()
        """Ids of transfers that have left quarantine and that the owner has not taken yet, oldest first."""
        self._deadlines: Deadlines[Transfer] = Deadlines()
        self._live: dict[str, Transfer] = {}
        self._posted: dict[str, Transfer] = {}
        """Live transfers that have left the queue."""

    def get(self, transfer_id: str) -> Transfer | None:
        """Return a transfer in progress."""
        return self._live.get(transfer_id)

    def of_peer(self, peer: Peer) -> Sequence[Transfer]:
        """Return the transfers in progress of one peer."""
        return [transfer for transfer in self._live.values() if transfer.peer is peer]

    @property
    def is_busy(self) -> bool:
        """Whether anything is in progress."""
        return bool(self._live)

    @property
    def is_only_probing(self) -> bool:
        """Whether all transfers in progress are probes, which no caller waits for."""
        return all(transfer.order.operation == "probe" for transfer in self._live.values())

    def gauges(self) -> Mapping[str, float]:
        """Return the numbers of queued and posted transfers and bytes."""
        return {
            "queued": float(self.schedule.count),
            "queued_bytes": float(self.schedule.waiting_bytes()),
            "inflight": float(len(self._posted)),
            "inflight_bytes": float(self.schedule.inflight_bytes),
            "deadlines_kept": float(len(self._deadlines)),
        }

    # ----------------------------------------------------------------------------------------------------------- turn

    def add(self, transfer: Transfer) -> None:
        """Add an accepted transfer. Without parts it goes straight to its verification."""
        transfer_id = transfer.order.transfer_id
        self._live[transfer_id] = transfer
        self._deadlines.push(transfer)
        if transfer.pending:
            self.schedule.push(transfer)
        else:
            self._posted[transfer_id] = transfer
            transfer.skip_data()

    def launch(self) -> bool:
        """Post parts up to a turn's share of descriptors; return True if any was posted."""
        rows = 0
        while rows < self._share:
            taken = self.schedule.take()
            if taken is None:
                break
            transfer, part = taken
            rows += len(part.peer_indices)
            self._posted[transfer.order.transfer_id] = transfer
            transfer.post(part)
        return rows > 0

    def poll(self) -> bool:
        """Poll everything that is posted; return True if anything progressed."""
        moved = False
        if self._posted:
            for transfer in list(self._posted.values()):
                moved = transfer.poll() or moved
            self.stalls.look(self._posted)
        return moved

    def end_late(self, now_s: float) -> None:
        """End the transfers whose deadline has passed."""
        if self._deadlines.is_due(now_s):
            for transfer in self._deadlines.take_late(now_s):
                transfer.end_late()

    # ----------------------------------------------------------------------------------------------------------- ends

    def end_peer(self, peer: Peer) -> None:
        """End the transfers of a removed peer, after polling NIXL once more for ends that it knows of."""
        for transfer in self.of_peer(peer):
            if transfer.order.transfer_id in self._posted:
                transfer.poll()
            transfer.end("failed", "peer-removed", f"peer {peer.key!r} was removed or replaced")

    def end_all(self, outcome: Outcome, code: str, message: str) -> None:
        """End every transfer in progress; one that cannot be ended, because of a defect here, is reported as failed."""
        for transfer in list(self._live.values()):
            order = transfer.order
            try:
                transfer.end(outcome, code, message)
            except Exception as error:  # noqa: BLE001 - every other transfer ends in any case
                if self._live.pop(order.transfer_id, None) is not None:
                    text = f"its end raised {type(error).__name__}: {error}"
                    result = TransferResult(
                        order.transfer_id, order.peer, "failed", "thread-dead", text, is_memory_quiet=False
                    )
                    self.report(result)

    def note_end(self, result: TransferResult) -> None:
        """Remove a transfer in the step that reports its result."""
        del self._live[result.transfer_id]
        self._posted.pop(result.transfer_id, None)
        self._deadlines.forget()
        self.stalls.forget(result.transfer_id)
        if not result.is_memory_quiet:
            self._statistics.count("quarantined_total")
        self.report(result)

    def report(self, result: TransferResult) -> None:
        """Keep a result for the owner."""
        self._statistics.ended(result)
        self.results.append(result)

    def note_quiet(self, transfer: Transfer) -> None:
        """Remove a transfer that leaves quarantine."""
        transfer.become_quiet()
        self._statistics.count("quiet_total")
        self.quiet.append(transfer.order.transfer_id)
