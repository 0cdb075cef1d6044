"""All transfers of one agent in progress: their parts, the order in which these are posted, deadlines and stalls.

An order is cut into parts: pairs of descriptors of one memory kind per side. NIXL merges neighbouring descriptors only where
both index lists ascend together, so pairs are sorted by peer index first:

    local  7 5 6 1      peer 3 1 2 9      as ordered
    local  5 6 7 1      peer 1 2 3 9      sorted: (5, 1) (6, 2) (7, 3) merge into one descriptor, (1, 9) stays alone

A stalled transfer makes no progress on the wire. NIXL reports only whether a posted handle is done. So progress means that a part
is posted or ends, or that the state changes; a transfer whose parts each take longer than `stall_after_s` is reported too. A
reported transfer continues: its deadline ends it, and quarantine holds its memory.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError
from kv_nixl_agent.transfers.handles import Part
from kv_nixl_agent.transfers.transfer import Wiring
from kv_nixl_agent.values import Figures, StallEntry, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import MemoryKind, NixlPort
    from kv_nixl_agent.options import AgentOptions
    from kv_nixl_agent.transfers.checks import WordChecks
    from kv_nixl_agent.transfers.handles import Handles
    from kv_nixl_agent.transfers.transfer import Transfer
    from kv_nixl_agent.values import Outcome, TransferOrder

    Indices = npt.NDArray[np.int32]

__all__ = ["TransferQueue", "order_for_merging", "split_into_parts", "spread_runs"]

_NO_LIMIT: Final = 1 << 31
_COUNTERS: Final = (
    "transfers_done",
    "transfers_failed",
    "transfers_fence_rejected",
    "transfers_timed_out",
    "transfers_cancelled",
    "probes",
    "bytes_moved",
    "fence_checks",
    "stream_looks",
    "stream_tables",
    "stream_tables_early",
    "streams_broken",
)
_RECENT: Final = 1024
_LATE_AFTER_S: Final = 0.05
_LATE_SHARE: Final = 32
"""Most late transfers that a turn polls. Example: with 1024 of them and turns of 0.5 ms each is polled every 16 ms."""
_DEADLINES_EVERY_S: Final = 0.01
"""Shortest time between two searches of all transfers for late ones."""


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
        checks: WordChecks,
        options: AgentOptions,
        clock: Callable[[], float],
    ) -> None:
        counts: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.checks = checks
        self.wiring = Wiring(port, handles, clock, self._finish, checks.ask, checks.forget, counts, quiet=[])
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=_RECENT)
        """(post_s, wire_s, bytes_moved) of the latest transfers that are done."""
        self.live: dict[str, Transfer] = {}
        """Transfers in progress by id."""
        self.results: list[TransferResult] = []
        """Results that the owner has not taken yet, oldest first."""
        self._posted: dict[str, Transfer] = {}
        """Live transfers that have left the queue, and are polled in every turn."""
        self._late: dict[str, Transfer] = {}
        """Those of them without progress for `_LATE_AFTER_S`, polled in rotation, so that slow peers do not take a core."""
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

    @property
    def waiting_rows(self) -> int:
        """Number of descriptors that wait to be posted."""
        lines = self._lines.values()
        return sum(len(part.peer_indices) for line in lines for transfer in line for part in transfer.pending)

    def figures(self, gauges: Mapping[str, float]) -> Figures:
        """Return counts, times and gauges of this moment, together with further gauges."""
        held, waiting = self.wiring.handles.entries(), [transfer for line in self._lines.values() for transfer in line]
        own = {
            "queued": len(waiting),
            "queued_bytes": sum(part.payload_bytes for each in waiting for part in each.pending),
            "inflight": len(self._posted) + len(self._late),
            "inflight_bytes": self.wiring.wire_bytes,
            "quarantined": len(held),
            "quarantined_bytes": sum(entry.bytes_at_risk for entry in held),
        }
        return Figures({**self.wiring.counts, **own, **gauges}, tuple(self._recent))

    def stalls(self) -> Sequence[StallEntry]:
        """Return the posted transfers without progress for `stall_after_s`."""
        if self._stall_after_s is None:
            return []
        latest_s = self.wiring.clock() - self._stall_after_s
        return [
            StallEntry(
                transfer_id,
                transfer.peer.key,
                transfer.moved_s,
                sum(part.payload_bytes for part in (*transfer.active, *transfer.pending)),
            )
            for transfer_id, transfer in (*self._posted.items(), *self._late.items())
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
            self.checks.advance()  # at once: the thread may rest before its next turn

    def advance(self) -> bool:
        """Post parts up to a turn's share of descriptors, poll what is posted, end what is late; True if anything progressed."""
        rows = 0
        while rows < self._share and (taken := self._take_part()) is not None:
            transfer, part = taken
            rows += len(part.peer_indices)
            self._late.pop(transfer.order.transfer_id, None)
            self._posted[transfer.order.transfer_id] = transfer
            transfer.post(part)
        moved = self._poll() or rows > 0
        moved = self.checks.advance() or moved
        now_s = self.wiring.clock()
        if now_s > self._earliest_deadline_s:
            for transfer in list(self.live.values()):
                if transfer.deadline_s < now_s:
                    transfer.end_late()
            earliest_s = min((one.deadline_s for one in self.live.values()), default=math.inf)
            self._earliest_deadline_s = max(earliest_s, now_s + _DEADLINES_EVERY_S)
        return moved

    def _poll(self) -> bool:
        """Poll what is posted; return True if anything progressed."""
        moved, late_s = False, self.wiring.clock() - _LATE_AFTER_S
        for transfer_id, transfer in (*self._posted.items(), *islice(self._late.items(), _LATE_SHARE)):
            if transfer.poll():
                moved = True
                if self._late.pop(transfer_id, None) is not None:
                    self._posted[transfer_id] = transfer
            elif transfer.moved_s < late_s:
                self._posted.pop(transfer_id, None)
                self._late.pop(transfer_id, None)
                self._late[transfer_id] = transfer  # behind the others
        return moved

    def _take_part(self) -> tuple[Transfer, Part] | None:
        """Return the next part to post and its transfer, and pass the turn on; None if nothing waits or the cap is reached."""
        is_first = True
        for peer, line in self._lines.items():
            transfer = next(iter(line))
            part = transfer.pending[0]
            has_room = is_first and self.wiring.wire_bytes + part.payload_bytes <= self._cap
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
            if transfer.order.transfer_id in self._posted or transfer.order.transfer_id in self._late:
                transfer.poll()
        self.checks.advance()
        for transfer in [transfer for transfer in self.live.values() if transfer.peer is peer]:
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
                    self.report(order, result)

    def _finish(self, transfer: Transfer, result: TransferResult) -> None:
        """Forget a transfer in the step that reports its result."""
        line = self._lines.get(transfer.peer, {})
        if transfer in line:
            del line[transfer]
            if not line:
                del self._lines[transfer.peer]
        del self.live[transfer.order.transfer_id]
        self._posted.pop(transfer.order.transfer_id, None)
        self._late.pop(transfer.order.transfer_id, None)
        self.report(transfer.order, result)

    def report(self, order: TransferOrder, result: TransferResult) -> None:
        """Count a result, of a probe apart from those of reads, and keep it for the owner."""
        is_probe = order.operation == "probe"
        self.wiring.counts["probes" if is_probe else "transfers_" + result.outcome.replace("-", "_")] += 1
        if result.outcome == "done" and not is_probe:
            self.wiring.counts["bytes_moved"] += result.bytes_moved
            self._recent.append((result.post_s, result.wire_s, result.bytes_moved))
        self.results.append(result)


