"""Hooks of vLLM besides scheduling: metadata over its side channel, hashes, statistics, several ranks."""

from __future__ import annotations

import functools
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from engine import BLOCK, hand_over, prompt
from engines import free_port
from full_engine import LAYER
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata as host_metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kv_handshake import Codec
from vllm_adapter import KVTransferConnector
from vllm_adapter.host.metrics import TransferStats
from vllm_adapter.host.vllm import engine_facts
from vllm_adapter.steps import RankRegistration


@pytest.fixture(name="free_port")
def side_channel_port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    return port


def _ask(port: int, *query: object, kind: int = zmq.REQ) -> list[bytes]:
    """Ask as vLLM's own workers do, or with a DEALER as ours do."""
    with zmq.Context() as context, context.socket(kind) as link:
        link.setsockopt(zmq.RCVTIMEO, 60_000)
        link.setsockopt(zmq.LINGER, 0)
        link.connect(f"tcp://127.0.0.1:{port}")
        link.send(msgspec.msgpack.encode((host_metadata.GET_META_MSG, *query)))
        return link.recv_multipart()


def test_each_ranks_metadata_is_served_as_it_was_given(make_engine, free_port: int) -> None:
    connector = make_engine("P").scheduler.connector
    envelopes = {
        (pp, tp): msgspec.msgpack.encode({"compatibility_hash": "h", "agent_metadata_bytes": bytes([pp, tp])})
        for pp in range(2)
        for tp in range(2)
    }
    try:
        connector.set_xfer_handshake_metadata_pp_aware({rank: RankRegistration(1, e) for rank, e in envelopes.items()})
        for rank, envelope in envelopes.items():
            assert _ask(free_port, *rank, kind=zmq.DEALER)[0] == envelope
        connector.set_xfer_handshake_metadata({0: RankRegistration(1, envelopes[1, 1])})
        assert _ask(free_port, 0, 0)[0] == envelopes[1, 1]
    finally:
        connector.shutdown()
        connector.shutdown()
    make_engine("Q").scheduler.connector.set_xfer_handshake_metadata({})  # the port is free again


def _hosts_reader(compat_hash: str, *, enforces: bool) -> Any:
    """Return vLLM's own reader of one rank as far as a handshake needs it; `taken` lists the engines that it accepted."""
    reader: Any = object.__new__(NixlPullConnectorWorker)
    reader.transfer_topo = TransferTopology(
        tp_rank=0, tp_size=1, block_size=BLOCK, engine_id="D", is_mla=False, is_mamba=False, total_num_kv_heads=2,
        attn_backends=[], dcp_size=1,
    )  # fmt: skip
    reader.engine_id, reader.compat_hash, reader.enforce_compat_hash = "D", compat_hash, enforces
    reader._is_csa_linear, reader.use_host_buffer = False, True
    reader.pcp_size = reader.dcp_size = 1
    reader._engine_ttl = 0.0
    reader._handshake_lock = threading.RLock()
    reader._handshake_initiation_executor = ThreadPoolExecutor(1)
    reader._handshake_futures, reader._remote_agents, reader._recving_metadata = {}, {}, {}
    reader._failed_recv_reqs, reader._ready_requests = queue.Queue(), queue.Queue()
    reader.xfer_stats = NixlKVConnectorStats()
    reader.taken = []
    reader.add_remote_agent = lambda metadata, *_: reader.taken.append(metadata.engine_id) or "agent"
    reader.shutdown = reader._handshake_initiation_executor.shutdown
    return reader


