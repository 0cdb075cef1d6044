"""Levels that the scheduler's process reports: live requests by state, fence slots in use, blocks on lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_adapter.observe.recorder import Recorder
    from vllm_adapter.ports import SchedulerState
    from vllm_adapter.scheduler.draining import Draining

__all__ = ["Gauges"]

_COUNT_EVERY_S = 1.0
"""Interval of counting live requests, which takes a scan and is too costly for every step."""


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
            recorder.observe("live_requests", changes)
        recorder.level("fence_slots_used", self._state.fence_slots_used)
