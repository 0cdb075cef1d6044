"""Transfer statistics under vLLM's names, so that its log line and dashboards keep working, and our own metrics.

vLLM's output loop and its start-up call these classes, so nothing in them raises: a metric that cannot be created or recorded
is logged once and left out, and the others continue.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any, cast, final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger

from vllm_adapter.codes import codes_of
from vllm_adapter.observe.metric_tables import CONSTANTS, FAILURE_KEYS, INFO, METRICS, SERIES_KEYS, empty_observations

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig

    from vllm_adapter.observe.metric_tables import Metric

    Data = Mapping[str, Sequence[Any]]

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
            self.data[key] = [*_listed(self.data.get(key)), *_listed(values)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's log line, under its keys in its order; fence rejections follow if there are any.

        An interval without transfers has the same keys, its averages 0. Never raises: the host's output loop calls this.
        """
        times, posts, sizes, counts = (_numbers(_listed(self.data.get(key))) for key in SERIES_KEYS)
        total_mb, seconds = sum(sizes) / 2**20, sum(times)
        figures: dict[str, int | float] = {
            "Num successful transfers": len(times),
            "Avg xfer time (ms)": round(1e3 * fmean(times or [0.0]), 3),
            "P90 xfer time (ms)": round(1e3 * _percentile_90(times), 3),
            "Avg post time (ms)": round(1e3 * fmean(posts or [0.0]), 3),
            "P90 post time (ms)": round(1e3 * _percentile_90(posts), 3),
            "Avg MB per transfer": round(total_mb / max(len(times), 1), 3),
            "Throughput (MB/s)": round(total_mb / seconds if seconds > 0 else 0, 3),
            "Avg number of descriptors": round(fmean(counts or [0.0]), 1),
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
        info: Labels of the metric that names the connector, by engine; empty for none.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        info: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._label_names, self._engine_labels = labelnames, per_engine_labelvalues
        self._failed: set[str] = set()
        # vLLM types its wrappers of metrics as the classes of prometheus_client, and Ray's have fewer methods.
        self._made: dict[Metric, Any] = {}
        self._levels: defaultdict[tuple[str, int], defaultdict[tuple[str, ...], float]]
        self._levels = defaultdict(lambda: defaultdict(float))
        about = [INFO._replace(labels=tuple(next(iter(info.values()))))] if info else []
        for metric in (*METRICS, *about):
            with self._guarded(metric.name):
                self._made[metric] = self._make(metric)
        for engine, labels in (info or {}).items():
            levels = {key: [float(labels[label])] for key, label in CONSTANTS.items() if label in labels}
            self.observe({INFO.key: [[*labels.values(), 1.0]], **levels}, engine)

    def _make(self, metric: Metric) -> Any:  # noqa: ANN401 - see `_made`
        names = [*self._label_names, *metric.labels]
        about = {"name": metric.name, "documentation": metric.help, "labelnames": names}
        made: Any
        if metric.kind == "histogram":
            made = self._histogram_cls(**about, buckets=metric.buckets)
        elif metric.kind == "counter":
            made = self._counter_cls(**about)
        else:  # changes are summed wherever they arrive, so the processes of one server are summed, too
            made = self._gauge_cls(
                **about, multiprocess_mode="mostrecent" if metric.key in {INFO.key, *CONSTANTS} else "sum"
            )
        children = [(code,) for code in codes_of(metric.key)] if metric.labels else [()]
        for values in self._engine_labels.values():
            for labels in children:
                made.labels(*values, *labels)  # a scrape shows it from the start
        return made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval's observations."""
        for metric, made in self._made.items():
            with self._guarded(metric.name):
                self._record(metric, made, transfer_stats_data, engine_idx)

    def _record(self, metric: Metric, made: Any, data: Data, engine: int) -> None:  # noqa: ANN401 - see `_made`
        values = self._engine_labels[engine]
        if metric.kind == "histogram":
            for value in data.get(metric.key, ()):
                made.labels(*values).observe(value)
        elif metric.kind == "counter":
            parts = FAILURE_KEYS if metric.key == "num_failed_transfers" else (metric.key,)
            for labels, amount in _sums(data, parts).items():
                made.labels(*values, *labels).inc(amount)
        else:
            levels = self._levels[metric.key, engine]
            changes = _sums(data, (metric.key,))
            for labels in changes if metric.labels else ((),):
                levels[labels] += changes.get(labels, 0.0)
            # Gauges are only ever set, because vLLM's wrapper under Ray offers nothing else, and with every observation, changed
            # or not: Ray drops a gauge that was not set for 20 s.
            for labels, level in levels.items():
                made.labels(*values, *labels).set(level)

    @contextmanager
    def _guarded(self, name: str) -> Generator[None]:
        try:
            yield
        except Exception:
            if name not in self._failed:
                _logger.exception("the connector's metric %s is incomplete", name)
            self._failed.add(name)


def _sums(data: Data, keys: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Return the sums of observations by the values of their labels; the kinds are those of `metric_tables`.

    Example: `["timed-out", "timed-out", "peer-silent"]` gives `{("timed-out",): 2, ("peer-silent",): 1}`.
    """
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for value in (value for key in keys for value in data.get(key, ())):
        if isinstance(value, list):
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


def _percentile_90(values: Sequence[float]) -> float:
    """Return the 90th percentile, interpolated between neighbours: 9.1 for the numbers 1 to 10."""
    if len(values) < 2:
        return sum(values)
    return quantiles(values, n=10, method="inclusive")[-1]
