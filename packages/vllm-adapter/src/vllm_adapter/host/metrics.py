"""Transfer statistics under vLLM's names, so that its log line and dashboards keep working, and ours beside them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.host.vllm import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine, init_logger
from vllm_adapter.observe.recorder import FAILURE_KEYS, PATH_KEY, SERIES_KEYS, empty_observations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import Counter, Gauge, Histogram
    from vllm.config import VllmConfig

__all__ = ["PromMetrics", "TransferStats"]

_logger = init_logger("vllm.vllm_adapter")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0)
"""A lease of 30 s ends at a lag of 15 s."""
_HISTOGRAMS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "transfer_duration": ("vllm:nixl_xfer_time_seconds", "Seconds on the wire per read.", _SECONDS),
    "post_duration": ("vllm:nixl_post_time_seconds", "Seconds to post a read.", (0.001, *_SECONDS)),
    "bytes_transferred": (
        "vllm:nixl_bytes_transferred",
        "Bytes per read.",
        tuple(float(2**n) for n in range(11, 34, 2)),
    ),
    "num_descriptors": (
        "vllm:nixl_num_descriptors",
        "Descriptors per read, after merging.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4),
    ),
    "queue_duration": ("vllm:kv_transfer_queue_seconds", "Seconds that a read waited before it was posted.", _SECONDS),
    "fence_duration": (
        "vllm:kv_transfer_fence_seconds",
        "Seconds to verify the fence after a read.",
        (0.0001, *_SECONDS),
    ),
    "handshake_duration": ("vllm:kv_transfer_handshake_seconds", "Seconds per handshake with an engine.", _SECONDS),
    "heartbeat_lag": (
        "vllm:kv_transfer_heartbeat_lag_seconds",
        "Prefill side, per heartbeat and expired lease: seconds of silence beyond the heartbeat interval.",
        _LATENESS,
    ),
    "heartbeat_delay": (
        "vllm:kv_transfer_heartbeat_delay_seconds",
        "Decode side, per step with heartbeats: seconds that the most overdue one had been due.",
        _LATENESS,
    ),
    "mirror_save_duration": (
        "vllm:kv_transfer_mirror_save_seconds",
        "Seconds of the engine thread, per step, to copy computed blocks to the mirror or wait for that (host-buffer mode).",
        (0.0001, 0.001, *_SECONDS),
    ),
    "mirror_restore_duration": (
        "vllm:kv_transfer_mirror_restore_seconds",
        "Seconds of the engine thread to copy a read's blocks from the mirror (host-buffer mode).",
        (0.0001, 0.001, *_SECONDS),
    ),
    "conversion_duration": (
        "vllm:kv_transfer_conversion_seconds",
        "Seconds of the engine thread to put a read's pages in order (to queue that, on a device with streams).",
        (0.0001, 0.001, *_SECONDS),
    ),
}
"""Key of the data -> (Prometheus name, help, bucket bounds). Source of the `vllm:nixl_*` bounds: vLLM's dashboards."""

