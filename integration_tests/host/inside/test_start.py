"""The start of an engine: refusals over vLLM's own configuration objects, the line that introduces the connector, its metric."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from engine import BLOCK, FULL, STATE
from full_engine import FullEngine
from vllm.config import ModelConfig
from vllm.config.kv_transfer import KVRole, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from kv_handshake.core.pacing import GatedLog
from kv_nixl_agent import AgentError
from vllm_adapter import KVTransferConnector, NixlConnector
from vllm_adapter.config import load_settings
from vllm_adapter.config.whole import HOST_KEYS, ROLES
from vllm_adapter.errors import AdapterError
from vllm_adapter.host import early_checks
from vllm_adapter.host import vllm as vllm_seam
from vllm_adapter.host.metrics import TransferStats
from vllm_adapter.observe.recorder import Guard, Recorder
from vllm_adapter.plugin import register

UUID = "6f01b388-470c-4abb-860b-75c77936f9d2"

Change = Callable[[Any, pytest.MonkeyPatch], None]


def _drafts_on_a_mirrored_stage(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    config.kv_transfer_config.kv_buffer_device = "cpu"
    config.kv_transfer_config.kv_role = "kv_producer"
    config.kv_transfer_config.kv_connector_extra_config["bidirectional_kv_xfer"] = False
    config.parallel_config.pipeline_parallel_size = 2
    config.speculative_config = SimpleNamespace(use_eagle=lambda: False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def _below_a_producer(_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role="kv_producer"))
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", outer)


def _sleep_on_an_older_host(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    config.model_config.enable_sleep_mode = True


def _turns_longer_than_blocks(config: Any, _: pytest.MonkeyPatch) -> None:
    parallel = config.parallel_config
    parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size = 2, 2 * BLOCK
    parallel._allow_auto_resolve_cp_interleave_size = False


def _return_experts(config: Any) -> None:
    place = getattr(config, "aux_output_config", config.model_config)
    place.enable_return_routed_experts = True


REFUSED: dict[str, Change] = {
    "prefill-context-parallel": lambda it, _: setattr(it.parallel_config, "prefill_context_parallel_size", 2),
    "context-turns-uneven": _turns_longer_than_blocks,
    "side-channel-wildcard": lambda _, patch: patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0"),
    "side-channel-port": lambda _, patch: patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "tcp://10.96.0.7:5600"),
    "sleep-mode-unsupported": _sleep_on_an_older_host,
    "elastic-expert-parallel": lambda it, _: setattr(it.parallel_config, "enable_elastic_ep", True),
    "host-resident-cache": lambda it, _: setattr(it.attention_config, "hisparse_config", SimpleNamespace()),
    "encoder-decoder": lambda it, _: setattr(it.model_config, "is_encoder_decoder", True),
    "routed-experts-lost": lambda it, _: _return_experts(it),
    "readback-drafted-state": lambda it, _: setattr(it, "speculative_config", SimpleNamespace(use_eagle=lambda: False)),
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
    is_stated = device in {"cpu", "cuda"} or config.kv_transfer_config.kv_buffer_device == "cpu"
    skips_stages = stages > 1 and has_drafts and runner == "0"
    has_v2_runner = bool(config.use_v2_model_runner)
    assert bool(vllm_seam._whole_reason(config, cache, has_v2_runner=has_v2_runner)) is (skips_stages or not is_stated)
    cache.needs_kv_cache_zeroing = True
    reason = vllm_seam._whole_reason(config, cache, has_v2_runner=has_v2_runner)
    assert bool(reason) is (skips_stages or not is_stated or runner == "1")


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


@pytest.mark.proves(
    "prefill context parallelism: proof = prefill-context-parallel",
    "sleep before vLLM 0.33: proof = sleep-mode-unsupported",
    "elastic expert parallelism: proof = elastic-expert-parallel",
    "pages in host memory: proof = host-resident-cache",
    "routed experts in answers: proof = routed-experts-lost",
    "encoder-decoder models: proof = encoder-decoder",
    "uneven turns of context ranks: proof = context-turns-uneven",
)
@pytest.mark.parametrize("role", [*KVConnectorRole, None], ids=["scheduler", "worker", "before-weights"])
@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_work_stops_the_engine_at_start(
    make_engine, monkeypatch: pytest.MonkeyPatch, code: str, role: Any
) -> None:
    if role is None and code in {"readback-drafted-state", "context-turns-uneven"}:
        return  # the groups of layers are not known before
    specs = (STATE, FULL) if code == "readback-drafted-state" else (FULL,)
    engine = make_engine("P", specs=specs, prefix_caching=False, bidirectional_kv_xfer=True)
    REFUSED[code](engine.config, monkeypatch)
    start = partial(KVTransferConnector, engine.config, role, engine.scheduler.kv_cache_config)
    with pytest.raises(AdapterError) as caught:
        start() if role is not None else create_engine_config(engine, monkeypatch)
    assert caught.value.code == code


def create_engine_config(engine: Any, monkeypatch: pytest.MonkeyPatch, *, is_first: bool = True) -> Any:
    """Let vLLM make an engine's configuration, whose first process has loaded the plugin."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda _: engine.config)
    if is_first:
        monkeypatch.setattr(early_checks, "_has_passed", threading.Event())
    register()
    return EngineArgs.create_engine_config(None)


