"""Notes of a step for the checks and the faults: which blocks are read into, which chunks a prompt has come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import Engine
    from fleet import Fleet
    from holdings import Work
    from request import Request

__all__ = ["note_chunks", "note_computed", "note_orders"]


def note_orders(engine: Engine, requests: Mapping[str, Request], plan: Any) -> None:
    """Take in the fences and the reads of a step's plan."""
    for order in plan.fences:
        request = requests.get(order.request_id)
        if request is not None:
            request.fence = (order.slot, order.generation)
    for order in plan.reads:
        request = requests.get(order.request_id)
        if request is not None:
            request.is_streamed = False
            engine.checks.ordered(request, [list(blocks.ids) for blocks in order.local_blocks])
    for opening in plan.streams.opens:
        request = requests.get(opening.request_id)
        if request is not None:
            engine.checks.slot_opened(request, opening.slot)
            request.fence = (opening.slot, opening.generation)
    for stream in plan.streams.watches:
        request = requests.get(stream.read.request_id)
        if request is not None:
            request.is_streamed = True
            engine.checks.ordered(request, [list(blocks.ids) for blocks in stream.read.local_blocks])


def note_chunks(fleet: Fleet, work: Sequence[Work]) -> None:
    """Tell the fleet of chunks of prompts that are scheduled; number 0 is the last one of a prompt."""
    for item in work:
        request, chunk = item.request, item.chunk
        if request.hand_over_id and chunk.computed_tokens < request.prompt_tokens:
            request.chunks += 1
            fleet.reached(request.request_id, request.chunks)
            if chunk.computed_tokens + chunk.new_tokens >= request.prompt_tokens:
                fleet.reached(request.request_id, 0)


def note_computed(fleet: Fleet, work: Sequence[Work]) -> None:
    """Note prompts whose last chunk has been computed."""
    for item in work:
        request = item.request
        if request.hand_over_id and item.chunk.computed_tokens + len(item.ids) >= request.prompt_tokens:
            fleet.whole.add(request.hand_over_id)