# Below it, handing pieces to other threads costs about what they save (docs/performance.md).
_SPREAD_FROM_BYTES: Final = 16 << 20
_GLANCE = 64


def split_into_parts(
    peer: Peer, local_indices: object, peer_indices: object, *, chunk_rows: int, shared_from: int
) -> deque[Part]:
    """Return the parts of a transfer, ordered for merging, of one memory kind per side and at most `chunk_rows` each (0: any).

    Long runs of host memory are kept from merging into fewer descriptors than the backend's threads can share: `shared_from`,
    0 if they share none.

    Raises:
        AgentError: `bad-indices`, `length-mismatch`.
    """
    local = peer.local.check_indices(local_indices, "local")
    theirs = peer.rows.check_indices(peer_indices, "peer")
    if len(local) != len(theirs):
        raise AgentError(
            "bad-indices", f"{len(local)} local indices against {len(theirs)} of the peer; they pair up one to one"
        )
    parts: deque[Part] = deque()
    if not len(local):
        return parts
    local, theirs = order_for_merging(local, theirs)
    each_bytes = peer.local.uniform_bytes
    lengths = None if each_bytes and each_bytes == peer.rows.uniform_bytes else _equal_lengths(peer, local, theirs)
    kinds: list[tuple[MemoryKind, MemoryKind]] = [
        (mine, other) for mine in peer.local.groups for other in peer.rows.groups
    ]
    for local_kind, peer_kind in kinds:
        own, their, sizes = local, theirs, lengths
        if len(kinds) > 1:
            members = np.flatnonzero(peer.local.has_kind(local, local_kind) & peer.rows.has_kind(theirs, peer_kind))
            own, their = peer.local.in_group(local[members]), peer.rows.in_group(theirs[members])
            sizes = None if lengths is None else lengths[members]
        step = chunk_rows or max(1, len(own))
        for start in range(0, len(own), step):
            piece = slice(start, start + step)
            pair = own[piece], their[piece]
            total = each_bytes * len(pair[0]) if sizes is None else int(sizes[piece].sum())
            if shared_from and total >= _SPREAD_FROM_BYTES and local_kind == peer_kind == "DRAM":
                pair = spread_runs(*pair, shared_from)
            parts.append(Part(local_kind, pair[0], peer_kind, pair[1], total))
    return parts


