"""All transfers of one agent in progress: the order in which their parts are posted, their deadlines and stalls.

A stalled transfer makes no progress on the wire. NIXL reports only whether a posted handle is done. So progress means that a part
is posted or ends, or that the state changes; a transfer whose parts each take longer than `stall_after_s` is reported too. A
reported transfer continues: its deadline ends it, and quarantine holds its memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, final

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

__all__ = ["TransferQueue"]

_NO_LIMIT: Final = 1 << 31


@final
class TransferQueue:
    """Transfers in progress: waiting for their turn, posted, and under their deadlines.

    Waiting transfers are served first come first served per peer, round robin between peers, below a cap on bytes in flight.
    Peers p and q with transfers p0, p1 (two parts each) and q0 (one part) are posted as p0, q0, p0, p1, p1.

    A peer with nothing on the wire never waits for the cap, whatever other peers have on the wire; a peer with something on the
    wire waits for its turn. Example: with a cap of 4 GiB and 4 GiB of a stopped peer p on the wire, a part of q is posted at
    once, and the next part of q after it has ended.
    """

    def __init__(
        self,
        port: NixlPort,
        handles: Handles,
        words: WordReader,
        options: AgentOptions,
        statistics: Statistics,
        clock: Callable[[], float],
    ) -> None:
        self.port, self.handles, self.words, self.statistics, self.clock = port, handles, words, statistics, clock
        self.live: dict[str, Transfer] = {}
        """Transfers in progress by id."""
        self.results: list[TransferResult] = []
        """Results that the owner has not taken yet, oldest first."""
        self.quiet: list[str] = []
        """Ids of transfers that have left quarantine and that the owner has not taken yet, oldest first."""
        self.wire_bytes = 0
        """Payload bytes of posted parts of live transfers."""
        self._posted: dict[str, Transfer] = {}
        """Live transfers that have left the queue."""
        self._lines: dict[Peer, dict[Transfer, None]] = {}
        """Transfers with parts to post, by peer in the order of their next turns."""
        self._share = options.chunk_rows or _NO_LIMIT
        self._cap = math.inf if options.max_inflight_bytes is None else options.max_inflight_bytes
        self._stall_after_s = options.stall_after_s
        self._earliest_deadline_s = math.inf
        """Lower bound: its transfer may have ended since."""

    @property
    def waiting_count(self) -> int:
        """Number of transfers with parts to post."""
        return sum(map(len, self._lines.values()))

    def gauges(self) -> Mapping[str, float]:
        """Return the numbers of queued, posted and quarantined transfers and bytes."""
        waiting = [part for line in self._lines.values() for transfer in line for part in transfer.pending]
        held = self.handles.entries()
        return {
            "queued": float(self.waiting_count),
            "queued_bytes": float(sum(part.payload_bytes for part in waiting)),
            "inflight": float(len(self._posted)),
            "inflight_bytes": float(self.wire_bytes),
            "quarantined": float(len(held)),
            "quarantined_bytes": float(sum(entry.bytes_at_risk for entry in held)),
        }

    def stalls(self) -> Sequence[StallEntry]:
        """Return the posted transfers without progress for `stall_after_s`."""
        if self._stall_after_s is None:
            return []
        latest_s = self.clock() - self._stall_after_s
        return [
            StallEntry(
                transfer_id,
                transfer.peer.key,
                transfer.moved_s,
                sum(part.payload_bytes for part in (*transfer.active, *transfer.pending)),
            )
            for transfer_id, transfer in self._posted.items()
            if transfer.moved_s <= latest_s
        ]

    # ----------------------------------------------------------------------------------------------------------- turn

    def add(self, transfer: Transfer) -> None:
        """Add an accepted transfer. Without parts it goes straight to its verification."""
        transfer_id = transfer.order.transfer_id
        self.live[transfer_id] = transfer
        self._earliest_deadline_s = min(self._earliest_deadline_s, transfer.deadline_s)
        if transfer.pending:
            self._lines.setdefault(transfer.peer, {})[transfer] = None
        else:
            self._posted[transfer_id] = transfer
            transfer.verify()

    def advance(self) -> bool:
        """Post parts up to a turn's share of descriptors, poll what is posted, end what is late; True if anything progressed."""
        rows = 0
        while rows < self._share and (taken := self._take_part()) is not None:
            transfer, part = taken
            rows += len(part.peer_indices)
            self._posted[transfer.order.transfer_id] = transfer
            transfer.post(part)
        moved = rows > 0
        for transfer in list(self._posted.values()):
            moved = transfer.poll() or moved
        now_s = self.clock()
        if now_s > self._earliest_deadline_s:
            for transfer in list(self.live.values()):
                if transfer.deadline_s < now_s:
                    transfer.end_late()
            self._earliest_deadline_s = min((one.deadline_s for one in self.live.values()), default=math.inf)
        return moved

    def _take_part(self) -> tuple[Transfer, Part] | None:
        """Return the next part to post and its transfer, and pass the turn on; None if nothing waits or the cap is reached."""
        is_first = True
        for peer, line in self._lines.items():
            transfer = next(iter(line))
            part = transfer.pending[0]
            has_room = is_first and self.wire_bytes + part.payload_bytes <= self._cap
            is_first = False
            if not (has_room or not peer.parts_on_wire):
                continue
            transfer.pending.popleft()
            if not transfer.pending:
                del line[transfer]
            del self._lines[peer]
            if line:
                self._lines[peer] = line
            return transfer, part
        return None

    # ----------------------------------------------------------------------------------------------------------- ends

    def end_peer(self, peer: Peer) -> None:
        """End the transfers of a removed peer, after polling NIXL once more for ends that it knows of."""
        for transfer in [transfer for transfer in self.live.values() if transfer.peer is peer]:
            if transfer.order.transfer_id in self._posted:
                transfer.poll()
            transfer.end("failed", "peer-removed", f"peer {peer.key!r} was removed or replaced")

    def end_all(self, outcome: Outcome, code: str, message: str) -> None:
        """End every transfer in progress; one that cannot be ended, because of a defect here, is reported as failed."""
        for transfer in list(self.live.values()):
            order = transfer.order
            try:
                transfer.end(outcome, code, message)
            except Exception as error:  # noqa: BLE001 - every other transfer ends in any case
                if self.live.pop(order.transfer_id, None) is not None:
                    text = f"its end raised {type(error).__name__}: {error}"
                    result = TransferResult(
                        order.transfer_id, order.peer, "failed", "thread-dead", text, is_memory_quiet=False
                    )
                    self.report(result)

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer that reports its result."""
        line = self._lines.get(transfer.peer, {})
        if transfer in line:
            del line[transfer]
            if not line:
                del self._lines[transfer.peer]
        del self.live[transfer.order.transfer_id]
        self._posted.pop(transfer.order.transfer_id, None)

    def report(self, result: TransferResult) -> None:
        """Keep a result for the owner."""
        self.statistics.ended(result)
        self.results.append(result)
