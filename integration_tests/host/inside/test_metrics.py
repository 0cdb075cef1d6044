"""A scrape's view of statistics that crossed from workers and scheduler, beside those of vLLM's own connector.

The same observations give the same names, buckets, counts and log keys.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from engine import hand_over, prompt
from seeds import for_seeds
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from vllm_adapter.host.metrics import PromMetrics, TransferStats
from vllm_adapter.observe.metric_tables import METRICS

CONFIG: Any = SimpleNamespace(kv_transfer_config=None)
LABELS = {"model_name": "tiny", "engine": "0"}
EVENTS = (
    "num_failed_transfers",
    "num_failed_notifications",
    "num_failed_handshakes",
    "num_kv_expired_reqs",
    "num_notifications_after_expiry",
)


def interval(draw: random.Random) -> dict[str, list[float]]:
    transfers = draw.choice((0, 0, 1, 2, 3, 10, 57))
    data: dict[str, list[float]] = {key: [1] * draw.choice((0, 0, 1, 4)) for key in EVENTS}
    data["transfer_duration"] = [draw.uniform(1e-4, 8.0) for _ in range(transfers)]
    data["post_duration"] = [draw.uniform(1e-6, 2.0) for _ in range(transfers)]
    data["bytes_transferred"] = [draw.randrange(2**34) for _ in range(transfers)]
    data["num_descriptors"] = [draw.randrange(60000) for _ in range(transfers)]
    return data


@for_seeds(60)
def test_the_log_line_has_the_hosts_keys_and_figures(seed: int) -> None:
    draw = random.Random(seed)
    ours, hosts = TransferStats(), NixlKVConnectorStats()
    for data in [interval(draw) for _ in range(draw.randrange(1, 4))]:
        ours.aggregate(TransferStats(data=TransferStats().data | data))
        hosts.aggregate(NixlKVConnectorStats(data={key: list(values) for key, values in data.items()}))
    figures, expected = ours.reduce(), hosts.reduce()
    assert list(figures) == list(expected)
    assert figures == pytest.approx(expected)


def test_fence_rejections_follow_the_hosts_keys_once_there_are_any() -> None:
    stats = TransferStats()
    stats.data["num_fence_rejections"] += [1, 1]
    assert list(stats.reduce().items()) == [*NixlKVConnectorStats().reduce().items(), ("Num fence rejections", 2)]


def made(metrics_class: Any, registry: prometheus_client.CollectorRegistry, **more: Any) -> Any:
    """Return metrics of two engines in a registry of their own."""

    def into(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    values: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    return metrics_class(CONFIG, {kind: into(kind) for kind in kinds}, list(LABELS), values, **more)


def page(metrics_class: Any, intervals: list[dict[str, Any]], engine: int = 0) -> dict[str, float]:
    """Return the samples of the first engine's page after what an engine observed: by name and values of further labels."""
    registry = prometheus_client.CollectorRegistry()
    metrics = made(metrics_class, registry)
    for data in intervals:
        metrics.observe(data, engine)
    return {
        " ".join([sample.name, *(value for name, value in sample.labels.items() if name not in LABELS)]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels["engine"] == "0" and not sample.name.endswith("_created")
    }


@for_seeds(20)
def test_a_scrape_has_the_hosts_names_buckets_and_counts(seed: int) -> None:
    intervals = [interval(random.Random(1000 + seed + n)) for n in range(3)]
    ours, hosts = page(PromMetrics, intervals), page(NixlPromMetrics, intervals)
    of_hosts = {name: value for name, value in ours.items() if name.startswith("vllm:nixl_")}
    assert of_hosts == pytest.approx(hosts)


LAG = "vllm:kv_transfer_heartbeat_lag_seconds_bucket"
OWN: dict[str, tuple[list[dict[str, list[Any]]], dict[str, float]]] = {
    "failures by code": (
        [
            {"num_failed_reads": ["timed-out", "fence-mismatch", "timed-out"], "num_refused_tickets": ["ticket-type"]},
            {"num_failed_reads": ["ValueError"]},
        ],
        {
            "vllm:kv_transfer_num_failed_reads_total timed-out": 2,
            "vllm:kv_transfer_num_failed_reads_total fence-mismatch": 1,
            "vllm:kv_transfer_num_failed_reads_total hash-mismatch": 0,
            "vllm:kv_transfer_num_failed_reads_total ValueError": 1,
            "vllm:kv_transfer_num_withheld_tickets_total lease-quota": 0,
            "vllm:kv_transfer_num_refused_tickets_total ticket-type": 1,
        },
    ),
    "levels by their changes": (
        [
            {"quarantined_bytes": [4096, 100], "live_requests": [["consumer-reading", 3], ["consumer-queued", 1]]},
            {"quarantined_bytes": [-4096], "live_requests": [["consumer-reading", -2]]},
        ],
        {
            "vllm:kv_transfer_quarantined_bytes": 100,
            "vllm:kv_transfer_live_requests consumer-reading": 1,
            "vllm:kv_transfer_live_requests consumer-queued": 1,
        },
    ),
    "bytes by path": (
        [
            {"read_bytes": [["UCX", "DRAM->VRAM", "unset", 1000], ["UCX", "DRAM->VRAM", "unset", 24]]},
            {"read_bytes": [["unknown", "DRAM->DRAM", "", 7]]},
        ],
        {
            "vllm:kv_transfer_read_bytes_total UCX DRAM->VRAM unset": 1024,
            "vllm:kv_transfer_read_bytes_total unknown DRAM->DRAM ": 7,
        },
    ),
    "late heartbeats": (
        [
            {
                "heartbeat_lag_seconds": [0.0, 0.0, 6.5, 15.5],
                "heartbeat_delay_seconds": [0.2],
                "num_unsent_heartbeats": [1],
            }
        ],
        {
            **{f"{LAG} {le}": count for le, count in (("0.05", 2), ("5.0", 2), ("7.5", 3), ("15.0", 3), ("+Inf", 4))},
            "vllm:kv_transfer_heartbeat_delay_seconds_sum": 0.2,
            "vllm:kv_transfer_num_unsent_heartbeats_total": 1,
        },
    ),
}


@pytest.mark.parametrize(("intervals", "expected"), OWN.values(), ids=OWN)
def test_figures_of_an_engine_add_up_over_ranks_and_intervals(
    intervals: list[dict[str, list[Any]]], expected: dict[str, float]
) -> None:
    totals = []
    for interval_data in intervals:
        total = TransferStats()
        for key, items in interval_data.items():
            for item in items:  # rank after rank, as vLLM adds them up
                total.aggregate(TransferStats(data={key: [item]}))
        totals.append(total.data)
    samples = page(PromMetrics, totals)
    assert {name: samples[name] for name in expected} == expected
    assert not any(page(PromMetrics, totals, engine=1).get(name) for name in expected), "another engine's are apart"


def raised_gauges(intervals: list[dict[str, Any]]) -> dict[str, float]:
    """Return the gauges of a page that are not 0."""
    names = {metric.name for metric in METRICS if metric.kind == "gauge"}
    return {name: value for name, value in page(PromMetrics, intervals).items() if value and name.split()[0] in names}


def test_the_gauges_of_an_engine_that_has_become_idle_are_zero(producer: Any, consumer: Any) -> None:
    """After a burst of less than a second no step follows, and vLLM asks for no statistics."""
    for number in range(3):
        ticket = hand_over(producer, f"p{number}", prompt(40, seed=number))
        consumer.add(f"d{number}", prompt(40, seed=number), params=ticket)
    consumer.step()
    consumer.run(received=["d0", "d1", "d2"])
    producer.run(sent=["p0", "p1", "p2"])
    for engine in (producer, consumer):
        assert raised_gauges(engine.stats[:1])
        assert raised_gauges(engine.stats) == {}


# -------------------------------------------------------------------------------------------------- never raising


class Faulty:
    """A metric of a wrapper that was not made for this connector: one of its methods is missing, or fails."""

    def __init__(self, fault: str, *, is_missing: bool) -> None:
        self._fault, self._is_missing = fault, is_missing

    def __call__(self, **_options: Any) -> Any:
        return self._do("make")

    def __getattr__(self, name: str) -> Any:
        if name not in {"labels", "inc", "set", "observe"} or (name == self._fault and self._is_missing):
            raise AttributeError(name)
        return lambda *_values, **_labels: self._do(name)

    def _do(self, name: str) -> Any:
        if name == self._fault:
            raise RuntimeError(f"{name} fails")
        return self


FULL: dict[str, list[Any]] = TransferStats().data | {
    "transfer_duration": [0.1],
    "num_failed_handshakes": [1],
    "num_failed_reads": ["timed-out"],
    "quarantined_bytes": [4096],
    "live_requests": [["leased", 1]],
    "read_bytes": [["UCX", "DRAM->DRAM", "unset", 7]],
}


@pytest.mark.parametrize(
    ("fault", "is_missing"), [*itertools.product(("labels", "inc", "set", "observe"), (True, False)), ("make", False)]
)
def test_no_wrapper_of_metrics_makes_a_statistic_raise(
    monkeypatch: pytest.MonkeyPatch, fault: str, is_missing: bool
) -> None:
    seen: list[object] = []
    monkeypatch.setattr("vllm_adapter.host.metrics._logger.exception", lambda _text, name: seen.append(name))
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    faulty: Any = {kind: Faulty(fault, is_missing=is_missing) for kind in kinds}
    metrics = PromMetrics(CONFIG, faulty, list(LABELS), {0: list(LABELS.values())}, info={0: {"version": "1"}})
    metrics.observe(FULL)
    once = list(seen)
    assert len(once) == len(set(once)) > 0
    metrics.observe(FULL)
    assert seen == once, "each metric is logged once"


ODD: tuple[dict[str, Any], ...] = (
    {"transfer_duration": ["no number"]},
    {"transfer_duration": [None], "bytes_transferred": [1]},
    {"num_failed_transfers": ["x"]},
    {"quarantined_bytes": [{}]},
    {"live_requests": [7]},
    {"read_bytes": [[]]},
    {"unheard_of": [1]},
    {"num_failed_transfers": None},
)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: next(iter(odd)))
def test_no_observation_makes_a_statistic_raise_and_the_others_are_recorded(odd: dict[str, Any]) -> None:
    samples = page(PromMetrics, [odd, {**odd, "num_kv_expired_reqs": [1]}, {"num_kv_expired_reqs": [1]}])
    assert samples["vllm:nixl_num_kv_expired_reqs_total"] == 2
    stats = TransferStats(data=dict(odd))
    stats.aggregate(TransferStats(data=dict(odd))).aggregate(TransferStats(data={"num_kv_expired_reqs": [1]}))
    assert stats.reduce()["Num KV expired reqs"] == 1
    assert not stats.is_empty()


