"""Questions that an order must answer before it is accepted, and pages before they are trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._errors import AgentError

if TYPE_CHECKING:
    from ._options import AgentOptions
    from ._peers import Peer
    from ._values import PageCheck, TransferOrder

__all__ = ["admit", "differing_pages"]


def admit(order: TransferOrder, peer: Peer, options: AgentOptions, *, waiting: int, held: int) -> None:
    """Refuse an order that cannot be served now, given the transfers that wait and those of its peer in quarantine.

    Raises:
        AgentError: `queue-full`, `quarantine-full`, `bad-fence`, `bad-options`.
    """
    if waiting >= options.max_queued:
        raise AgentError("queue-full", f"{waiting} transfers wait already; let some end first")
    if held >= options.max_quarantined_per_peer:
        raise AgentError(
            "quarantine-full",
            f"{held} unfinished transfers of peer {peer.key!r} are in quarantine; it is probably stopped: replace or "
            "remove it",
            peer=peer.key,
        )
    if not order.deadline_s > 0 or order.operation not in ("read", "write"):
        raise AgentError(
            "bad-options",
            f"transfer {order.transfer_id!r} has deadline {order.deadline_s} s and operation {order.operation!r}; "
            "needed are a positive time, and read or write",
        )
    if order.fence is None:
        return
    slot, generation = order.fence
    words = 0 if peer.fence is None else peer.fence[2]
    if order.operation != "read" or not 0 <= slot < words or generation < 0:
        raise AgentError(
            "bad-fence",
            f"transfer {order.transfer_id!r} names fence slot {slot}, peer {peer.key!r} has {words} words, and only "
            "reads are fenced",
            peer=peer.key,
        )


def differing_pages(check: PageCheck) -> str:
    """Run a page check; returns what differs in words, empty if nothing does. An inability to check is a difference."""
    try:
        differing = check()
    except Exception as error:  # noqa: BLE001 - the caller's code
        return f"the page check raised {type(error).__name__}: {error}"
    if not differing:
        return ""
    return f"{len(differing)} pages differ from the producer's: " + "; ".join(differing[:4])
