"""Cutting an order into parts: pairs of descriptors, ordered for merging, of one memory kind per side.

NIXL merges neighbouring descriptors only where both index lists ascend together, so pairs are sorted by peer index first:

    local  7 5 6 1      peer 3 1 2 9      as ordered
    local  5 6 7 1      peer 1 2 3 9      sorted: (5, 1) (6, 2) (7, 3) merge into one descriptor, (1, 9) stays alone
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind
    from kv_nixl_agent.options import AgentOptions

    Indices = npt.NDArray[np.int32]

__all__ = ["Part", "WireLoad", "order_for_merging", "split_into_parts", "spread_runs"]

# Below it, handing pieces to other threads costs about what they save (docs/performance.md).
_SPREAD_FROM_BYTES: Final = 16 << 20
_KIND_NAMES: tuple[MemoryKind, MemoryKind] = ("DRAM", "VRAM")
_GLANCE = 64


@final
class Part:
    """Descriptors of one local and one peer list that are posted at once."""

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
class WireLoad:
    """Posted parts of transfers in progress."""

    def __init__(self) -> None:
        self._parts: Counter[Peer] = Counter()
        self.payload_bytes = 0

    def add(self, peer: Peer, part: Part) -> None:
        """Count a posted part."""
        self.payload_bytes += part.payload_bytes
        self._parts[peer] += 1

    def remove(self, peer: Peer, part: Part) -> None:
        """Subtract a part that has ended, or whose transfer has ended."""
        self.payload_bytes -= part.payload_bytes
        self._parts[peer] -= 1
        if not self._parts[peer]:
            del self._parts[peer]  # a removed peer must not be kept

    def has(self, peer: Peer) -> bool:
        """Return whether a part of this peer is on the wire."""
        return peer in self._parts


def split_into_parts(peer: Peer, local_indices: object, peer_indices: object, options: AgentOptions) -> deque[Part]:
    """Return the parts of a transfer, ordered for merging, of one memory kind per side and at most `chunk_rows` each.

    Long runs of host memory are kept from merging into fewer descriptors than the backend's threads can share.

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
    head = indices[:_GLANCE]  # enough for lists in no order; whole lists have left the processor's caches meanwhile
    return bool((head[1:] >= head[:-1]).all()) and bool((indices[1:] >= indices[:-1]).all())


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