def test_each_engine_of_an_application_is_checked_but_not_its_port_which_the_first_may_hold(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    engine = make_engine("P")
    with socket.create_server(("127.0.0.1", 0)) as first:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(first.getsockname()[1]))
        monkeypatch.setattr("vllm_adapter.wiring._PORT_TRIES", 1)
        with pytest.raises(AdapterError, match="bind-failed"):
            create_engine_config(engine, monkeypatch)
        early_checks._has_passed.set()
        assert create_engine_config(engine, monkeypatch, is_first=False) is engine.config
    engine.config.kv_transfer_config.kv_connector_extra_config["fence_slot"] = 1
    with pytest.raises(AdapterError, match="unknown-key"):
        create_engine_config(engine, monkeypatch, is_first=False)


@pytest.mark.full
def test_back_ends_that_do_not_start_are_refused_before_the_weights(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("P")
    keys = engine.config.kv_transfer_config.kv_connector_extra_config
    for backends in (["UXC"], {"UCX": {"num_wokers": "2"}}):
        keys["backends"] = backends
        with pytest.raises(AdapterError, match="backend-unavailable"):
            create_engine_config(engine, monkeypatch)
    keys["backends"] = {"UCX": {"num_workers": "2"}}
    assert create_engine_config(engine, monkeypatch) is engine.config


UNCHECKED: dict[str, Change] = {
    "switched-off": lambda _, patch: patch.setenv(early_checks.SWITCH, "0"),
    "child-process": lambda _, patch: patch.setattr("multiprocessing.parent_process", object),
    "perhaps-elsewhere": lambda it, _: setattr(it.parallel_config, "ray_runtime_env", SimpleNamespace()),
    "ranks-by-ray": lambda it, _: setattr(it.parallel_config, "data_parallel_backend", "ray"),
    "no-rank-here": lambda it, _: setattr(it.parallel_config, "data_parallel_size_local", 0),
    "no-connector": lambda it, _: setattr(it, "kv_transfer_config", None),
    "others": lambda it, _: setattr(it.kv_transfer_config, "kv_connector", "ExampleConnector"),
    "unknown-host": lambda it, _: delattr(it, "parallel_config"),
}


@pytest.mark.parametrize("case", UNCHECKED)
def test_a_configuration_that_cannot_be_checked_before_the_weights_passes(
    make_engine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    engine = make_engine("P")
    engine.config.kv_transfer_config.kv_connector_extra_config["fence_slot"] = 1
    UNCHECKED[case](engine.config, monkeypatch)
    assert create_engine_config(engine, monkeypatch) is engine.config


def test_tickets_name_the_advertised_address_and_the_listener_keeps_its_own(
    make_engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    engine = make_engine("P")
    engine.config.parallel_config.data_parallel_index = 2
    for address, place in (
        ("", ("127.0.0.1", 5602)),
        ("203.0.113.7", ("203.0.113.7", 5602)),
        ("203.0.113.7:31000", ("203.0.113.7", 31002)),
        ("[fd00::1]:31000", ("fd00::1", 31002)),
        ("fd00::1", ("fd00::1", 5602)),
    ):
        settings = load_settings({"advertised_host": address})[0]
        facts = vllm_seam.engine_facts(
            engine.config, engine.scheduler.kv_cache_config, is_worker=False, settings=settings
        )
        assert (facts.host, facts.port, facts.listens_on) == (*place, ("127.0.0.1", 5602))


@pytest.mark.parametrize(
    ("engine_id", "names"),
    [
        ("P", ["P_dp0", "P_dp1", "P_dp2"]),
        (UUID, ["both@[fd00::1]:5600", "both@[fd00::1]:5601", f"{UUID}_dp2"]),
    ],
)
def test_info_names_each_rank_of_a_server_as_the_rank_itself_does(
    make_engine, monkeypatch: pytest.MonkeyPatch, engine_id: str, names: list[str]
) -> None:
    """vLLM appends the rank to the id in the process of the rank alone; where ranks of other machines listen is not known."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "fd00::1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    engine = make_engine(engine_id)
    config = engine.config
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    parallel.data_parallel_size, parallel.data_parallel_size_local = 3, 2
    info = [vllm_seam.info_of(config, load_settings({})[0], rank) for rank in range(3)]
    assert [each["engine_name"] for each in info] == names
    assert [each["side_channel"] for each in info] == ["[fd00::1]:5600", "[fd00::1]:5601", ""]
    parallel.data_parallel_index, transfer.engine_id = 1, f"{engine_id}_dp1"
    assert vllm_seam.engine_facts(config, engine.scheduler.kv_cache_config, is_worker=False).name == names[1]


def test_a_backend_that_nixl_has_not_stops_the_engine_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentError, match=r"UCXX.* it has .*UCX") as caught:
        FullEngine(tmp_path / "P", monkeypatch, None, backends=["UCXX"])
    assert caught.value.code == "backend-unavailable"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Lines of the host's log. `caplog` listens at the root, which vLLM's lines reach or not, as its set-up of logging has it."""
    logger, found, handler = logging.getLogger("vllm"), list[logging.LogRecord](), logging.Handler()
    monkeypatch.setattr(handler, "emit", found.append)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_one_line_says_which_connector_runs(
    make_engine, monkeypatch: pytest.MonkeyPatch, records: list[logging.LogRecord]
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5601")
    monkeypatch.setenv("UCX_TLS", "cuda_ipc")
    make_engine("P", kv_lease_duration=12.5, policy="recompute")
    (line,) = [r.getMessage() for r in records if "started: " in r.getMessage()]
    assert line.startswith(
        "kv-transfer: started: name=P engine_id=P kv_role=kv_both side_channel=127.0.0.1:5601 model="
    )
    words = dict(word.split("=") for word in line.split()[2:])
    assert (words["adapter_version"], words["memory"], words["backends"]) == ("0.3.0", "DRAM", "UCX")
    assert (words["compatibility_policy"], words["load_failure_policy"]) == ("exact", "recompute")
    assert (words["lease_s"], words["engine_ttl_s"]) == ("12.5", "3600")
    warned = [r.getMessage() for r in records if r.levelno == logging.WARNING]
    assert [line.rpartition(" ")[2] for line in warned if "UCX_TLS" in line] == ["(ucx-without-host-memory)"]


def test_lines_of_libraries_and_of_every_helper_reach_the_hosts_log_under_their_callers_place(
    records: list[logging.LogRecord],
) -> None:
    """`conftest.py` looks at the form of every line of every other test."""
    recorder, gated = Recorder(), GatedLog()
    gated.warning("topic", "1")
    gated.call(Counter(), "2", partial(setattr, object(), "absent", 1))
    logging.getLogger("kv_nixl_agent").warning("3")
    recorder.info("cause", "4")
    recorder.trouble("5", ValueError())
    with recorder.guarded("6"), Guard(recorder, "7"):
        raise ValueError
    with recorder.guarded("8"):
        raise ValueError
    assert [record.getMessage()[:14] for record in records] == [f"kv-transfer: {n}" for n in (1, 2, 3, 4, 5, 7, 8)]
    assert {record.pathname for record in records} == {__file__}


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
