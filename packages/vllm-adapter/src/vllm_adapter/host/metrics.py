"""Transfer statistics under vLLM's names, so that its log line and dashboards keep working, and our own metrics.

vLLM's output loop and its start-up call these classes, so nothing in them raises: a metric that cannot be created or recorded
is logged once and left out, and the others continue.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from vllm_adapter.host.vllm import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine, init_logger
from vllm_adapter.observe import metric_tables as tables
from vllm_adapter.observe.metric_tables import FAILURE_KEYS, LIVE_KEY, PATH_KEY, SERIES_KEYS, empty_observations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig

    Data = Mapping[str, Sequence[Any]]
    Record = Callable[[Data, int], None]
    """Records an interval's data of an engine in one metric."""

__all__ = ["PromMetrics", "TransferStats"]

_logger = init_logger("vllm.vllm_adapter")


@final
@dataclass
class TransferStats(KVConnectorStats):
    """Observations of one interval: lists of numbers by key; counters are lists of ones, as vLLM's are."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Discard all observations."""
        self.data: dict[str, Any] = empty_observations()

    def is_empty(self) -> bool:
        """Return whether nothing was observed."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the observations of another interval or rank."""
        for key, values in other.data.items():
            mine: object = self.data.get(key)
            if not isinstance(mine, list):
                self.data[key] = list(_listed(values))
            else:
                self.data[key] += _listed(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's log line, under its keys in its order; fence rejections follow if there are any.

        An interval without transfers has the same keys, its averages 0. Never raises: the host's output loop calls this.
        """
        times, posts, sizes, counts = (_numbers(_listed(self.data.get(key))) for key in SERIES_KEYS)
        total_mb, seconds = sum(sizes) / 2**20, sum(times)
        figures: dict[str, int | float] = {
            "Num successful transfers": len(times),
            "Avg xfer time (ms)": round(1e3 * _mean(times), 3),
            "P90 xfer time (ms)": round(1e3 * _percentile_90(times), 3),
            "Avg post time (ms)": round(1e3 * _mean(posts), 3),
            "P90 post time (ms)": round(1e3 * _percentile_90(posts), 3),
            "Avg MB per transfer": round(total_mb / max(len(times), 1), 3),
            "Throughput (MB/s)": round(total_mb / seconds if seconds > 0 else 0, 3),
            "Avg number of descriptors": round(_mean(counts), 1),
            "Num failed transfers": sum(map(self._events, FAILURE_KEYS)),
            "Num KV expired reqs": self._events("num_kv_expired_reqs"),
            "Num notifs after expiry": self._events("num_notifications_after_expiry"),
        }
        rejections = self._events("num_fence_rejections")
        return {**figures, "Num fence rejections": rejections} if rejections else figures

    def _events(self, key: str) -> int:
        return len(_listed(self.data.get(key)))


@final
class PromMetrics(KVConnectorPromMetrics):
    """Prometheus side: histograms, counters and gauges, per engine.

    Args:
        info: Labels of the metric that names the connector; empty for none.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        info: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._label_names, self._engine_labels = labelnames, per_engine_labelvalues
        # Changes are summed wherever they arrive, so the processes of one server are summed, too. Gauges are only ever set,
        # because vLLM's wrapper under Ray offers nothing else. All gauges are set with every observation, changed or not: Ray
        # drops a gauge that was not set for 20 s.
        self._totals: defaultdict[tuple[str, int, str], float] = defaultdict(float)
        self._failed: set[str] = set()
        self._records: dict[str, Record] = {}
        for key, (name, doc, buckets) in tables.HISTOGRAMS.items():
            self._add(name, self._histogram, key, doc, buckets)
        for key, (name, doc) in tables.COUNTERS.items():
            self._add(name, self._counter, key, doc)
        for key, (name, doc) in tables.BY_CODE.items():
            self._add(name, self._counter_by_code, key, doc)
        for key, (name, doc) in tables.LEVELS.items():
            self._add(name, self._level, key, doc)
        name, doc = tables.PATHS
        self._add(name, self._bytes_by_path, doc)
        name, doc = tables.LIVE
        self._add(name, self._live_requests, doc)
        if info:
            self._add(tables.INFO[0], self._info, info)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations."""
        for name, record in self._records.items():
            with self._guarded(name):
                record(transfer_stats_data, engine_idx)

    def _add(self, name: str, make: Callable[..., Record], *arguments: object) -> None:
        with self._guarded(name):
            self._records[name] = make(name, *arguments)

    @contextmanager
    def _guarded(self, name: str) -> Generator[None]:
        try:
            yield
        except Exception:
            if name not in self._failed:
                _logger.exception("the connector's metric %s is incomplete", name)
            self._failed.add(name)

    # ---------------------------------------------------------------------------------------------- kinds

    def _histogram(self, name: str, key: str, doc: str, buckets: Sequence[float]) -> Record:
        metric = self._histogram_cls(name=name, documentation=doc, buckets=buckets, labelnames=self._label_names)
        engines = create_metric_per_engine(metric, self._engine_labels)

        def record(data: Data, engine: int) -> None:
            for value in data.get(key, ()):
                engines[engine].observe(value)

        return record

    def _counter(self, name: str, key: str, doc: str) -> Record:
        metric = self._counter_cls(name=name, documentation=doc, labelnames=self._label_names)
        engines, parts = create_metric_per_engine(metric, self._engine_labels), tables.SUMS.get(key, (key,))

        def record(data: Data, engine: int) -> None:
            total = sum(sum(data.get(part, ())) for part in parts)
            if total:
                engines[engine].inc(total)

        return record

    def _counter_by_code(self, name: str, key: str, doc: str) -> Record:
        metric = self._counter_cls(name=name, documentation=doc, labelnames=[*self._label_names, "code"])

        def record(data: Data, engine: int) -> None:
            for code in data.get(key, ()):
                metric.labels(*self._engine_labels[engine], code).inc()

        return record

    def _bytes_by_path(self, name: str, doc: str) -> Record:
        labels = [*self._label_names, "backend", "memory", "ucx_tls"]
        metric = self._counter_cls(name=name, documentation=doc, labelnames=labels)

        def record(data: Data, engine: int) -> None:
            for *path, size in data.get(PATH_KEY, ()):
                metric.labels(*self._engine_labels[engine], *path).inc(size)

        return record

    def _level(self, name: str, key: str, doc: str) -> Record:
        gauge = self._gauge_cls(name=name, documentation=doc, labelnames=self._label_names, multiprocess_mode="sum")
        engines = create_metric_per_engine(gauge, self._engine_labels)

        def record(data: Data, engine: int) -> None:
            engines[engine].set(self._total(key, engine, "", sum(data.get(key, ()))))

        return record

    def _live_requests(self, name: str, doc: str) -> Record:
        labels = [*self._label_names, "state"]
        gauge = self._gauge_cls(name=name, documentation=doc, labelnames=labels, multiprocess_mode="sum")

        def record(data: Data, engine: int) -> None:
            for by_state in data.get(LIVE_KEY, ()):
                for state, change in by_state.items():
                    self._total(LIVE_KEY, engine, state, change)
            for (key, index, state), total in self._totals.items():
                if (key, index) == (LIVE_KEY, engine):
                    gauge.labels(*self._engine_labels[engine], state).set(total)

        return record

    def _info(self, name: str, info: Mapping[str, str]) -> Record:
        labels = [*self._label_names, *info]
        gauge = self._gauge_cls(
            name=name, documentation=tables.INFO[1], labelnames=labels, multiprocess_mode="mostrecent"
        )

        def record(_data: Data, engine: int) -> None:
            gauge.labels(*self._engine_labels[engine], *info.values()).set(1)

        for engine in self._engine_labels:
            record({}, engine)
        return record

    def _total(self, key: str, engine: int, state: str, change: float) -> float:
        """Return a level after a change, e.g. 3072 for 4096 bytes in quarantine and a change of -1024."""
        self._totals[key, engine, state] += change
        return self._totals[key, engine, state]


def _listed(values: object) -> list[Any]:
    """Return observations if they are a list, else an empty list."""
    return values if isinstance(values, list) else []  # pyright: ignore[reportUnknownVariableType]


def _numbers(values: Iterable[object]) -> list[float]:
    return [value for value in values if isinstance(value, int | float)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _percentile_90(values: Sequence[float]) -> float:
    """Return the 90th percentile, interpolated between neighbours: 9.1 for the numbers 1 to 10."""
    if len(values) < 2:
        return _mean(values)
    return statistics.quantiles(values, n=10, method="inclusive")[-1]
