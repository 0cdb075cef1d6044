"""Transfer statistics under vLLM's names, so that its log line and dashboards keep working, and our own metrics.

vLLM's output loop and its start-up call these classes, so nothing in them raises: a metric that cannot be created or recorded
is logged once and left out, and the others continue.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast, final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_adapter.observe.metric_tables import FAILURE_KEYS, INFO, METRICS, SERIES_KEYS, empty_observations

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig

    from vllm_adapter.observe.metric_tables import Metric

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
        self._failed: set[str] = set()
        self._records: dict[str, Record] = {}
        kinds = {"histogram": self._histogram, "counter": self._counter, "gauge": self._gauge}
        for metric in METRICS:
            with self._guarded(metric.name):
                self._records[metric.name] = kinds[metric.kind](metric)
        if info:
            with self._guarded(INFO[0]):
                self._records[INFO[0]] = self._info(*INFO, info)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations."""
        for name, record in self._records.items():
            with self._guarded(name):
                record(transfer_stats_data, engine_idx)

    @contextmanager
    def _guarded(self, name: str) -> Generator[None]:
        try:
            yield
        except Exception:
            if name not in self._failed:
                _logger.exception("the connector's metric %s is incomplete", name)
            self._failed.add(name)

    # ---------------------------------------------------------------------------------------------- kinds

    def _histogram(self, metric: Metric) -> Record:
        made = self._histogram_cls(
            name=metric.name, documentation=metric.help, buckets=metric.buckets, labelnames=self._label_names
        )
        engines = create_metric_per_engine(made, self._engine_labels)

        def record(data: Data, engine: int) -> None:
            for value in data.get(metric.key, ()):
                engines[engine].observe(value)

        return record

    def _counter(self, metric: Metric) -> Record:
        names = [*self._label_names, *metric.labels]
        made = self._counter_cls(name=metric.name, documentation=metric.help, labelnames=names)
        engines = {} if metric.labels else create_metric_per_engine(made, self._engine_labels)
        parts = FAILURE_KEYS if metric.key == "num_failed_transfers" else (metric.key,)

        def record(data: Data, engine: int) -> None:
            for labels, amount in _sums(data, parts).items():
                child = made.labels(*self._engine_labels[engine], *labels) if labels else engines[engine]
                child.inc(amount)

        return record

    def _gauge(self, metric: Metric) -> Record:
        """Return what adds changes up: they are summed wherever they arrive, so the processes of one server are summed, too.

        Gauges are only ever set, because vLLM's wrapper under Ray offers nothing else, and with every observation, changed or
        not: Ray drops a gauge that was not set for 20 s.
        """
        names = [*self._label_names, *metric.labels]
        made = self._gauge_cls(name=metric.name, documentation=metric.help, labelnames=names, multiprocess_mode="sum")
        engines = {} if metric.labels else create_metric_per_engine(made, self._engine_labels)
        totals: defaultdict[int, defaultdict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        for engine in engines:
            totals[engine][()] = 0.0

        def record(data: Data, engine: int) -> None:
            for labels, change in _sums(data, (metric.key,)).items():
                totals[engine][labels] += change
            for labels, level in totals[engine].items():
                child = made.labels(*self._engine_labels[engine], *labels) if labels else engines[engine]
                child.set(level)

        return record

    def _info(self, name: str, text: str, info: Mapping[str, str]) -> Record:
        labels = [*self._label_names, *info]
        gauge = self._gauge_cls(name=name, documentation=text, labelnames=labels, multiprocess_mode="mostrecent")

        def record(_data: Data, engine: int) -> None:
            gauge.labels(*self._engine_labels[engine], *info.values()).set(1)

        for engine in self._engine_labels:
            record({}, engine)
        return record


def _sums(data: Data, keys: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Return the sums of observations by the values of their labels; the kinds are those of `metric_tables`.

    Example: `["timed-out", "timed-out", "peer-silent"]` gives `{("timed-out",): 2, ("peer-silent",): 1}`.
    """
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for value in (value for key in keys for value in data.get(key, ())):
        if isinstance(value, dict):
            for label, amount in cast("dict[str, float]", value).items():
                sums[label,] += amount
        elif isinstance(value, list):
            *labels, amount = cast("Sequence[Any]", value)
            sums[tuple(map(str, labels))] += amount
        elif isinstance(value, str):
            sums[value,] += 1
        else:
            sums[()] += value
    return sums


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