_COUNTERS: dict[str, tuple[str, str]] = {
    "num_failed_transfers": ("vllm:nixl_num_failed_transfers", "Reads that failed."),
    "num_failed_notifications": ("vllm:nixl_num_failed_notifications", "Notifications that could not be sent."),
    "num_kv_expired_reqs": ("vllm:nixl_num_kv_expired_reqs", "Requests whose lease ended unread."),
    "num_notifications_after_expiry": (
        "vllm:nixl_num_notifications_after_expiry",
        "Completions that came after their lease had ended.",
    ),
    "num_failed_handshakes": ("vllm:kv_transfer_num_failed_handshakes", "Handshakes that failed or were refused."),
    "num_failed_conversions": (
        "vllm:kv_transfer_num_failed_conversions",
        "Reads whose pages could not be put in order.",
    ),
    "num_failed_mirror_copies": (
        "vllm:kv_transfer_num_failed_mirror_copies",
        "Requests whose blocks could not be copied between the device and its mirror (host-buffer mode).",
    ),
    "num_fence_rejections": ("vllm:kv_transfer_num_fence_rejections", "Reads voided because the lease had ended."),
    "num_quarantined_reads": ("vllm:kv_transfer_num_quarantined_reads", "Reads whose pages had to be quarantined."),
    "num_stalled_reads": ("vllm:kv_transfer_num_stalled_reads", "Reads on the wire of which no part ended for 5 s."),
    "num_retried_reads": (
        "vllm:kv_transfer_num_retried_reads",
        "Reads made once more after their peer was lost and met anew.",
    ),
    "num_dropped_engines": (
        "vllm:kv_transfer_num_dropped_engines",
        "Peer engines that were dropped because of a failed read or silence.",
    ),
    "num_callback_errors": (
        "vllm:kv_transfer_num_callback_errors",
        "Unexpected exceptions on the transfer thread; each failed its own order only.",
    ),
    "num_refused_notifications": ("vllm:kv_transfer_num_refused_notifications", "Notifications that made no sense."),
    "num_lease_renewals": ("vllm:kv_transfer_num_lease_renewals", "Leases renewed by heartbeats."),
    "num_unsent_heartbeats": (
        "vllm:kv_transfer_num_unsent_heartbeats",
        "Heartbeats not sent because the handshake with their engine had not ended.",
    ),
}


_BY_CODE: dict[str, tuple[str, str]] = {
    "read_failure_codes": ("vllm:kv_transfer_num_failed_reads", "Requests whose KV was not taken over, by reason."),
    "ticket_refusal_codes": ("vllm:kv_transfer_num_refused_tickets", "Tickets that were refused, by reason."),
}
_LEVELS: dict[str, tuple[str, str]] = {
    "quarantined_bytes": (
        "vllm:kv_transfer_quarantined_bytes",
        "Bytes of pages that a failed read might still write into.",
    ),
    "stuck_threads": (
        "vllm:kv_transfer_stuck_threads",
        "Ranks whose transfer thread is stuck in one turn.",
    ),
    "fence_slots_used": (
        "vllm:kv_transfer_fence_slots_used",
        "Fence slots in use; with all of fence_slots in use nothing is handed over.",
    ),
    "leased_blocks": (
        "vllm:kv_transfer_leased_blocks",
        "Blocks that finished requests keep for a reader; a block that two of them share counts twice.",
    ),
    "leased_bytes": (
        "vllm:kv_transfer_leased_bytes",
        "Bytes of these blocks on each rank.",
    ),
}
"""Key of the data (changes of a level) -> (Prometheus name, help)."""
_PATHS = (
    "vllm:kv_transfer_read_bytes",
    "Bytes read, by NIXL backend, memory (peer's->ours) and, for UCX, the transports that it may choose from.",
)
_LIVE = ("vllm:kv_transfer_live_requests", "Requests with a hand-over, by its state.")


@final
@dataclass
class TransferStats(KVConnectorStats):
    """Observations of one interval: lists of numbers by key; counters are lists of ones, as vLLM's are."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = empty_observations()

    def is_empty(self) -> bool:
        """Tell whether nothing was observed."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval's or rank's observations to these."""
        for key, values in other.data.items():
            self.data.setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's log line."""
        times, posts, sizes = (self.data[key] for key in SERIES_KEYS[:3])
        failed = sum(len(self.data[key]) for key in FAILURE_KEYS)
        failures: dict[str, int | float] = {
            "Num failed transfers": failed,
            "Num KV expired requests": len(self.data["num_kv_expired_reqs"]),
            "Num fence rejections": len(self.data["num_fence_rejections"]),
        }
        if not times:
            return {"Num successful transfers": 0, **failures}
        total_mb = sum(sizes) / 2**20
        return {
            "Num successful transfers": len(times),
            "Avg xfer time (ms)": round(1e3 * statistics.fmean(times), 3),
            "P90 xfer time (ms)": round(1e3 * _percentile_90(times), 3),
            "Avg post time (ms)": round(1e3 * statistics.fmean(posts), 3),
            "P90 post time (ms)": round(1e3 * _percentile_90(posts), 3),
            "Avg MB per transfer": round(total_mb / len(times), 3),
            "Throughput (MB/s)": round(total_mb / max(sum(times), 1e-9), 3),
            "Avg number of descriptors": round(statistics.fmean(self.data["num_descriptors"]), 1),
            **failures,
        }


