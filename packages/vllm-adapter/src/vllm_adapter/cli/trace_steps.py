"""Steps between a prompt's arrival and its first token, in the order in which the first token waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_adapter.cli.joining import HandOver

__all__ = ["Step", "steps_of"]

Step = tuple[str, str, str]
"""(process, stage at which the span ends, name)."""
_COMPUTED: tuple[Step, ...] = (
    ("prefill", "arrived", "tokenize, pass on to the scheduler"),
    ("prefill", "scheduled", "wait in the queue"),
    ("prefill", "answered", "compute the prompt, write the ticket"),
)
_ADMITTED: tuple[Step, ...] = (
    ("decode", "entered", "router and HTTP"),
    ("decode", "arrived", "tokenize, pass on to the scheduler"),
)
_POSTED: tuple[Step, ...] = (
    ("rank", "ordered", "order to the rank"),
    ("rank", "told", "handshake (first contact)"),
    ("rank", "planned", "plan, prepare lists (first contact)"),
    ("rank", "posted", "number the blocks"),
)
_READ: tuple[Step, ...] = (("rank", "started", "wait for a place on the wire"), ("rank", "data", "read"))
_TAKEN: tuple[Step, ...] = (
    ("rank", "fence", "check the fence"),
    ("rank", "taken", "wait for the engine's step"),
    ("rank", "completed", "put pages in order"),
    ("decode", "reported", "report to the scheduler"),
    ("decode", "scheduled", "wait for a step"),
    ("decode", "first_token", "first decode step"),
)
_PLAIN = (*_COMPUTED, *_ADMITTED, ("decode", "allocated", "wait for blocks"), *_POSTED, *_READ, *_TAKEN)
"""The decode engine was asked when the prefill engine had answered."""
_EARLY = (*_COMPUTED, ("decode", "allocated", "wait for the ticket, and for blocks"), *_POSTED, *_READ, *_TAKEN)
"""Both engines were asked at once, but nothing was read before the prompt was finished."""
_LAST_BLOCKS: Step = ("rank", "data", "read the last blocks")
_STREAMED = (
    *_COMPUTED[:2],
    ("rank", "whole", "compute the prompt, which is read meanwhile"),
    _LAST_BLOCKS,
    *_TAKEN,
)
"""Both engines were asked at once, and the decode engine read while the prefill engine computed."""
_STREAMED_ALONE = (
    _ADMITTED[1],
    ("decode", "allocated", "wait for the offer, and for blocks"),
    *_POSTED[:3],
    ("rank", "posted", "wait for the first blocks"),
    ("rank", "whole", "read while the prompt is computed"),
    _LAST_BLOCKS,
    *_TAKEN,
)
"""The same where the prefill engine was not asked, or has forgotten it."""


def steps_of(hand_over: HandOver, *, was_finished: bool) -> tuple[Step, ...]:
    """Return the steps for which the first token waited, in order.

    A streamed prompt is read beside its computation, so the wait for blocks and the first reads delay nothing. They do where the
    prompt was finished first.

    Args:
        hand_over: The hand-over.
        was_finished: Whether the prefill engine had answered before the first block was read.
    """
    if not hand_over.is_early:
        return _PLAIN
    if not hand_over.is_streamed or was_finished:
        return _EARLY
    return _STREAMED if hand_over.prefill is not None else _STREAMED_ALONE
