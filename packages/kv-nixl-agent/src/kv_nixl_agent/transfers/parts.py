"""Cutting an order into parts: pairs of descriptors, ordered for merging, of one memory kind per side.

NIXL merges neighbouring descriptors only where both index lists ascend together, so pairs are sorted by peer index first:

    local  7 5 6 1      peer 3 1 2 9      as ordered
    local  5 6 7 1      peer 1 2 3 9      sorted: (5, 1) (6, 2) (7, 3) merge into one descriptor, (1, 9) stays alone
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.errors import AgentError

if TYPE_CHECKING:
    import numpy.typing as npt

    from kv_nixl_agent.memory.peers import Peer
    from kv_nixl_agent.nixl.port import Handle, MemoryKind

    Indices = npt.NDArray[np.int32]

__all__ = ["Part", "order_for_merging", "split_into_parts", "spread_runs"]

# Below it, handing pieces to other threads costs about what they save (docs/performance.md).
_SPREAD_FROM_BYTES: Final = 16 << 20
_GLANCE = 64


@final
@dataclass(slots=True, eq=False)
class Part:
    """Descriptors of one local and one peer list that are posted at once."""

    local_kind: MemoryKind
    local_indices: Indices
    peer_kind: MemoryKind
    peer_indices: Indices
    payload_bytes: int
    handle: Handle | None = None
    last_error: str = ""


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
    lengths = peer.local.lengths(local)
    if not peer.local.uniform_bytes or peer.local.uniform_bytes != peer.rows.uniform_bytes:
        _refuse_unequal(peer, local, theirs, lengths)
    kinds = [(mine, other) for mine in peer.local.groups for other in peer.rows.groups]
    for local_kind, peer_kind in kinds:
        own, their, sizes = local, theirs, lengths
        if len(kinds) > 1:
            members = np.flatnonzero(peer.local.has_kind(local, local_kind) & peer.rows.has_kind(theirs, peer_kind))
            own, their, sizes = (
                peer.local.in_group(local[members]),
                peer.rows.in_group(theirs[members]),
                lengths[members],
            )
        step = chunk_rows or max(1, len(own))
        for start in range(0, len(own), step):
            piece = slice(start, start + step)
            pair, total = (own[piece], their[piece]), int(sizes[piece].sum())
            if shared_from and total >= _SPREAD_FROM_BYTES and local_kind == peer_kind == "DRAM":
                pair = spread_runs(*pair, shared_from)
            parts.append(Part(local_kind, pair[0], peer_kind, pair[1], total))
    return parts


def _refuse_unequal(peer: Peer, local: Indices, theirs: Indices, lengths: npt.NDArray[np.int64]) -> None:
    others = peer.rows.lengths(theirs)
    differs = np.flatnonzero(lengths != others)
    if len(differs):
        at = int(differs[0])
        raise AgentError(
            "length-mismatch",
            f"local descriptor {int(local[at])} has {int(lengths[at])} bytes, its partner {int(theirs[at])} of peer "
            f"{peer.key!r} has {int(others[at])}",
            peer=peer.key,
        )


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
