"""Counters and a rolling summary of the last transfers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

import numpy as np

from kv_nixl_agent.values import TraceEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kv_nixl_agent.values import TransferOrder, TransferResult

__all__ = ["Snapshot", "Statistics", "Tracer"]

_COUNTERS: Final = (
    "transfers_done",
    "transfers_failed",
    "transfers_fence_rejected",
    "transfers_timed_out",
    "transfers_cancelled",
    "bytes_moved",
    "descriptors",
    "descriptors_merged",
    "notifications_sent",
    "notifications_failed",
    "notifications_received",
    "fence_checks",
    "warm_ups_done",
    "warm_ups_failed",
    "quarantined_total",
    "stalls_total",
    "quiet_total",
    "release_failures",
    "notification_poll_errors",
    "trace_errors",
    "stream_looks",
    "stream_changes",
    "stream_tables",
    "stream_tables_early",
    "streams_broken",
)
_TIMES: Final = ("queue_s", "post_s", "wire_s", "fence_s")
_WINDOW: Final = 1024


@final
class Statistics:
    """Counts since the start, and times of the last 1024 completed transfers."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self._recent: deque[tuple[float, ...]] = deque(maxlen=_WINDOW)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        self._counts[name] += amount

    def ended(self, result: TransferResult) -> None:
        """Record a result."""
        self._counts["transfers_" + result.outcome.replace("-", "_")] += 1
        if result.outcome != "done":
            return
        self._counts["bytes_moved"] += result.bytes_moved
        self._counts["descriptors"] += result.descriptor_count
        self._counts["descriptors_merged"] += result.merged_count
        times = (result.queue_s, result.post_s, result.wire_s, result.fence_s)
        self._recent.append((*times, float(result.bytes_moved)))

    def snapshot(self, gauges: Mapping[str, float]) -> Snapshot:
        """Return the counts and times so far, together with gauges."""
        return Snapshot({**self._counts, **gauges}, tuple(self._recent))


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts and times at one moment. Taking it costs microseconds; evaluating it costs its reader milliseconds."""

    levels: Mapping[str, float]
    recent: tuple[tuple[float, ...], ...] = ()

    def summary(self) -> Mapping[str, float]:
        """Return the counters and gauges, and median and 99th percentile of the recent times in seconds."""
        result: dict[str, float] = {name: float(value) for name, value in self.levels.items()}
        result["recent_count"] = float(len(self.recent))
        if not self.recent:
            return result
        recent = np.array(self.recent)
        middle, late = np.percentile(recent[:, : len(_TIMES)], (50, 99), axis=0).tolist()
        for name, p50, p99 in zip(_TIMES, middle, late, strict=True):
            result[f"recent_{name}_p50"] = p50
            result[f"recent_{name}_p99"] = p99
        busy_s = float(recent[:, 1:3].sum())
        result["recent_bytes_per_s"] = float(recent[:, 4].sum()) / busy_s if busy_s > 0 else 0.0
        return result


@final
class Tracer:
    """Reports every state change to a hook; costs one comparison when there is none."""

    __slots__ = ("_clock", "_hook", "_statistics")

    def __init__(
        self, hook: Callable[[TraceEvent], object] | None, statistics: Statistics, clock: Callable[[], float]
    ) -> None:
        self._hook = hook
        self._statistics = statistics
        self._clock = clock

    def __call__(self, order: TransferOrder, state: str, detail: str = "") -> None:
        """Report that the transfer of `order` has reached `state`."""
        if self._hook is None:
            return
        try:
            self._hook(TraceEvent(self._clock(), order.transfer_id, order.peer, state, detail))
        except Exception:  # noqa: BLE001 - the caller's hook must not stop a transfer half-way
            self._statistics.count("trace_errors")
