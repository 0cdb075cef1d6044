"""Current state of the scheduler's side as plain values, for `vllm-adapter status`. Callable on any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.tickets import Draining

__all__ = ["MOST_REQUESTS", "scheduler_status"]

MOST_REQUESTS = 50
"""Most requests that are described, oldest first; all requests are counted."""
_TRIES = 3


def scheduler_status(
    facts: EngineFacts, state: SchedulerState, draining: Draining, *, served_ranks: int, now_s: float
) -> dict[str, object]:
    """Return counts, leases and the oldest requests of a live engine, without changing anything.

    The request machines keep running on another thread, so figures that belong together may be a step apart.
    """
    return {
        "part": "scheduler",
        "engine_id": facts.engine_id,
        "side_channel": f"{facts.host}:{facts.port}",
        "served_ranks": served_ranks,
        "is_draining": state.is_draining,
        "leases": state.lease_count,
        "leased_blocks": draining.leased_blocks,
        "leased_bytes": draining.leased_bytes,
        "fence_slots_used": state.fence_slots_used,
        "stream_slots_used": state.stream_slots_used,
        "stream_blocks_held": state.stream_blocks_held,
        **_requests(state, now_s),
    }


def _requests(state: SchedulerState, now_s: float) -> dict[str, object]:
    for left in reversed(range(_TRIES)):
        try:
            counts = dict(state.state_counts())
            oldest = [_brief(entry) for entry in state.snapshot(now_s=now_s, most=MOST_REQUESTS)]
        except (RuntimeError, LookupError):  # a table changed during iteration: try again
            if not left:
                raise
            continue
        return {"requests_by_state": counts, "oldest_requests": oldest}
    return {}


def _brief(entry: Mapping[str, object]) -> dict[str, object]:
    """Return an operator's view of a request, without fences and nonces, which could be used to end a lease."""
    names = ("request_id", "role", "state", "age_s", "prompt_tokens", "waits_for", "rejected_code")
    brief = {name: entry[name] for name in names if entry.get(name) not in (None, "")}
    consumer = entry.get("consumer")
    if isinstance(consumer, dict):
        brief["peer_engine_id"] = consumer["peer_engine_id"]
    return brief
