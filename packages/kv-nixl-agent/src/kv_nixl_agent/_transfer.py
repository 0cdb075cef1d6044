"""The record of one transfer while it lives, and the fair queue in which it waits."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, final

import numpy as np

from ._errors import AgentError
from ._rows import order_for_merging, spread_runs
from ._values import TransferResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from ._options import AgentOptions
    from ._peers import Peer
    from ._port import Handle, MemoryKind, WireTelemetry
    from ._values import Outcome, TransferOrder

    Indices = npt.NDArray[np.int32]

__all__ = ["FairQueue", "Part", "Transfer", "split_into_parts"]

# Below it, handing pieces to other threads costs about what they save (docs/transfers.md).
_SPREAD_FROM_BYTES: Final = 16 << 20
_KIND_NAMES: tuple[MemoryKind, MemoryKind] = ("DRAM", "VRAM")


@final
class Part:
    """What is posted at once: descriptors of one local and one peer list."""

    __slots__ = ("handle", "last_error", "local_indices", "local_kind", "payload_bytes", "peer_indices", "peer_kind")

    def __init__(
        self, local_kind: MemoryKind, local: Indices, peer_kind: MemoryKind, peer: Indices, payload_bytes: int
    ) -> None:
        self.local_kind: MemoryKind = local_kind
        self.local_indices = local
        self.peer_kind: MemoryKind = peer_kind
        self.peer_indices = peer
        self.payload_bytes = payload_bytes
        self.handle: Handle | None = None
        self.last_error = ""


@final
class Transfer:
    """One accepted order on its way."""

    __slots__ = (
        "active",
        "carried",
        "data_done_s",
        "deadline_s",
        "descriptor_count",
        "fence_done_s",
        "fence_handle",
        "fence_posted_s",
        "fence_word",
        "first_post_s",
        "has_ended",
        "is_attached",
        "merged_count",
        "order",
        "ordered_s",
        "payload_bytes",
        "peer",
        "pending",
        "post_s",
    )

    def __init__(self, order: TransferOrder, peer: Peer, parts: deque[Part], *, now_s: float) -> None:
        self.order = order
        self.peer = peer
        self.pending = parts
        self.active: list[Part] = []
        """Parts that are posted and not known to have ended."""
        self.ordered_s = now_s
        self.deadline_s = now_s + order.deadline_s
        self.descriptor_count = sum(len(part.peer_indices) for part in parts)
        self.payload_bytes = sum(part.payload_bytes for part in parts)
        self.is_attached = bool(
            len(parts) == 1 and order.notification and order.fence is None and order.page_check is None
        )
        """Whether the notification travels with the data; otherwise it is sent once all is verified."""
        self.first_post_s = 0.0
        self.data_done_s = 0.0
        self.fence_posted_s = 0.0
        self.fence_done_s = 0.0
        self.post_s = 0.0
        self.merged_count = 0
        self.carried: dict[tuple[str, MemoryKind, MemoryKind], int] = {}
        """Bytes of the parts that are done, by backend, local and peer memory kind."""
        self.fence_handle: Handle | None = None
        self.fence_word = -1
        self.has_ended = False

    def account(self, part: Part, telemetry: WireTelemetry | None) -> None:
        """Note that a part is done, and what NIXL tells of it."""
        backend = ""
        if telemetry is not None:
            self.merged_count += telemetry.descriptor_count
            backend = telemetry.backend
        path = (backend, part.local_kind, part.peer_kind)
        self.carried[path] = self.carried.get(path, 0) + part.payload_bytes

    def result(
        self,
        outcome: Outcome,
        code: str,
        message: str,
        *,
        now_s: float,
        fence_s: float,
        check_s: float,
        is_notified: bool,
    ) -> TransferResult:
        """Return the transfer's result as of now."""
        first_s = self.first_post_s
        return TransferResult(
            transfer_id=self.order.transfer_id,
            peer=self.peer.key,
            outcome=outcome,
            code=code,
            message=message,
            is_memory_quiet=not self.active,
            bytes_moved=self.payload_bytes if self.data_done_s else 0,
            descriptor_count=self.descriptor_count,
            merged_count=self.merged_count,
            queue_s=(first_s or now_s) - self.ordered_s,
            post_s=self.post_s,
            wire_s=(self.data_done_s or now_s) - first_s if first_s else 0.0,
            fence_s=fence_s,
            check_s=check_s,
            is_notified=is_notified,
            bytes_by_path=tuple([(*path, size) for path, size in self.carried.items()]) if self.data_done_s else (),
        )


