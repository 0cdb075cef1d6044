"""The start of an engine: refusals over vLLM's own configuration objects, the line that introduces the connector, its metric."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import prometheus_client
import pytest
from engine import FULL, STATE
from full_engine import FullEngine
from vllm.config import ModelConfig
from vllm.config.kv_transfer import KVRole, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform

from kv_nixl_agent import AgentError
from vllm_adapter import KVTransferConnector, NixlConnector
from vllm_adapter.config import load_settings
from vllm_adapter.config.whole import HOST_KEYS, ROLES
from vllm_adapter.errors import UnsupportedHost
from vllm_adapter.host import vllm as vllm_seam
from vllm_adapter.host.metrics import TransferStats

Change = Callable[[Any, pytest.MonkeyPatch], None]


def _drafts_on_a_mirrored_stage(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    config.kv_transfer_config.kv_buffer_device = "cpu"
    config.kv_transfer_config.kv_role = "kv_producer"
    config.kv_transfer_config.kv_connector_extra_config["bidirectional_kv_xfer"] = False
    config.parallel_config.pipeline_parallel_size = 2
    config.speculative_config = SimpleNamespace()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def _below_a_producer(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role="kv_producer"))
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", outer)


def _return_experts(config: Any) -> None:
    place = getattr(config, "aux_output_config", config.model_config)
    place.enable_return_routed_experts = True


REFUSED: dict[str, Change] = {
    "consumer-pipeline-parallel": lambda it, _: setattr(it.parallel_config, "pipeline_parallel_size", 2),
    "prefill-context-parallel": lambda it, _: setattr(it.parallel_config, "prefill_context_parallel_size", 2),
    "side-channel-wildcard": lambda _, patch: patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0"),
    "side-channel-port": lambda _, patch: patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "tcp://10.96.0.7:5600"),
    "sleep-mode-unsupported": lambda it, _: setattr(it.model_config, "enable_sleep_mode", True),
    "elastic-expert-parallel": lambda it, _: setattr(it.parallel_config, "enable_elastic_ep", True),
    "host-resident-cache": lambda it, _: setattr(it.attention_config, "hisparse_config", SimpleNamespace()),
    "routed-experts-lost": lambda it, _: _return_experts(it),
    "readback-drafted-state": lambda it, _: setattr(it, "speculative_config", SimpleNamespace()),
    "outer-role-differs": _below_a_producer,
    "mirror-pipeline-speculative": _drafts_on_a_mirrored_stage,
}


def test_prompts_are_read_early_only_where_the_end_of_a_chunk_is_known(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("P")
    devices = ("cpu", "cuda", "xpu", "tpu", "npu")
    for case in itertools.product(devices, ("device", "cpu"), (1, 2), (False, True), ("0", "1")):
        assert_read_early(engine, monkeypatch, *case)


def assert_read_early(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    buffer: str,
    stages: int,
    has_drafts: bool,
    runner: str,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    monkeypatch.setattr(type(current_platform), "device_type", device)
    monkeypatch.setattr(type(current_platform), "get_nixl_supported_devices", lambda *_: {"npu": ("npu", "cpu")})
    config = engine.config
    config.kv_transfer_config.kv_buffer_device = device if buffer == "device" and device != "tpu" else "cpu"
    config.parallel_config.pipeline_parallel_size = stages
    config.speculative_config = SimpleNamespace() if has_drafts else None
    cache = SimpleNamespace(needs_kv_cache_zeroing=False)
    is_told = device in {"cpu", "cuda"} or config.kv_transfer_config.kv_buffer_device == "cpu"
    skips_stages = stages > 1 and has_drafts and runner == "0"
    assert bool(vllm_seam._whole_reason(config, cache)) is (skips_stages or not is_told)
    cache.needs_kv_cache_zeroing = True
    assert bool(vllm_seam._whole_reason(config, cache)) is (skips_stages or not is_told or runner == "1")


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_ranks_step_together_where_vllm_runs_them_so(
    make_engine, monkeypatch: pytest.MonkeyPatch, ranks: int, is_moe: bool
) -> None:
    engine = make_engine("P")
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda _: is_moe))
    engine.config.parallel_config.data_parallel_size = ranks
    facts = vllm_seam.engine_facts(engine.config, engine.scheduler.kv_cache_config, is_worker=False)
    assert facts.is_lock_stepped is (ranks > 1 and is_moe)


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER], ids=["scheduler", "worker"])
@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_work_stops_the_engine_at_start(
    make_engine, monkeypatch: pytest.MonkeyPatch, code: str, role: Any
) -> None:
    specs = (STATE, FULL) if code == "readback-drafted-state" else (FULL,)
    engine = make_engine("P", specs=specs, bidirectional_kv_xfer=True)
    REFUSED[code](engine.config, monkeypatch)
    with pytest.raises(UnsupportedHost) as caught:
        KVTransferConnector(engine.config, role, engine.scheduler.kv_cache_config)
    assert caught.value.code == code


def test_tickets_name_the_advertised_address_and_the_listener_keeps_its_own(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    engine = make_engine("P")
    engine.config.parallel_config.data_parallel_index = 2
    keys = {"advertised_host": "203.0.113.7", "advertised_port": 31000}
    for given, place in (({}, ("127.0.0.1", 5602)), (keys, ("203.0.113.7", 31002))):
        settings = load_settings(given)[0]
        facts = vllm_seam.engine_facts(
            engine.config, engine.scheduler.kv_cache_config, is_worker=False, settings=settings
        )
        assert (facts.host, facts.port, facts.listens_on) == (*place, ("127.0.0.1", 5602))


def test_a_backend_that_nixl_has_not_stops_the_engine_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentError, match=r"UCXX.* it has .*UCX") as caught:
        FullEngine(tmp_path / "P", monkeypatch, None, backends=["UCXX"])
    assert caught.value.code == "backend-unavailable"


def test_one_line_says_which_connector_runs(
    make_engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601")
    # vLLM's own set-up of logging keeps its lines from the root, where caplog listens.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, "vllm"):
        make_engine("P", kv_lease_duration=12.5, policy="recompute")
    (line,) = [r.getMessage() for r in caplog.records if "started: " in r.getMessage()]
    assert line.startswith("kv-transfer: started: adapter_version=0.3.0 vllm_version=")
    words = dict(word.split("=") for word in line.split()[2:])
    assert (words["engine"], words["side_channel"]) == ("P", "127.0.0.1:5601")
    assert (words["kv_role"], words["memory"], words["backends"]) == ("kv_both", "DRAM", "UCX")
    assert (words["compatibility_policy"], words["load_failure_policy"]) == ("exact", "recompute")
    assert (words["lease_s"], words["engine_ttl_s"]) == ("12.5", "3600")
    ours = [record for record in caplog.records if record.name == "vllm.vllm_adapter"]
    assert ours
    assert all(record.getMessage().startswith("kv-transfer: ") for record in ours)
    assert all(record.getMessage().count("kv-transfer: ") == 1 for record in ours)


def test_the_info_metric_has_the_same_labels(make_engine) -> None:
    registry = prometheus_client.CollectorRegistry()

    def into(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    config = make_engine("P").config
    KVTransferConnector.build_prom_metrics(
        config, {kind: into(kind) for kind in kinds}, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
    )
    samples = [s for family in registry.collect() for s in family.samples if s.name == "vllm:kv_transfer_info"]
    assert [(sample.labels["engine"], sample.value) for sample in samples] == [("0", 1), ("1", 1)]
    assert samples[0].labels["backends"] == "UCX"
    assert samples[0].labels["kv_role"] == "kv_both"


def test_figures_under_the_hosts_name_come_back_as_ours_from_its_connector_of_connectors() -> None:
    """vLLM finds the class for figures that crossed processes by the name of the connector's class, among those that it knows."""
    name = NixlConnector.__name__
    assert KVConnectorFactory.get_connector_class_by_name(name) is KVTransferConnector
    stats = TransferStats()
    stats.data["num_fence_rejections"] += [1]
    rebuilt = MultiConnector.build_kv_connector_stats({name: stats.to_dict()})
    assert isinstance(rebuilt.data[name], TransferStats)
    assert rebuilt.reduce()[name]["Num fence rejections"] == 1


def test_the_keys_that_the_check_of_a_configuration_knows_are_the_hosts() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(KVTransferConfig)}
    assert set(fields) == set(HOST_KEYS)
    assert set(ROLES) == {role for union in get_args(KVRole) for role in (get_args(union) or (union,))}
