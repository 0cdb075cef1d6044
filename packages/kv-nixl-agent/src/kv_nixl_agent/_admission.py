"""Checks that an order must pass before it is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import AgentError

if TYPE_CHECKING:
    from ._options import AgentOptions
    from ._peer import Peer
    from ._values import TransferOrder

__all__ = ["admit"]


def admit(order: TransferOrder, peer: Peer, options: AgentOptions, *, waiting: int, held: int) -> None:
    """Refuse an order that cannot be served now; `waiting` counts queued transfers, `held` those of its peer in quarantine.

    Raises:
        AgentError: `queue-full`, `quarantine-full`, `bad-fence`, `bad-options`.
    """
    if waiting >= options.max_queued:
        raise AgentError("queue-full", f"{waiting} transfers wait already; let some end first")
    if held >= options.max_quarantined_per_peer:
        raise AgentError(
            "quarantine-full",
            f"{held} unfinished transfers of peer {peer.key!r}, or of a former peer under its key, are in quarantine; a "
            "process of it is probably stopped: wait until they end",
            peer=peer.key,
        )
    if not order.deadline_s > 0 or order.operation not in ("read", "probe"):
        raise AgentError(
            "bad-options",
            f"transfer {order.transfer_id!r} has deadline {order.deadline_s} s and operation {order.operation!r}; "
            "needed are a positive time, and read or probe",
        )
    if order.operation == "probe":
        _admit_probe(order, peer)
    if order.fence is not None:
        _admit_fence(order, order.fence, peer)


def _admit_probe(order: TransferOrder, peer: Peer) -> None:
    if len(order.local_indices) or len(order.peer_indices):
        raise AgentError("bad-options", f"probe {order.transfer_id!r} names pages; it reads one word of its own choice")
    if peer.fence is None and not peer.rows.count:
        raise AgentError("bad-rows", f"peer {peer.key!r} has neither rows nor a fence: nothing of it can be probed")


def _admit_fence(order: TransferOrder, fence: tuple[int, int], peer: Peer) -> None:
    slot, generation = fence
    words = 0 if peer.fence is None else peer.fence[2]
    if order.operation == "probe" or not 0 <= slot < words or generation < 0:
        raise AgentError(
            "bad-fence",
            f"transfer {order.transfer_id!r} names fence slot {slot}, peer {peer.key!r} has {words} words, and only "
            "reads are fenced",
            peer=peer.key,
        )
