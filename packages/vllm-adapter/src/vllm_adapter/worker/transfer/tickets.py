"""Checks of a ticket against its engine's announcements, and conditions for a second attempt.

Conditions for a second attempt at a read whose peer was lost.

Both attempts share one deadline. A rank whose part has arrived is neither read nor notified again, so a second attempt is made
only where a restart of the peer would be noticed, and only while the peer keeps its pages as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.ports import ReadOrder
    from vllm_adapter.worker.transfer.parts import ReadLimits
    from vllm_adapter.worker.transfer.records import PeerEngine, Read

__all__ = ["lacks_nonce", "may_retry", "notices_restart", "refusal", "refused_retry"]


def notices_restart(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a peer's restart would be noticed: by its fence words, or by the generation in the ticket."""
    return (engine.is_fenced and order.ticket.fence is not None) or order.ticket.peer.generation is not None


def refusal(order: ReadOrder, engine: PeerEngine) -> tuple[str, str] | None:
    """Return why a ticket contradicts its engine's announcements and must be refused; None if it does not."""
    if engine.is_fenced and order.ticket.fence is None:
        return "fence-missing", f"engine {engine.engine_id} has fences, but the ticket names none"
    if "prompt-digest" in engine.capabilities and not order.ticket.prompt:
        return "prompt-missing", f"engine {engine.engine_id} binds tickets to prompts, but the ticket has no digest"
    if not engine.has_our_blocks and "prompt-digest" not in engine.capabilities and _is_placed_by_size(order):
        sizes = f"blocks of engine {engine.engine_id} hold other numbers of tokens than ours"
        return "peer-blocks-unplaced", f"{sizes}, and its ticket does not say where its block lists begin"
    if lacks_nonce(order, engine):
        return "nonce-missing", f"engine {engine.engine_id} gives each ticket a nonce, but this one has none"
    return None


def _is_placed_by_size(order: ReadOrder) -> bool:
    """Return whether a block list does not begin with the prompt's first block: such tickets do not say where it begins instead.

    Tickets of vLLM's own connector, and of version 0.1 of this one, contain only ids. The scheduler, which does not know the
    peer's block size, placed them as if it were ours.
    """
    return any(
        blocks.first_token or (blocks.null is not None and blocks.null in blocks.ids)
        for blocks in order.ticket.peer_blocks
    )


def lacks_nonce(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a ticket lacks the nonce although its engine gives every ticket one.

    Request ids are no secrets, so such a ticket may be forged. The producer would count a "read complete" in the request's name,
    and end the lease while the holder of the real ticket still reads.
    """
    return "nonce" in engine.capabilities and not order.ticket.nonce


def may_retry(read: Read, now_s: float, limits: ReadLimits) -> bool:
    """Return whether to retry a read that has ended: its peer caused the failure, and time and attempts remain."""
    if not read.code or not read.may_retry or read.attempt > limits.retries or read.engine is None:
        return False
    is_in_time = now_s < min(read.deadline_s, read.trusted_until_s)
    return is_in_time and notices_restart(read.order, read.engine)


def refused_retry(read: Read, engine: PeerEngine, now_s: float, limits: ReadLimits) -> tuple[str, str] | None:
    """Return why a second attempt cannot continue where the first one ended, as (code, message); None if it can."""
    plan = engine.plan
    if not read.attempt or plan is None:
        return None
    if now_s >= read.deadline_s:
        return "transfer-timed-out", f"the engine was met anew only after {limits.read_timeout_s:g} s"
    is_same_plan = read.done_ranks <= set(plan.producer_ranks) and bool(read.conversion) == plan.is_staged
    if not is_same_plan or not notices_restart(read.order, engine):
        return "peer-changed", "the engine that was met anew keeps its pages in another way than before"
    return None
