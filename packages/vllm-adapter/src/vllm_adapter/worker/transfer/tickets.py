"""How far a ticket is believed by what its engine says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.ports import ReadOrder
    from vllm_adapter.worker.transfer.records import PeerEngine

__all__ = ["is_a_strangers", "knows_another_life", "refusal"]


def knows_another_life(order: ReadOrder, engine: PeerEngine) -> bool:
    """Tell whether a restarted peer would be noticed: by its fence words, or by the generation that the ticket names."""
    return (engine.is_fenced and order.fence is not None) or order.peer.generation is not None


def refusal(order: ReadOrder, engine: PeerEngine) -> tuple[str, str] | None:
    """Return why a ticket must not be believed by what its engine says of itself, None if it may be."""
    if engine.is_fenced and order.fence is None:
        return "fence-missing", f"engine {engine.engine_id} has fences, but the ticket names none"
    if "prompt-digest" in engine.capabilities and not order.prompt:
        return "prompt-missing", f"engine {engine.engine_id} binds tickets to prompts, but the ticket has no digest"
    if is_a_strangers(order, engine):
        return "nonce-missing", f"engine {engine.engine_id} gives each ticket a nonce, but this one has none"
    return None


def is_a_strangers(order: ReadOrder, engine: PeerEngine) -> bool:
    """Tell whether a ticket lacks the nonce that its engine gives: request ids are no secrets, and an end would be counted.

    Such an end would close the hand-over of whoever has that request's real ticket.
    """
    return "nonce" in engine.capabilities and not order.nonce