@pytest.mark.never_wrong("B16")
@pytest.mark.parametrize("enforces", [True, False])
@pytest.mark.parametrize("code", ["pipeline-stages", "context-turns"])
def test_an_engine_that_the_hosts_own_reader_would_read_wrongly_refuses_it(
    make_engine, free_port: int, caplog: pytest.LogCaptureFixture, code: str, *, enforces: bool
) -> None:
    """It pairs all layers of a rank and whole blocks with its own, so it must fail its request by our code and keep no state."""
    engine, stages = make_engine("P"), 2 if code == "pipeline-stages" else 1
    engine.config.parallel_config.decode_context_parallel_size = 3 - stages
    connector = KVTransferConnector(engine.config, KVConnectorRole.SCHEDULER, engine.scheduler.kv_cache_config)
    metadata = msgspec.msgpack.encode(
        host_metadata.NixlAgentMetadata(
            engine_id="P",
            agent_metadata=b"",
            kv_caches_base_addr=[1],
            device_id=0,
            num_blocks=1,
            block_lens=[1],
            block_strides=[1],
            kv_cache_layout="LBHNC",
            block_size=BLOCK,
            ssm_sizes=(0, 0),
            attn_backend_name="",
            physical_blocks_per_logical_kv_block=1,
        )
    )
    envelope = msgspec.msgpack.encode({"compatibility_hash": "h", "agent_metadata_bytes": metadata})
    reader = _hosts_reader("h", enforces=enforces)
    try:
        connector.set_xfer_handshake_metadata_pp_aware({(pp, 0): RankRegistration(1, envelope) for pp in range(stages)})
        for number in range(3):
            remote = host_metadata.RemoteMeta([[1]], "127.0.0.1", free_port, "P", f"p{number}")
            meta = host_metadata.ReqMeta([[1]], [[1]], 1, remote=remote, pp_size=stages)
            reader._background_nixl_handshake(f"d{number}", "P", meta)
            while not reader.taken and reader._failed_recv_reqs.empty():
                time.sleep(0.01)
            assert not reader.taken, "the metadata of one stage was given out"
            assert reader._failed_recv_reqs.get() == f"d{number}"
        assert reader._ready_requests.empty()
    finally:
        reader.shutdown()
        connector.shutdown()
    assert caplog.text.count(f"asks as vLLM's own connector does, so it is refused ({code})") == 1, (
        "said once for each address"
    )


def _hosts_push_scheduler(config: Any) -> Any:
    """Return vLLM's own scheduler half in push mode, as far as a registration needs it."""
    scheduler: Any = object.__new__(NixlPushConnectorScheduler)
    scheduler.vllm_config, scheduler.engine_id = config, "D"
    scheduler.side_channel_host, scheduler.side_channel_port = "127.0.0.1", 1
    scheduler.use_host_buffer = scheduler._is_hma_required = False
    scheduler.kv_cache_config = SimpleNamespace(select_transfer_block_ids=lambda blocks: blocks)
    scheduler._push_registration_timeout = 480.0
    scheduler._push_pending_registrations, scheduler._push_registration_deadlines = {}, {}
    scheduler._reqs_need_recv = {}
    return scheduler


@pytest.mark.proves("push: proof = ticket-mode")
def test_a_ticket_of_vllms_push_producer_is_refused_by_its_mode(make_engine, caplog: pytest.LogCaptureFixture) -> None:
    ticket = hand_over(make_engine("P"), "p", prompt(40))
    consumer = make_engine("D", policy="recompute")
    consumer.add("d", prompt(40), params={**ticket, "transfer_mode": NixlPushConnectorScheduler._TRANSFER_MODE})
    consumer.step()
    assert (consumer.reads, caplog.text.count("(ticket-mode)")) == ([], 1)


def test_a_registration_of_a_push_reader_ends_the_lease_at_once(make, caplog: pytest.LogCaptureFixture) -> None:
    """It comes from a reader that skips the check of hashes, and means that the prompt will not be read."""
    producer = make("P", kv_lease_duration=60)
    reader = _hosts_push_scheduler(producer.config)
    for number in range(2):
        ticket = producer.prefill(f"cmpl-{number}-0-0f1e2d3c", prompt(20, number))
        waiting = SimpleNamespace(request_id=f"cmpl-{number}-0-4B5A6978", kv_transfer_params=ticket)
        blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [[1, 2]])
        reader.update_state_after_alloc(waiting, blocks, 20)
        registration = reader._push_pending_registrations[waiting.request_id]
        payload = host_metadata.PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(registration)
        running = producer.side._registration
        running.agent.call_soon(functools.partial(running.leases.notified, "D/0", payload))
        producer.until(sent=f"cmpl-{number}-0-0f1e2d3c", within_s=20)
    producer.assert_nothing_left()
    assert caplog.text.count("is in push mode") == 1, "said once for each reader"


