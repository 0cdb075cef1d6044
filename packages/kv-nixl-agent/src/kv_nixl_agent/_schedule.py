"""The order in which parts are posted, and the deadlines of all transfers in progress."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Final, Generic, final

from ._ongoing import OngoingT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._parts import Part
    from ._peer import Peer

__all__ = ["Deadlines", "Schedule"]

_SMALLEST_REBUILD: Final = 64


@final
class Schedule(Generic[OngoingT]):
    """Waiting transfers: first come first served per peer, round robin between peers, below a cap on bytes in flight.

    Peers p and q with transfers p0, p1 (two parts each) and q0 (one part) are posted as p0, q0, p0, p1, p1.

    A peer with nothing on the wire never waits for the cap, whatever other peers have on the wire; a peer with something on the
    wire waits for its turn. Example: with a cap of 4 GiB and 4 GiB of a stopped peer p on the wire, a part of q is posted at
    once, and the next part of q after it has ended.
    """

    def __init__(self, max_inflight_bytes: int | None) -> None:
        self._cap = max_inflight_bytes
        self._turns: deque[Peer] = deque()
        self._lines: dict[Peer, OrderedDict[OngoingT, None]] = {}
        self._on_wire: Counter[Peer] = Counter()
        self.count = 0
        """Transfers in progress with parts to post."""
        self.inflight_bytes = 0
        """Payload bytes of posted parts that have not ended, of transfers in progress."""

    def push(self, transfer: OngoingT) -> None:
        """Queue a transfer behind the others of its peer."""
        line = self._lines.get(transfer.peer)
        if line is None:
            line = self._lines[transfer.peer] = OrderedDict()
            self._turns.append(transfer.peer)
        line[transfer] = None
        self.count += 1

    def forget(self, transfer: OngoingT) -> None:
        """Remove an ending transfer from the queue, if it waits."""
        line = self._lines.get(transfer.peer)
        if line is not None and transfer in line:
            del line[transfer]
            self.count -= 1

    def take(self) -> tuple[OngoingT, Part] | None:
        """Return the next part to post and its transfer, and pass the turn on; None if nothing waits or the cap is reached."""
        while self._turns:
            peer = self._turns[0]
            line = self._lines[peer]
            if line:
                return self._take_part(peer) if self._has_room(peer, line) else self._take_unserved()
            del self._lines[self._turns.popleft()]
        return None

    def _take_unserved(self) -> tuple[OngoingT, Part] | None:
        """Return a part of a peer that has none on the wire, even though the cap is reached."""
        peer = next((peer for peer in self._turns if self._lines[peer] and not self._on_wire[peer]), None)
        return None if peer is None else self._take_part(peer)

    def _take_part(self, peer: Peer) -> tuple[OngoingT, Part]:
        line = self._lines[peer]
        transfer = next(iter(line))
        part = transfer.pending.popleft()
        if not transfer.pending:
            del line[transfer]
            self.count -= 1
        if self._turns[0] is peer:
            self._turns.rotate(-1)
        else:
            self._turns.remove(peer)
            self._turns.append(peer)
        return transfer, part

    def _has_room(self, peer: Peer, line: OrderedDict[OngoingT, None]) -> bool:
        if self._cap is None or not self._on_wire[peer]:
            return True
        part = next(iter(line)).pending[0]
        return self.inflight_bytes + part.payload_bytes <= self._cap

    def on_wire(self, peer: Peer, part: Part) -> None:
        """Count a posted part."""
        self.inflight_bytes += part.payload_bytes
        self._on_wire[peer] += 1

    def off_wire(self, peer: Peer, part: Part) -> None:
        """Subtract a part that has ended, or whose transfer has ended."""
        self.inflight_bytes -= part.payload_bytes
        self._on_wire[peer] -= 1
        if not self._on_wire[peer]:
            del self._on_wire[peer]

    def waiting_bytes(self) -> int:
        """Return the payload bytes that are waiting to be posted."""
        return sum(
            part.payload_bytes for line in self._lines.values() for transfer in line for part in transfer.pending
        )


@final
class Deadlines(Generic[OngoingT]):
    """Transfers in progress by deadline.

    Ended transfers are removed at the next rebuild, which takes place when more than half of the entries have ended: a late
    deadline at the head therefore retains at most as many ended transfers as there are live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, OngoingT]] = []
        self._sequence = itertools.count()
        self._ended = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, transfer: OngoingT) -> None:
        """Watch a transfer's deadline."""
        heapq.heappush(self._heap, (transfer.deadline_s, next(self._sequence), transfer))

    def forget(self) -> None:
        """Note that a watched transfer has ended."""
        self._ended += 1
        if self._ended > _SMALLEST_REBUILD and 2 * self._ended > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].has_ended]
            heapq.heapify(self._heap)
            self._ended = 0

    def is_due(self, now_s: float) -> bool:
        """Return whether the first deadline has passed."""
        return bool(self._heap) and self._heap[0][0] < now_s

    def take_late(self, now_s: float) -> Iterator[OngoingT]:
        """Return the transfers in progress whose deadline has passed, once each."""
        while self._heap and (self._heap[0][0] < now_s or self._heap[0][2].has_ended):
            transfer = heapq.heappop(self._heap)[2]
            if transfer.has_ended:
                self._ended = max(0, self._ended - 1)
            else:
                self._ended -= 1  # balances the `forget` that follows, since the entry has already been removed
                yield transfer