def test_an_unknown_engine_does_not_make_a_statistic_raise() -> None:
    made(PromMetrics, prometheus_client.CollectorRegistry()).observe(FULL, 3)


def test_gauges_can_only_be_set_under_ray_and_are_set_with_every_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Gauge.inc` raised AttributeError in Ray's wrapper, and Ray drops a gauge that was not set for 20 s."""
    values: dict[tuple[str, ...], float] = {}

    class OnlySet:
        def __init__(self, name: str = "", *_: Any, **_options: Any) -> None:
            self._key: tuple[str, ...] = (name,)

        def labels(self, *labels: str) -> OnlySet:
            child = type(self)()
            child._key = (*self._key, *map(str, labels))
            return child

        def set(self, value: float) -> None:
            values[self._key] = value

    class Ignored(OnlySet):
        def inc(self, _value: float = 1) -> None: ...
        def observe(self, _value: float) -> None: ...

    kinds: Any = {
        prometheus_client.Gauge: OnlySet,
        prometheus_client.Counter: Ignored,
        prometheus_client.Histogram: Ignored,
    }
    failures: list[str] = []
    monkeypatch.setattr("vllm_adapter.host.metrics._logger.exception", failures.append)
    config: Any = SimpleNamespace(kv_transfer_config=None)
    info = {engine: {"side_channel": f"h:{engine}", "lease_s": "10"} for engine in (0, 1)}
    metrics = PromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]}, info=info)
    named = {("vllm:kv_transfer_info", engine, f"h:{engine}", "10") for engine in "01"}
    assert {key for key in values if len(key) > 2} == named
    assert values["vllm:kv_transfer_lease_seconds", "1"] == 10
    assert [values[key] for key in named] == [1, 1]
    data = TransferStats().data
    metrics.observe({**data, "quarantined_bytes": [4096, -1024], "live_requests": [["leased", 3], ["reading", 1]]})
    metrics.observe({**data, "quarantined_bytes": [-1024], "live_requests": [["leased", -1]]})
    once = {key: value for key, value in values.items() if key[1] == "0"}
    assert once["vllm:kv_transfer_quarantined_bytes", "0"] == 2048
    assert once["vllm:kv_transfer_live_requests", "0", "leased"] == 2
    values.clear()
    metrics.observe({**data, "num_lease_renewals": [1]})
    assert values == once
    assert failures == []