def split_into_parts(peer: Peer, local_indices: object, peer_indices: object, options: AgentOptions) -> deque[Part]:
    """Return the parts of a transfer, ordered for merging, of one memory kind per side and at most `chunk_rows` each.

    Long runs of host memory are kept from merging into fewer descriptors than the backend's threads share among them.

    Raises:
        AgentError: `bad-indices`, `length-mismatch`.
    """
    local = peer.local.check_indices(local_indices, "local")
    theirs = peer.rows.check_indices(peer_indices, "peer")
    if len(local) != len(theirs):
        raise AgentError(
            "bad-indices", f"{len(local)} local indices against {len(theirs)} of the peer; they pair up one to one"
        )
    if not len(local):
        return deque()
    local, theirs = order_for_merging(local, theirs)
    descriptor_bytes = _uniform_bytes(peer, local, theirs)
    parts: deque[Part] = deque()
    pieces = options.shared_from
    for local_kind, peer_kind, mine, others, lengths in _by_kind(peer, local, theirs, descriptor_bytes):
        step = options.chunk_rows or len(mine)
        for start in range(0, len(mine), step):
            piece = slice(start, start + step)
            own, their = mine[piece], others[piece]
            total = descriptor_bytes * len(own) if lengths is None else int(lengths[piece].sum())
            if pieces and total >= _SPREAD_FROM_BYTES and local_kind == peer_kind == "DRAM":
                own, their = spread_runs(own, their, pieces)
            parts.append(Part(local_kind, own, peer_kind, their, total))
    return parts


def _uniform_bytes(peer: Peer, local: Indices, theirs: Indices) -> int:
    """Return the common descriptor length, 0 if lengths vary; refuse pairs of unequal length."""
    mine, others = peer.local.uniform_bytes, peer.rows.uniform_bytes
    if mine and mine == others:
        return mine
    differs = peer.local.lengths(local) != peer.rows.lengths(theirs)
    if bool(differs.any()):
        at = int(np.flatnonzero(differs)[0])
        raise AgentError(
            "length-mismatch",
            f"local descriptor {int(local[at])} has {int(peer.local.lengths(local[at : at + 1])[0])} bytes, its "
            f"partner {int(theirs[at])} of peer {peer.key!r} has {int(peer.rows.lengths(theirs[at : at + 1])[0])}",
            peer=peer.key,
        )
    return 0


def _by_kind(
    peer: Peer, local: Indices, theirs: Indices, descriptor_bytes: int
) -> Iterator[tuple[MemoryKind, MemoryKind, Indices, Indices, npt.NDArray[np.int64] | None]]:
    lengths = None if descriptor_bytes else peer.local.lengths(local)
    mine, others = peer.local.locate(local), peer.rows.locate(theirs)
    if mine is None and others is None:
        yield next(iter(peer.local.groups)), next(iter(peer.rows.groups)), local, theirs, lengths
        return
    local_codes, local = mine or _single(peer.local.groups, local)
    peer_codes, theirs = others or _single(peer.rows.groups, theirs)
    pair = local_codes * 2 + peer_codes
    for code in np.unique(pair).tolist():
        members = np.flatnonzero(pair == code)
        yield (
            _KIND_NAMES[code // 2],
            _KIND_NAMES[code % 2],
            local[members],
            theirs[members],
            None if lengths is None else lengths[members],
        )


def _single(
    groups: dict[MemoryKind, object] | dict[MemoryKind, npt.NDArray[np.uint64]], indices: Indices
) -> tuple[npt.NDArray[np.int8], Indices]:
    code = _KIND_NAMES.index(next(iter(groups)))
    return np.full(len(indices), code, dtype=np.int8), indices


@final
class FairQueue:
    """Transfers that wait: first come first served per peer, round robin between peers."""

    def __init__(self) -> None:
        self._turns: deque[Peer] = deque()
        self._waiting: dict[Peer, deque[Transfer]] = {}
        self.count = 0
        """Transfers that wait."""

    def push(self, transfer: Transfer) -> None:
        """Queue a transfer behind the others of its peer."""
        line = self._waiting.get(transfer.peer)
        if line is None:
            line = self._waiting[transfer.peer] = deque()
            self._turns.append(transfer.peer)
        line.append(transfer)
        self.count += 1

    def head(self) -> Transfer | None:
        """Return the transfer whose turn it is; transfers that ended while waiting are dropped."""
        while self._turns:
            peer = self._turns[0]
            line = self._waiting[peer]
            while line and line[0].has_ended:
                line.popleft()
                self.count -= 1
            if line:
                return line[0]
            self._turns.popleft()
            del self._waiting[peer]
        return None

    def advance(self) -> None:
        """Give the turn to the next peer; the transfer at the head leaves once nothing of it is pending."""
        peer = self._turns.popleft()
        line = self._waiting[peer]
        if not line[0].pending:
            line.popleft()
            self.count -= 1
        if line:
            self._turns.append(peer)
        else:
            del self._waiting[peer]

    def waiting_bytes(self) -> int:
        """Return the payload bytes that wait."""
        return sum(
            part.payload_bytes
            for line in self._waiting.values()
            for transfer in line
            if not transfer.has_ended
            for part in transfer.pending
        )
