"""Current state of the scheduler's side: for `vllm-adapter status`, on any thread, and as levels for the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from vllm_adapter.observe.metric_tables import LIVE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.cache.facts import EngineFacts
    from vllm_adapter.observe.answers import Answer, Entry
    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.tickets import Draining

__all__ = ["MOST_REQUESTS", "Gauges", "scheduler_status"]

MOST_REQUESTS = 50
"""Most requests that are described, oldest first; all requests are counted."""
_TRIES = 3
_COUNT_EVERY_S = 1.0
"""Interval of counting live requests, which takes a scan and is too costly for every step."""


def scheduler_status(
    facts: EngineFacts, state: SchedulerState, draining: Draining, *, served_ranks: int, now_s: float
) -> Answer:
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
        "stream_slots_used": 0 if state.streams is None else state.streams.produced.slots_used,
        "stream_blocks_held": 0 if state.streams is None else state.streams.consumed.blocks_held,
        **_requests(state, now_s),
    }


def _requests(state: SchedulerState, now_s: float) -> Answer:
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


def _brief(entry: Mapping[str, object]) -> Entry:
    """Return an operator's view of a request, without fences and nonces, which could be used to end a lease."""
    names = ("request_id", "role", "state", "age_s", "prompt_tokens", "waits_for", "rejected_code")
    brief = cast("Entry", {name: entry[name] for name in names if entry.get(name) not in (None, "")})
    consumer = entry.get("consumer")
    if isinstance(consumer, dict):
        brief["peer_engine_id"] = consumer["peer_engine_id"]
    return brief


@final
class Gauges:
    """Records current levels.

    Live requests are recorded by state, as the change since the previous count. Example: 3 requests wait and 1 is being read,
    then 2 wait and 2 are being read: the changes are -1 and +1.
    """

    def __init__(self, state: SchedulerState, draining: Draining) -> None:
        self._state = state
        self._draining = draining
        self._counted: Mapping[str, int] = {}
        self._counted_s = -_COUNT_EVERY_S

    def record(self, recorder: Recorder, now_s: float) -> None:
        """Record all levels; those that need a scan at most once a second."""
        if now_s - self._counted_s >= _COUNT_EVERY_S:
            self._scan(recorder, now_s)
        recorder.level("leased_blocks", self._draining.leased_blocks)
        recorder.level("leased_bytes", self._draining.leased_bytes)

    def _scan(self, recorder: Recorder, now_s: float) -> None:
        self._counted_s, before, counts = now_s, self._counted, self._state.state_counts()
        self._counted = counts
        changes = {state: counts.get(state, 0) - before.get(state, 0) for state in {*before, *counts}}
        if any(changes.values()):
            recorder.observe(LIVE_KEY, changes)
        recorder.level("fence_slots_used", self._state.fence_slots_used)