@final
class PromMetrics(KVConnectorPromMetrics):
    """The Prometheus side: histograms and counters, per engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._histograms: dict[str, dict[int, Histogram]] = {}
        self._counters: dict[str, dict[int, Counter]] = {}
        for key, (name, doc, buckets) in _HISTOGRAMS.items():
            metric = self._histogram_cls(name=name, documentation=doc, buckets=buckets, labelnames=labelnames)
            self._histograms[key] = create_metric_per_engine(metric, per_engine_labelvalues)
        for key, (name, doc) in _COUNTERS.items():
            metric = self._counter_cls(name=name, documentation=doc, labelnames=labelnames)
            self._counters[key] = create_metric_per_engine(metric, per_engine_labelvalues)
        self._engine_labels = per_engine_labelvalues
        self._by_code: dict[str, Counter] = {
            key: self._counter_cls(name=name, documentation=doc, labelnames=[*labelnames, "code"])
            for key, (name, doc) in _BY_CODE.items()
        }
        # Changes are added up wherever they arrive, so the processes of one server add up, too. Gauges are only ever set:
        # the wrapper that vLLM uses under Ray has nothing else.
        self._totals: defaultdict[tuple[str, int, str], float] = defaultdict(float)
        self._levels: dict[str, dict[int, Gauge]] = {}
        for key, (name, doc) in _LEVELS.items():
            gauge = self._gauge_cls(name=name, documentation=doc, labelnames=labelnames, multiprocess_mode="sum")
            self._levels[key] = create_metric_per_engine(gauge, per_engine_labelvalues)
        self._has_failed = False
        name, doc = _PATHS
        self._paths: Counter = self._counter_cls(
            name=name, documentation=doc, labelnames=[*labelnames, "backend", "memory", "ucx_tls"]
        )
        name, doc = _LIVE
        self._live: Gauge = self._gauge_cls(
            name=name, documentation=doc, labelnames=[*labelnames, "state"], multiprocess_mode="sum"
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations; never raises, because the host's output loop calls it."""
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception:
            if not self._has_failed:
                _logger.exception("the connector's metrics are incomplete: an observation could not be recorded")
            self._has_failed = True

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histogram[engine_idx].observe(value)
        for key, counter in self._counters.items():
            values = transfer_stats_data.get(key, ())
            if values:
                counter[engine_idx].inc(sum(values))
        self._observe_labelled(transfer_stats_data, engine_idx)

    def _observe_labelled(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        labels = self._engine_labels[engine_idx]
        for key, by_code in self._by_code.items():
            for code in transfer_stats_data.get(key, ()):
                by_code.labels(*labels, code).inc()
        for *path, size in transfer_stats_data.get(PATH_KEY, ()):
            self._paths.labels(*labels, *path).inc(size)
        for key, gauges in self._levels.items():
            changes = transfer_stats_data.get(key, ())
            if changes:
                gauges[engine_idx].set(self._total(key, engine_idx, "", sum(changes)))
        for by_state in transfer_stats_data.get("live_requests", ()):
            for state, change in by_state.items():
                self._live.labels(*labels, state).set(self._total("live_requests", engine_idx, state, change))

    def _total(self, key: str, engine_idx: int, state: str, change: float) -> float:
        """Return a level after a change, e.g. 4096 bytes in quarantine, then a change of -1024: 3072."""
        self._totals[key, engine_idx, state] += change
        return self._totals[key, engine_idx, state]


def _percentile_90(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]
