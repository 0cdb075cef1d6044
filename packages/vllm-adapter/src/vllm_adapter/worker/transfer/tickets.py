"""How far a ticket is believed by what its engine says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.ports import ReadOrder
    from vllm_adapter.worker.transfer.records import PeerEngine

__all__ = ["lacks_nonce", "notices_restart", "refusal"]


def notices_restart(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a restart of the peer would be noticed: by its fence words, or by the generation that the ticket names."""
    return (engine.is_fenced and order.fence is not None) or order.peer.generation is not None


def refusal(order: ReadOrder, engine: PeerEngine) -> tuple[str, str] | None:
    """Return why a ticket must not be believed by what its engine says of itself, None if it may be."""
    if engine.is_fenced and order.fence is None:
        return "fence-missing", f"engine {engine.engine_id} has fences, but the ticket names none"
    if "prompt-digest" in engine.capabilities and not order.prompt:
        return "prompt-missing", f"engine {engine.engine_id} binds tickets to prompts, but the ticket has no digest"
    if lacks_nonce(order, engine):
        return "nonce-missing", f"engine {engine.engine_id} gives each ticket a nonce, but this one has none"
    return None


def lacks_nonce(order: ReadOrder, engine: PeerEngine) -> bool:
    """Return whether a ticket lacks the nonce that its engine gives with every ticket.

    Request ids are no secrets, so such a ticket may be made up. The producer would count a "read complete" in its name, and
    end the lease under the reader that has the real ticket.
    """
    return "nonce" in engine.capabilities and not order.nonce