def _equal_lengths(peer: Peer, local: Indices, theirs: Indices) -> npt.NDArray[np.int64]:
    """Return the length in bytes of each descriptor, int64 (n,), once it is that of its partner."""
    lengths, others = peer.local.lengths(local), peer.rows.lengths(theirs)
    differs = np.flatnonzero(lengths != others)
    if len(differs):
        at = int(differs[0])
        raise AgentError(
            "length-mismatch",
            f"local descriptor {int(local[at])} has {int(lengths[at])} bytes, its partner {int(theirs[at])} of peer "
            f"{peer.key!r} has {int(others[at])}",
            peer=peer.key,
        )
    return lengths


def order_for_merging(local: Indices, peer: Indices) -> tuple[Indices, Indices]:
    """Return the pairs sorted by peer index; NIXL merges neighbours only where both lists ascend together."""
    if _ascends(peer):
        return local, peer
    if _ascends(peer[::-1]):  # as free lists hand blocks out; costs a third of sorting
        return np.ascontiguousarray(local[::-1]), np.ascontiguousarray(peer[::-1])
    pairs = peer.astype(np.int64)  # sorting plain numbers costs less than sorting places and gathering
    pairs <<= 32
    pairs |= local
    pairs.sort()
    return (pairs & 0xFFFFFFFF).astype(np.int32), (pairs >> 32).astype(np.int32)


def _ascends(indices: Indices) -> bool:
    # Enough for lists in no order; whole ones have left the processor's caches meanwhile.
    head = indices[:_GLANCE].tolist()
    return head == sorted(head) and (len(indices) <= _GLANCE or bool((indices[1:] >= indices[:-1]).all()))


def spread_runs(local: Indices, peer: Indices, pieces: int) -> tuple[Indices, Indices]:
    """Return the pairs, ordered for merging, so that NIXL merges them into no fewer than about `pieces` descriptors.

    One long run would become one descriptor, which one thread copies. Its pieces are interleaved, first the even ones, then the
    odd ones, so that neighbours in the list are not neighbours in memory. Lists with as many runs anyway, or with fewer
    descriptors, stay unchanged.
    """
    count = len(peer)
    if count < pieces or _runs(local[: 2 * pieces], peer[: 2 * pieces]) >= pieces or _runs(local, peer) >= pieces:
        return local, peer
    numbers = np.arange(count) * pieces // count  # of the piece that each pair belongs to
    order = np.concatenate((np.flatnonzero(numbers % 2 == 0), np.flatnonzero(numbers % 2)))
    return local[order], peer[order]


def _runs(local: Indices, peer: Indices) -> int:
    return 1 + int(np.count_nonzero((local[1:] - local[:-1] != 1) | (peer[1:] - peer[:-1] != 1)))