@pytest.mark.parametrize("change", ["none", "dtype", "cache_dtype", "model", "hybrid"])
def test_the_hash_is_the_hosts_own_and_changes_with_what_matters(make_engine, change: str) -> None:
    engine = make_engine("P")
    config, cache = engine.config, engine.scheduler.kv_cache_config
    before = Codec().compatibility_hash(engine_facts(config, cache, is_worker=False).factors)
    if change == "dtype":
        config.model_config.dtype = "bfloat16"
    elif change == "cache_dtype":
        config.cache_config.cache_dtype = "fp8"
    elif change == "model":
        config.model_config.model = "another"
    elif change == "hybrid":
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
    after = Codec().compatibility_hash(engine_facts(config, cache, is_worker=False).factors)
    assert after == host_metadata.compute_nixl_compatibility_hash(config, "")
    assert (after == before) == (change == "none")


def test_pages_are_asked_for_head_by_head_and_latent_ones_as_they_are(make_engine) -> None:
    config = make_engine("P").config
    assert KVTransferConnector.get_required_kvcache_layout(config) == "LBHNC"
    latent = type("Latent", (), {"model_config": type("Model", (), {"use_mla": True})})
    assert KVTransferConnector.get_required_kvcache_layout(latent) is None


def test_a_dummy_batch_disturbs_no_hand_over(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs one on each rank of a mixture of experts that has nothing to compute while another has; it writes to block 0."""
    context = SimpleNamespace(engine=None)
    monkeypatch.setattr(kv_transfer_utils, "get_kv_transfer_group", lambda: context.engine.worker)
    monkeypatch.setattr(kv_transfer_utils, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer_utils, "is_v1_kv_transfer_group", lambda: True)
    monkeypatch.setattr(attention, "get_attention_context", lambda _: (object(), None, context.engine.memory, None))

    def write_null_block(layer_name: str) -> None:  # noqa: ARG001  (the host looks it up by this name)
        context.engine.memory[0] = float("nan")

    run_layer = kv_transfer_utils.maybe_transfer_kv_layer(write_null_block)

    def run_dummies() -> bool:
        for context.engine in (producer, consumer):
            run_layer(LAYER)
        return False

    producer, consumer = make("P"), make("D")
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        monkeypatch.setattr(KVTransferConnector, hook, None)  # a call fails
    tokens = prompt(3 * BLOCK)
    ticket = producer.prefill("p", tokens)
    run_dummies()
    consumer.add("d", tokens, params=ticket)
    consumer.until(lambda: run_dummies() or "d" in consumer.received)
    assert consumer.received["d"]
    consumer.assert_has("d", tokens, producer.weights)
    producer.until(lambda: run_dummies() or "p" in producer.sent)


def _ran(**reported: Any) -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**reported))


def test_a_request_is_done_when_all_ranks_are_and_failed_when_one_is(make_engine) -> None:
    connector = make_engine("D").scheduler.connector
    aggregator = KVOutputAggregator.from_connector(connector, world_size=2)
    first = aggregator.aggregate([_ran(finished_recving={"a"}, failed_recving={"a"}), _ran(finished_sending={"s"})])
    assert not first.kv_connector_output.finished_recving
    assert not first.kv_connector_output.failed_recving
    second = aggregator.aggregate([_ran(finished_sending={"s"}), _ran(finished_recving={"a"})]).kv_connector_output
    assert (second.finished_recving, second.failed_recving, second.finished_sending) == ({"a"}, {"a"}, {"s"})


def _stats(count: int = 1, **more: list[Any]) -> TransferStats:
    series = {"transfer_duration": 1.5, "post_duration": 0.5, "bytes_transferred": 2**20, "num_descriptors": 2}
    stats = KVTransferConnector.build_kv_connector_stats()
    assert isinstance(stats, TransferStats)
    for key, value in series.items():
        stats.data[key] += [value] * count
    for key, values in more.items():
        stats.data[key] += values
    return stats


def test_the_schedulers_statistics_carry_those_of_the_workers(make_engine) -> None:
    engine = make_engine("D")
    engine.add("local", prompt(20))
    output = engine.scheduler.schedule()
    ran = _ran(kv_connector_stats=_stats(2))
    ran.req_ids, ran.req_id_to_index, ran.sampled_token_ids = ["local"], {"local": 0}, [[1]]
    outputs = engine.scheduler.update_from_output(output, ran)
    (stats,) = [out.scheduler_stats for out in outputs.values() if out.scheduler_stats is not None]
    assert len(stats.kv_connector_stats["transfer_duration"]) == 2
