"""All transfers of one agent in progress: the order in which their parts are posted, their deadlines and stalls.

A stalled transfer makes no progress on the wire. NIXL reports only whether a posted handle is done. So progress means that a part
is posted or ends, or that the state changes; a transfer whose parts each take longer than `stall_after_s` is reported too. A
reported transfer continues: its deadline ends it, and quarantine holds its memory.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, final

from kv_nixl_agent.transfers.parts import WireLoad
from kv_nixl_agent.transfers.transfer import Wiring
from kv_nixl_agent.values import StallEntry, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import NixlPort
    from kv_nixl_agent.options import AgentOptions
    from kv_nixl_agent.transfers.handles import Handles
    from kv_nixl_agent.transfers.parts import Part
    from kv_nixl_agent.transfers.reader import WordReader
    from kv_nixl_agent.transfers.transfer import Transfer
    from kv_nixl_agent.values import Outcome, Statistics

__all__ = ["Schedule", "TransferTable"]

_NO_LIMIT: Final = 1 << 31


@final
class TransferTable:
    """Transfers by id: waiting in `schedule`, posted, and under their deadlines."""

    def __init__(
        self,
        port: NixlPort,
        handles: Handles,
        words: WordReader,
        options: AgentOptions,
        statistics: Statistics,
        clock: Callable[[], float],
    ) -> None:
        self._handles = handles
        self._statistics = statistics
        self._clock = clock
        self.quiet: list[str] = []
        """Ids of transfers that have left quarantine and that the owner has not taken yet, oldest first."""
        load = WireLoad()
        self.wiring = Wiring(port, handles, words, load, statistics, clock, self._note_end, self.quiet)
        """Parts that every transfer uses."""
        self._share = options.chunk_rows or _NO_LIMIT
        self._stall_after_s = options.stall_after_s
        self.schedule = Schedule(load, options.max_inflight_bytes)
        self.results: list[TransferResult] = []
        """Results that the owner has not taken yet, oldest first."""
        self._earliest_deadline_s = math.inf
        """Lower bound: its transfer may have ended since."""
        self._live: dict[str, Transfer] = {}
        self._posted: dict[str, Transfer] = {}
        """Live transfers that have left the queue."""

    def get(self, transfer_id: str) -> Transfer | None:
        """Return a transfer in progress."""
        return self._live.get(transfer_id)

    @property
    def is_busy(self) -> bool:
        """Whether anything is in progress."""
        return bool(self._live)

    @property
    def is_only_probing(self) -> bool:
        """Whether all transfers in progress are probes, which no caller waits for."""
        return all(transfer.order.operation == "probe" for transfer in self._live.values())

    def gauges(self) -> Mapping[str, float]:
        """Return the numbers of queued, posted and quarantined transfers and bytes."""
        held = self._handles.entries()
        return {
            "queued": float(self.schedule.count),
            "queued_bytes": float(self.schedule.waiting_bytes()),
            "inflight": float(len(self._posted)),
            "inflight_bytes": float(self.wiring.load.payload_bytes),
            "quarantined": float(len(held)),
            "quarantined_bytes": float(sum(entry.bytes_at_risk for entry in held)),
        }

    def stalls(self) -> Sequence[StallEntry]:
        """Return the posted transfers without progress for `stall_after_s`."""
        if self._stall_after_s is None:
            return []
        latest_s = self._clock() - self._stall_after_s
        return [
            StallEntry(transfer_id, transfer.peer.key, transfer.moved_s, transfer.bytes_left)
            for transfer_id, transfer in self._posted.items()
            if transfer.moved_s <= latest_s
        ]

    # ----------------------------------------------------------------------------------------------------------- turn

    def add(self, transfer: Transfer) -> None:
        """Add an accepted transfer. Without parts it goes straight to its verification."""
        transfer_id = transfer.order.transfer_id
        self._live[transfer_id] = transfer
        self._earliest_deadline_s = min(self._earliest_deadline_s, transfer.deadline_s)
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
        for transfer in list(self._posted.values()):
            moved = transfer.poll() or moved
        return moved

    def end_late(self, now_s: float) -> None:
        """End the transfers whose deadline has passed."""
        if now_s <= self._earliest_deadline_s:
            return
        for transfer in list(self._live.values()):
            if transfer.deadline_s < now_s:
                transfer.end_late()
        self._earliest_deadline_s = min((transfer.deadline_s for transfer in self._live.values()), default=math.inf)

    # ----------------------------------------------------------------------------------------------------------- ends

    def end_peer(self, peer: Peer) -> None:
        """End the transfers of a removed peer, after polling NIXL once more for ends that it knows of."""
        for transfer in [transfer for transfer in self._live.values() if transfer.peer is peer]:
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

    def _note_end(self, transfer: Transfer, result: TransferResult) -> None:
        """Remove a transfer in the step that reports its result."""
        self.schedule.forget(transfer)
        del self._live[result.transfer_id]
        self._posted.pop(result.transfer_id, None)
        self.report(result)

    def report(self, result: TransferResult) -> None:
        """Keep a result for the owner."""
        self._statistics.ended(result)
        self.results.append(result)


@final
class Schedule:
    """Waiting transfers: first come first served per peer, round robin between peers, below a cap on bytes in flight.

    Peers p and q with transfers p0, p1 (two parts each) and q0 (one part) are posted as p0, q0, p0, p1, p1.

    A peer with nothing on the wire never waits for the cap, whatever other peers have on the wire; a peer with something on the
    wire waits for its turn. Example: with a cap of 4 GiB and 4 GiB of a stopped peer p on the wire, a part of q is posted at
    once, and the next part of q after it has ended.
    """

    def __init__(self, load: WireLoad, max_inflight_bytes: int | None) -> None:
        self._load = load
        self._cap = max_inflight_bytes
        self._turns: deque[Peer] = deque()
        self._lines: dict[Peer, OrderedDict[Transfer, None]] = {}
        self.count = 0
        """Transfers in progress with parts to post."""

    def push(self, transfer: Transfer) -> None:
        """Queue a transfer behind the others of its peer."""
        line = self._lines.get(transfer.peer)
        if line is None:
            line = self._lines[transfer.peer] = OrderedDict()
            self._turns.append(transfer.peer)
        line[transfer] = None
        self.count += 1

    def forget(self, transfer: Transfer) -> None:
        """Remove an ending transfer from the queue, if it waits."""
        line = self._lines.get(transfer.peer)
        if line is not None and transfer in line:
            del line[transfer]
            self.count -= 1

    def take(self) -> tuple[Transfer, Part] | None:
        """Return the next part to post and its transfer, and pass the turn on; None if nothing waits or the cap is reached."""
        while self._turns:
            peer = self._turns[0]
            line = self._lines[peer]
            if line:
                return self._take_part(peer) if self._has_room(peer, line) else self._take_unserved()
            del self._lines[self._turns.popleft()]
        return None

    def _take_unserved(self) -> tuple[Transfer, Part] | None:
        """Return a part of a peer that has none on the wire, even though the cap is reached."""
        peer = next((peer for peer in self._turns if self._lines[peer] and not self._load.has(peer)), None)
        return None if peer is None else self._take_part(peer)

    def _take_part(self, peer: Peer) -> tuple[Transfer, Part]:
        line = self._lines[peer]
        transfer = next(iter(line))
        part = transfer.pending.popleft()
        if not transfer.pending:
            del line[transfer]
            self.count -= 1
        self._turns.remove(peer)
        self._turns.append(peer)
        return transfer, part

    def _has_room(self, peer: Peer, line: OrderedDict[Transfer, None]) -> bool:
        if self._cap is None or not self._load.has(peer):
            return True
        return self._load.payload_bytes + next(iter(line)).pending[0].payload_bytes <= self._cap

    def waiting_bytes(self) -> int:
        """Return the payload bytes that are waiting to be posted."""
        return sum(
            part.payload_bytes for line in self._lines.values() for transfer in line for part in transfer.pending
        )
