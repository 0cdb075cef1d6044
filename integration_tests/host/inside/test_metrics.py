"""A scrape's view of statistics that crossed from workers and scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from vllm_adapter.host.metrics import PromMetrics, TransferStats


@pytest.fixture(scope="module")
def page() -> Any:
    classes = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    config: Any = SimpleNamespace(kv_transfer_config=None)
    values: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    metrics = PromMetrics(config, {kind: kind for kind in classes}, ["model_name", "engine"], values)

    def observe(engine: int = 0, **data: list[Any]) -> None:
        total = TransferStats()
        for key, items in data.items():
            # Interval after interval, and rank after rank, as vLLM adds them up.
            for item in items:
                total.aggregate(TransferStats(data={key: [item]}))
        metrics.observe(total.data, engine)

    return observe


def sample(name: str, **labels: str) -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def test_failures_are_counted_by_code(page: Any) -> None:
    page(num_failed_reads=["timed-out", "fence-mismatch", "timed-out"], num_refused_tickets=["ticket-type"])
    page(engine=1, num_failed_reads=["timed-out"])
    assert sample("vllm:kv_transfer_num_failed_reads_total", code="timed-out") == 2
    assert sample("vllm:kv_transfer_num_failed_reads_total", code="fence-mismatch") == 1
    assert sample("vllm:kv_transfer_num_refused_tickets_total", code="ticket-type") == 1


def test_levels_follow_their_changes_over_ranks_and_intervals(page: Any) -> None:
    page(quarantined_bytes=[4096, 100], live_requests=[{"consumer-reading": 3, "consumer-queued": 1}])
    page(quarantined_bytes=[-4096], live_requests=[{"consumer-reading": -2}])
    assert sample("vllm:kv_transfer_quarantined_bytes") == 100
    assert sample("vllm:kv_transfer_live_requests", state="consumer-reading") == 1
    assert sample("vllm:kv_transfer_live_requests", state="consumer-queued") == 1


def test_bytes_add_up_by_backend_memory_and_the_transports_that_ucx_may_use(page: Any) -> None:
    page(read_bytes=[["UCX", "DRAM->VRAM", "unset", 1000], ["UCX", "DRAM->VRAM", "unset", 24]])
    page(read_bytes=[["unknown", "DRAM->DRAM", "", 7]])
    name = "vllm:kv_transfer_read_bytes_total"
    assert sample(name, backend="UCX", memory="DRAM->VRAM", ucx_tls="unset") == 1024
    assert sample(name, backend="unknown", memory="DRAM->DRAM", ucx_tls="") == 7


def test_late_heartbeats_show_in_the_bucket_of_their_lag(page: Any) -> None:
    page(heartbeat_lag_seconds=[0.0, 0.0, 6.5, 15.5], heartbeat_delay_seconds=[0.2], num_unsent_heartbeats=[1])
    name = "vllm:kv_transfer_heartbeat_lag_seconds_bucket"
    assert [sample(name, le=le) for le in ("0.05", "5.0", "7.5", "15.0", "+Inf")] == [2, 2, 3, 3, 4]
    assert sample("vllm:kv_transfer_heartbeat_delay_seconds_sum") == 0.2
    assert sample("vllm:kv_transfer_num_unsent_heartbeats_total") == 1


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
    metrics = PromMetrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]}, info={"version": "1"})
    assert values.keys() == {("vllm:kv_transfer_info", engine, "1") for engine in "01"}
    data = TransferStats().data
    metrics.observe({**data, "quarantined_bytes": [4096, -1024], "live_requests": [{"leased": 3, "reading": 1}]})
    metrics.observe({**data, "quarantined_bytes": [-1024], "live_requests": [{"leased": -1}]})
    once = {key: value for key, value in values.items() if key[1] == "0"}
    assert once["vllm:kv_transfer_quarantined_bytes", "0"] == 2048
    assert once["vllm:kv_transfer_live_requests", "0", "leased"] == 2
    values.clear()
    metrics.observe({**data, "num_lease_renewals": [1]})
    assert values == once
    assert failures == []
